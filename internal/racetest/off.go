//go:build !race

package racetest

// Enabled reports whether the race detector is in the program.
const Enabled = false
