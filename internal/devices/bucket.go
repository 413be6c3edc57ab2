package devices

import "time"

// Bucket allows so many of a thing at once, and then so many a second. The zero
// value is full. Its owner guards it.
type Bucket struct {
	spent float32 // of the burst
	at    int64   // unix nanoseconds
}

// Take tells whether another is allowed; a burst of 0 means no limit.
func (b *Bucket) Take(now time.Time, rate float32, burst int) bool {
	return burst == 0 || b.Spend(now, 1, rate, burst)
}

// Spend is Take for n at once.
func (b *Bucket) Spend(now time.Time, n int, rate float32, burst int) bool {
	at := now.UnixNano()
	passed := max(0, at-b.at) // a clock that was set back costs the device nothing
	b.spent = max(0, b.spent-rate*float32(passed)/float32(time.Second))
	b.at = at
	if b.spent+float32(n) > float32(burst) {
		return false
	}
	b.spent += float32(n)
	return true
}

// Level is how much of the burst is spent at a time.
func (b *Bucket) Level(now time.Time, rate float32) float32 {
	return max(0, b.spent-rate*float32(max(0, now.UnixNano()-b.at))/float32(time.Second))
}
