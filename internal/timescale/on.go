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

// clockError is how far the node's clock is off, in tests of clocks that disagree: a
// duration such as "-2.5s".
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

// Now is the time by the node's clock. Epochs and the times of changes are made of it.
func Now() time.Time { return time.Now().Add(clockError) }

// Of returns the interval times the factor.
func Of(d time.Duration) time.Duration { return time.Duration(float64(d) * factor) }

// Patience returns a time in which the database must have done something, eight
// times as long: beside all tests it shares two cores with a dozen nodes.
func Patience(d time.Duration) time.Duration { return 8 * d }
