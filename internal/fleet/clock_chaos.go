//go:build chaos

package fleet

import (
	"os"
	"time"
)

// clockError is how far this node's clock is off, for the chaos test alone: a
// duration such as "-2.5s".
var clockError = func() time.Duration {
	d, _ := time.ParseDuration(os.Getenv("FLEETD_TEST_CLOCK")) // empty: right
	return d
}()

func wallClock() time.Time { return time.Now().Add(clockError) }
