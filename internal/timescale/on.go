//go:build timescale

package timescale

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

// factor is FLEETD_TEST_TIME_SCALE, above 0 and at most 1; 1 if it is not set.
var factor = func() float64 {
	text := os.Getenv("FLEETD_TEST_TIME_SCALE")
	if text == "" {
		return 1
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || f <= 0 || f > 1 {
		panic(fmt.Sprintf("FLEETD_TEST_TIME_SCALE is %q, want a number above 0 and at most 1", text))
	}
	return f
}()

// clockError is the error of the node's clock, in tests of clocks that differ: a duration such as "-2.5s".
var clockError = func() time.Duration {
	text := os.Getenv("FLEETD_TEST_CLOCK")
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		panic(fmt.Sprintf("FLEETD_TEST_CLOCK: %v", err))
	}
	return d
}()

// Now returns the time of the node's clock, from which epochs and the times of changes derive.
func Now() time.Time { return time.Now().Add(clockError) }

// Of returns the interval times the factor.
func Of(d time.Duration) time.Duration { return time.Duration(float64(d) * factor) }

// Patience returns a time limit for the database, eight times as long: during all tests it shares two cores with
// a dozen nodes.
func Patience(d time.Duration) time.Duration { return 8 * d }
