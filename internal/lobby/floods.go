package lobby

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// What a connection may send without being asked, in units: so many at once, and
// then so many a second. Stock firmware sends 17 packets of audio a second, and a
// message now and then.
const (
	FloodRate  = 1_000
	FloodBurst = 2_000
	// Costs: 1,000 frames of audio, 50 signs of life or 20 messages a second.
	CostAudio   = 1
	CostControl = 20
	CostMessage = 50
)

// A connection over its rate is read in steps, so that it costs others little until
// its grace is over: 500 frames a second.
const (
	floodStep  = 32 // frames over the rate
	FloodPause = 64 * time.Millisecond
	// floodGap is how long a connection must keep its rate for its grace to begin anew.
	floodGap = time.Second
)

// How long a device must stay away that was closed for flooding. Each time doubles
// it, up to the last; after that long without another it is as if new.
const (
	FirstBar = 10 * time.Second
	LastBar  = 10 * time.Minute
	maxBars  = 10_000 // devices remembered; beyond them the oldest is forgotten
)

// ErrFlood ends a connection that was over its rate for the whole grace.
var ErrFlood = errors.New("device sends more than it may, for longer than it may")

// Floods judges connections that send without end. A nil *Floods lets all be. It is
// safe for concurrent use.
type Floods struct {
	grace time.Duration

	mu   sync.Mutex
	bars map[string]bar

	Refused atomic.Uint64 // attempts to return too soon
}

type bar struct {
	until  time.Time
	length time.Duration
}

// NewFloods returns Floods that let a connection be over its rate for that long.
func NewFloods(grace time.Duration) *Floods {
	return &Floods{grace: grace, bars: map[string]bar{}}
}

// Bar keeps a device away that was closed for flooding.
func (f *Floods) Bar(device string, now time.Time) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	b, known := f.bars[device]
	if !known && len(f.bars) >= maxBars {
		oldest := ""
		for name, b := range f.bars {
			if oldest == "" || b.until.Before(f.bars[oldest].until) {
				oldest = name
			}
		}
		delete(f.bars, oldest)
	}
	b.length = min(max(2*b.length, FirstBar), LastBar)
	b.until = now.Add(b.length)
	f.bars[device] = b
}

// Barred is how long a device has still to stay away, and counts its attempt if it
// must.
func (f *Floods) Barred(device string, now time.Time) time.Duration {
	if f == nil {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	b, known := f.bars[device]
	switch {
	case !known:
		return 0
	case now.Before(b.until):
		f.Refused.Add(1)
		return b.until.Sub(now)
	case now.Sub(b.until) >= LastBar:
		delete(f.bars, device)
	}
	return 0
}

// Meter is what one connection has sent unasked. The goroutine that reads from it
// owns it; the zero value is ready.
type Meter struct {
	spent  float32
	excess uint32 // frames over the rate since the last pause
	at     int64  // unix nanoseconds of the last frame
	since  int64  // of the first frame over the rate, 0: none is
	latest int64  // of the last one
}

// Note counts a frame. Above the rate it tells how long the connection should not be
// read, and returns ErrFlood when the grace is over.
func (m *Meter) Note(f *Floods, cost float32, now time.Time) (pause time.Duration, err error) {
	if f == nil {
		return 0, nil
	}
	at := now.UnixNano()
	m.spent = max(0, m.spent-FloodRate*float32(max(0, at-m.at))/float32(time.Second))
	m.at = at
	if m.spent+cost <= FloodBurst {
		m.spent += cost
		return 0, nil
	}
	if at-m.latest > int64(floodGap) {
		m.since = at
	}
	m.latest = at
	if at-m.since >= int64(f.grace) {
		return 0, ErrFlood
	}
	if m.excess++; m.excess%floodStep == 0 {
		return FloodPause, nil
	}
	return 0, nil
}
