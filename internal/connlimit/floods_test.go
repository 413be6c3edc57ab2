package connlimit

import (
	"errors"
	"fmt"
	"testing"
	"time"
)

// send counts frames at a steady rate, and returns when the connection was closed and
// how long it was not read.
func send(m *Meter, f *Floods, cost float32, perSecond int, from time.Time, length time.Duration) (ended, paused time.Duration) {
	for passed := time.Duration(0); passed < length; passed += time.Second / time.Duration(perSecond) {
		pause, err := m.Count(f, cost, from.Add(passed))
		if errors.Is(err, ErrFlood) {
			return passed, paused
		}
		paused += pause
		passed += pause
	}
	return 0, paused
}

func TestMeter(t *testing.T) {
	begun := time.Now()
	for _, c := range []struct {
		name      string
		cost      float32
		perSecond int
		length    time.Duration
		ends      bool
	}{
		{"speech", CostAudio, 17, time.Hour, false},
		{"audio at the rate limit", CostAudio, 999, 10 * time.Minute, false},
		{"more audio", CostAudio, 1_500, time.Minute, true},
		{"a busy device", CostMessage, 19, time.Hour, false},
		{"messages", CostMessage, 25, time.Minute, true},
		{"a flood of messages", CostMessage, 22_000, time.Minute, true},
		{"a flood that ends in time", CostMessage, 22_000, 9 * time.Second, false},
		{"pings", CostControl, 60, time.Minute, true},
	} {
		f := NewFloods(10 * time.Second)
		ended, paused := send(&Meter{}, f, c.cost, c.perSecond, begun, c.length)
		if (ended > 0) != c.ends || ended > 0 && (ended < 10*time.Second || ended > 25*time.Second) {
			t.Errorf("%s: ended after %v", c.name, ended)
		}
		if !c.ends && c.perSecond < 1_000 && paused > 0 {
			t.Errorf("%s: was not read for %v", c.name, paused)
		}
	}
	m, f := &Meter{}, NewFloods(10*time.Second) // three bursts with pauses are not a flood
	for i := range 3 {
		if ended, _ := send(m, f, CostMessage, 1_000, begun.Add(time.Duration(i)*20*time.Second), 8*time.Second); ended > 0 {
			t.Errorf("burst %d ends the connection after %v", i, ended)
		}
	}
	if _, err := (&Meter{}).Count(nil, 1e9, begun); err != nil {
		t.Error("nil Floods limits a connection")
	}
}

func TestBlocks(t *testing.T) {
	f, now := NewFloods(time.Second), time.Now()
	if wait := f.Blocked("a", now); wait != 0 {
		t.Errorf("an unknown device is blocked for %v", wait)
	}
	want := FirstBlock
	for range 10 {
		f.Block("a", now)
		if wait := f.Blocked("a", now); wait != want {
			t.Errorf("waits %v, want %v", wait, want)
		}
		if wait := f.Blocked("b", now); wait != 0 {
			t.Errorf("another waits %v", wait)
		}
		now = now.Add(want)
		if wait := f.Blocked("a", now); wait != 0 {
			t.Errorf("waits %v longer", wait)
		}
		want = min(2*want, LongestBlock)
	}
	now = now.Add(LongestBlock)
	if f.Blocked("a", now) != 0 || len(f.blocks) != 0 {
		t.Error("it is never forgotten")
	}
	if f.Refused.Load() != 10 {
		t.Errorf("%d attempts are counted", f.Refused.Load())
	}
	for i := range maxBlocks + 10 {
		f.Block(fmt.Sprint(i), now.Add(time.Duration(i)))
	}
	if len(f.blocks) != maxBlocks || f.Blocked("0", now) != 0 || f.Blocked(fmt.Sprint(maxBlocks), now) == 0 {
		t.Errorf("%d devices are remembered", len(f.blocks))
	}
}
