package fleet

import "time"

// bucket allows so many of a thing at once, and then so many a second. The zero
// value is full.
type bucket struct {
	spent float32 // of the burst
	at    int64   // unix nanoseconds
}

// take tells whether another is allowed; a burst of 0 is no limit.
func (b *bucket) take(now time.Time, rate float32, burst int) bool {
	return burst == 0 || b.spend(now, 1, rate, burst)
}

// spend is take for n at once.
func (b *bucket) spend(now time.Time, n int, rate float32, burst int) bool {
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

// level is how much of the burst is spent at a time.
func (b *bucket) level(now time.Time, rate float32) float32 {
	return max(0, b.spent-rate*float32(max(0, now.UnixNano()-b.at))/float32(time.Second))
}

// Fighters: an id that this many sessions of different clients took from each
// other within fightWindow is cloned. The incumbent stays, newcomers are
// refused for fightPause.
const (
	maxTakeovers = 5
	fightWindow  = time.Minute
	fightPause   = 30 * time.Second
)

// takeovers remembers the latest changes of hand of one device.
type takeovers struct {
	times        [maxTakeovers]int64 // unix nanoseconds, a ring
	next         int8
	refusedUntil int64
}

// contested notes that a session of another client takes the device over, and
// returns true if that makes, or keeps, the id contested.
func (t *takeovers) contested(now time.Time) bool {
	at := now.UnixNano()
	if t.refuses(at) {
		return true
	}
	oldest := t.times[t.next]
	t.times[t.next] = at
	t.next = (t.next + 1) % maxTakeovers
	if oldest == 0 || at-oldest > int64(fightWindow) || at < oldest { // or the clock was set back
		return false
	}
	t.refusedUntil = at + int64(fightPause)
	t.times = [maxTakeovers]int64{}
	return true
}

// refuses tells whether newcomers are refused. An end further away than the
// pause is that of a clock that was set back since.
func (t *takeovers) refuses(at int64) bool {
	return at < t.refusedUntil && t.refusedUntil-at <= int64(fightPause)
}
