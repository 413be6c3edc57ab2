package connlimit

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
)

// The rate at which a connection may send without a request from fleetd, in units per
// second, and its burst. Stock firmware sends 17 packets of audio a second, and an
// occasional message.
const (
	FloodRate  = 1_000
	FloodBurst = 2_000
	// The cost of each kind of frame: 1,000 frames of audio, 50 keepalives or 20 messages
	// use up one second.
	CostAudio   = 1
	CostControl = 20
	CostMessage = 50
)

// A connection over its rate is read in steps, at 500 frames a second, so that it
// takes little time from others until its grace ends.
const (
	floodStep  = 32 // frames over the rate
	FloodPause = 64 * time.Millisecond
	// floodGap is how long a connection must stay within its rate to get a new grace.
	floodGap = time.Second
)

// How long a device is blocked after it was closed for flooding. Each further block is
// twice as long, up to LongestBlock. A device that stays within its rate for
// LongestBlock after a block starts again at FirstBlock.
const (
	FirstBlock   = 10 * time.Second
	LongestBlock = 10 * time.Minute
	maxBlocks    = 10_000 // devices remembered; the block that ends first is dropped for a new one
)

// ErrFlood closes a connection that was over its rate for the whole grace.
var ErrFlood = errors.New("device sends faster than its limit for too long")

// Floods limits connections that send without end, and blocks their devices for a
// time. A nil *Floods limits nothing. It is safe for concurrent use.
type Floods struct {
	grace time.Duration

	mu     sync.Mutex
	blocks map[string]block

	Refused atomic.Uint64 // attempts to reconnect while blocked
}

type block struct {
	until  time.Time
	length time.Duration
}

// NewFloods returns Floods that let a connection exceed its rate for the grace.
func NewFloods(grace time.Duration) *Floods {
	return &Floods{grace: grace, blocks: map[string]block{}}
}

// Block blocks a device that was closed for flooding.
func (f *Floods) Block(device string, now time.Time) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	b, known := f.blocks[device]
	if !known && len(f.blocks) >= maxBlocks {
		oldest := ""
		for name, b := range f.blocks {
			if oldest == "" || b.until.Before(f.blocks[oldest].until) {
				oldest = name
			}
		}
		delete(f.blocks, oldest)
	}
	b.length = min(max(2*b.length, FirstBlock), LongestBlock)
	b.until = now.Add(b.length)
	f.blocks[device] = b
}

// Blocked returns how long a device is still blocked, or 0. It counts the attempt if
// the device is blocked.
func (f *Floods) Blocked(device string, now time.Time) time.Duration {
	if f == nil {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	b, known := f.blocks[device]
	switch {
	case !known:
		return 0
	case now.Before(b.until):
		f.Refused.Add(1)
		return b.until.Sub(now)
	case now.Sub(b.until) >= LongestBlock:
		delete(f.blocks, device)
	}
	return 0
}

// Meter measures what one connection sends. It must be used only by the goroutine
// that reads the connection. The zero value is ready to use.
type Meter struct {
	spent  float32
	excess uint32 // frames over the rate since the last pause
	at     int64  // of the last frame, as clock.Reading
	since  int64  // of the first frame over the rate; 0: none
	latest int64  // of the last frame over the rate
}

// Spend counts a frame without a request of fleetd, and pauses while the device exceeds its rate: what it sends waits in its own
// buffers. An error ends the connection.
func (m *Meter) Spend(f *Floods, cost float32) error {
	pause, err := m.Count(f, cost, time.Now())
	time.Sleep(pause)
	return err
}

// Count counts a frame. Above the rate it returns how long the connection must not be
// read, or ErrFlood when the grace is over.
func (m *Meter) Count(f *Floods, cost float32, now time.Time) (pause time.Duration, err error) {
	if f == nil {
		return 0, nil
	}
	at := clock.Reading(now)
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
