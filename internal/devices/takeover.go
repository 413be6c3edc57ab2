package devices

import (
	"time"

	"fleetd/internal/clock"
)

// Limits of takeovers. An id that sessions of different clients took over more than
// maxTakeovers times within takeoverWindow is contested: the current session is kept,
// and other connections are refused for ContestedPause.
const (
	maxTakeovers   = 5
	takeoverWindow = time.Minute
	ContestedPause = 30 * time.Second
)

// Takeovers records the latest takeovers of one device. It is not safe for concurrent use.
type Takeovers struct {
	times        [maxTakeovers]int64 // as clock.Reading, a ring
	next         int8
	refusedUntil int64
}

// Record records that a session of another client takes the device over. It reports
// whether the id is contested.
func (t *Takeovers) Record(now time.Time) bool {
	at := clock.Reading(now)
	if t.Refuses(at) {
		return true
	}
	oldest := t.times[t.next]
	t.times[t.next] = at
	t.next = (t.next + 1) % maxTakeovers
	if oldest == 0 || at-oldest > int64(takeoverWindow) {
		return false
	}
	t.refusedUntil = at + int64(ContestedPause)
	t.times = [maxTakeovers]int64{}
	return true
}

// Refuses reports whether other clients are refused at a reading of the clock; nil refuses none.
func (t *Takeovers) Refuses(at int64) bool { return t != nil && at < t.refusedUntil }
