package session

import (
	"testing"
	"time"

	"fleetd/internal/devices"
)

// A clock that is set back keeps no device out.
func TestClockSetBack(t *testing.T) {
	now := time.Now().Round(0) // the wall clock alone
	back := now.Add(-10 * time.Minute)
	var b devices.Bucket
	for range 5 {
		b.Take(now, 1, 5)
	}
	if b.Take(back, 1, 5) {
		t.Error("the burst is not bounded")
	}
	if !b.Take(back.Add(time.Second), 1, 5) {
		t.Error("a second later nothing is allowed again")
	}
	var f takeovers
	for range maxTakeovers + 1 {
		f.contested(now)
	}
	if !f.contested(now.Add(time.Second)) {
		t.Fatal("nobody fights")
	}
	if f.contested(back) {
		t.Error("newcomers are refused for as long as the clock was set back")
	}
}
