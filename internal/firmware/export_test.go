package firmware

import "time"

func init() { stepTime = 2 * time.Second }

// SetUnusedTime sets how long bytes of no image are kept, until the function that it returns is called.
func SetUnusedTime(d time.Duration) (restore func()) {
	old := unusedTime
	unusedTime = d
	return func() { unusedTime = old }
}
