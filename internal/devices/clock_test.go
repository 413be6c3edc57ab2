package devices

import (
	"testing"
	"time"
)

// A clock that is set back keeps no device out.
func TestClockSetBack(t *testing.T) {
	now := time.Now().Round(0) // the wall clock alone
	back := now.Add(-10 * time.Minute)
	var b Bucket
	for range 5 {
		b.Take(now, 1, 5)
	}
	if b.Take(back, 1, 5) {
		t.Error("the burst is not bounded")
	}
	if !b.Take(back.Add(time.Second), 1, 5) {
		t.Error("a second later nothing is allowed again")
	}
	var f Takeovers
	for range maxTakeovers + 1 {
		f.Contested(now)
	}
	if !f.Contested(now.Add(time.Second)) {
		t.Fatal("nobody fights")
	}
	if f.Contested(back) {
		t.Error("newcomers are refused for as long as the clock was set back")
	}
}
