package devices

import (
	"testing"
	"time"
)

// A clock that is set back does not lock devices out.
func TestClockSetBack(t *testing.T) {
	now := time.Now().Round(0) // only the wall clock
	back := now.Add(-10 * time.Minute)
	var b Bucket
	for range 5 {
		b.Allow(now, 1, 5)
	}
	if b.Allow(back, 1, 5) {
		t.Error("the burst has no limit")
	}
	if !b.Allow(back.Add(time.Second), 1, 5) {
		t.Error("nothing is allowed a second later")
	}
	var f Takeovers
	for range maxTakeovers + 1 {
		f.Record(now)
	}
	if !f.Record(now.Add(time.Second)) {
		t.Fatal("the id is not contested")
	}
	if f.Record(back) {
		t.Error("other clients are refused for as long as the clock was set back")
	}
}
