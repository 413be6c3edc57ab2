//go:build !chaos

package fleet

import "time"

// wallClock is the time that epochs are made of.
func wallClock() time.Time { return time.Now() }
