// Package timescale shortens the intervals at which the nodes of a fleet monitor each other (leases, beats,
// pings), for tests of whole programs. All intervals are scaled by one factor, which keeps their proportions.
// Only programs that tests link with Flag read the environment.
package timescale

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

// Flag is the value of the linker flag -X with which tests build programs. The linker sets the variable
// in packages that are compiled already, where a build tag would compile them again.
const Flag = "fleetd/internal/timescale.tested=yes"

// tested is empty in every program that was not linked with Flag.
var tested string

// patience is by how much time limits for the database grow in tests: there it shares two cores with a dozen nodes.
const patience = 8

// factor is FLEETD_TEST_TIME_SCALE, above 0 and at most 1; 1 if it is not set.
var factor = func() float64 {
	text := os.Getenv("FLEETD_TEST_TIME_SCALE")
	if tested == "" || text == "" {
		return 1
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || f <= 0 || f > 1 {
		panic(fmt.Sprintf("FLEETD_TEST_TIME_SCALE is %q, want a number above 0 and at most 1", text))
	}
	return f
}()

// IsTested reports whether this program was linked with Flag.
func IsTested() bool { return tested != "" }

// Of returns the interval times the factor.
func Of(d time.Duration) time.Duration { return time.Duration(float64(d) * factor) }

// Patience returns a time limit for the database, which is longer in tests.
func Patience(d time.Duration) time.Duration {
	if tested == "" {
		return d
	}
	return patience * d
}
