// Package racetest says whether tests run with the race detector, which makes what computes four to ten times as slow, and memory
// larger. `make test` runs all tests at full size without it.
package racetest

import "testing"

// Size is how many of something a test has: fewer with the race detector.
func Size(normal, withRace int) int {
	if Enabled {
		return withRace
	}
	return normal
}

// Skip leaves a test out with the race detector: one whose result is a rate, a share of time or an amount of memory, or that computes for
// long in one goroutine, where there is nothing to detect.
func Skip(t testing.TB, what string) {
	t.Helper()
	if Enabled {
		t.Skip("LACKS: " + what + " means nothing with the race detector")
	}
}
