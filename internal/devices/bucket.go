package devices

import (
	"time"

	"fleetd/internal/clock"
)

// Bucket is a token bucket: it allows a burst, and then a rate per second. The zero
// value is full. It is not safe for concurrent use.
type Bucket struct {
	spent float32 // of the burst
	at    int64   // as clock.Reading
}

// Allow reports whether one more is allowed; a burst of 0 means no limit.
func (b *Bucket) Allow(now time.Time, rate float32, burst int) bool {
	return burst == 0 || b.AllowN(now, 1, rate, burst)
}

// AllowN is Allow for n at once.
func (b *Bucket) AllowN(now time.Time, n int, rate float32, burst int) bool {
	at := clock.Reading(now)
	passed := max(0, at-b.at) // two callers may have read the clock in the other order
	b.spent = max(0, b.spent-rate*float32(passed)/float32(time.Second))
	b.at = at
	if b.spent+float32(n) > float32(burst) {
		return false
	}
	b.spent += float32(n)
	return true
}

// Spent returns how much of the burst is spent at a time.
func (b *Bucket) Spent(now time.Time, rate float32) float32 {
	return max(0, b.spent-rate*float32(max(0, clock.Reading(now)-b.at))/float32(time.Second))
}
