package devices

import "time"

// Fighters: an id that this many sessions of different clients took from each
// other within fightWindow is cloned. The incumbent stays, newcomers are
// refused for fightPause.
const (
	maxTakeovers = 5
	fightWindow  = time.Minute
	FightPause   = 30 * time.Second
)

// Takeovers remembers the latest changes of hand of one device. Its owner guards it.
type Takeovers struct {
	times        [maxTakeovers]int64 // unix nanoseconds, a ring
	next         int8
	refusedUntil int64
}

// Contested notes that a session of another client takes the device over, and
// returns true if that makes, or keeps, the id contested.
func (t *Takeovers) Contested(now time.Time) bool {
	at := now.UnixNano()
	if t.Refuses(at) {
		return true
	}
	oldest := t.times[t.next]
	t.times[t.next] = at
	t.next = (t.next + 1) % maxTakeovers
	if oldest == 0 || at-oldest > int64(fightWindow) || at < oldest { // or the clock was set back
		return false
	}
	t.refusedUntil = at + int64(FightPause)
	t.times = [maxTakeovers]int64{}
	return true
}

// Refuses tells whether newcomers are refused. An end further away than the
// pause is that of a clock that was set back since.
func (t *Takeovers) Refuses(at int64) bool {
	return at < t.refusedUntil && t.refusedUntil-at <= int64(FightPause)
}
