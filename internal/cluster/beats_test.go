package cluster

import (
	"slices"
	"testing"
	"time"

	"fleetd/internal/devices"
)

// beatsOf are three nodes, each with its own sight of the leases.
func beatsOf(names ...string) (all []*Beats, leases func(beat int64, still ...string) []devices.Lease) {
	for _, name := range names {
		all = append(all, &Beats{Own: devices.Lease{Node: name, Instance: name + "-1"}, Every: time.Second, Life: 5 * time.Second, Turn: 10 * time.Second})
	}
	return all, func(beat int64, still ...string) (out []devices.Lease) {
		for _, name := range names {
			l := devices.Lease{Node: name, Instance: name + "-1", Beat: beat}
			if slices.Contains(still, name) {
				l.Beat = 0
			}
			out = append(out, l)
		}
		return out
	}
}

// One node clears away after another: the first by name that lives. The next one
// does if it does not.
func TestOneNodeClearsAway(t *testing.T) {
	t.Parallel()
	all, leases := beatsOf("a", "b", "c", "d")
	begun := time.Unix(1_000_000, 0)
	first := map[string]int{} // second in which each node was asked to clear away after d
	for s := range 60 {
		still := []string{}
		if s >= 10 {
			still = []string{"d"}
		}
		if s >= 22 { // the one that should have, is gone too
			still = []string{"a", "d"}
		}
		for _, b := range all[:3] {
			if b.Own.Node == "a" && s >= 22 {
				continue
			}
			lost, twice := b.Look(leases(int64(s+1), still...), begun.Add(time.Duration(s)*time.Second))
			if twice {
				t.Fatal("no node is there twice")
			}
			if _, known := first[b.Own.Node]; !known && slices.ContainsFunc(lost, func(l devices.Lease) bool { return l.Node == "d" }) {
				first[b.Own.Node] = s
			}
		}
	}
	// d is seen to stand still in second 10; b is second in line until a is gone for
	// five seconds, c then stands behind b.
	if want := map[string]int{"a": 15, "b": 25, "c": 27}; first["a"] != want["a"] || first["b"] != want["b"] || first["c"] != want["c"] {
		t.Errorf("cleared away in second %v, want %v", first, want)
	}
}

// A node that could not look, or has just come, takes nobody for lost; nor does one
// that has just come stand before others.
func TestBeatsNotSeen(t *testing.T) {
	t.Parallel()
	all, leases := beatsOf("a", "b", "c")
	now := time.Unix(1_000_000, 0)
	b := all[1]
	look := func(d time.Duration, beat int64, still ...string) (names []string) {
		now = now.Add(d)
		lost, _ := b.Look(leases(beat, still...), now)
		for _, l := range lost {
			names = append(names, l.Node)
		}
		return names
	}
	look(time.Second, 1)
	if lost := look(20*time.Second, 1, "c"); lost != nil {
		t.Errorf("lost after a pause: %v", lost)
	}
	for i := range 4 {
		if lost := look(time.Second, int64(i+2), "c"); lost != nil {
			t.Errorf("lost after %d s of sight: %v", i+1, lost)
		}
	}
	if !b.Lives(devices.Lease{Instance: "new"}, now) || !b.Lives(devices.Lease{Instance: "c-1"}, now) {
		t.Error("who was never seen, or is not yet lost, lives")
	}
	b.seen["a-1"] = sight{first: now.Add(-time.Second)} // a has just come, so b does not wait for it
	if lost := look(time.Second, 9, "c"); !slices.Equal(lost, []string{"c"}) {
		t.Errorf("lost: %v", lost)
	}
	if b.Lives(devices.Lease{Instance: "c-1"}, now) {
		t.Error("c lives")
	}
}

// Another start under this node's name that goes on is found; one that stands still
// is cleared away after.
func TestBeatsOfTheSameName(t *testing.T) {
	t.Parallel()
	all, _ := beatsOf("a")
	own := devices.Lease{Node: "a", Instance: "a-1"}
	other := devices.Lease{Node: "a", Instance: "a-2"}
	now := time.Unix(1_000_000, 0)
	for i := range 4 {
		other.Beat++
		if _, twice := all[0].Look([]devices.Lease{own, other}, now.Add(time.Duration(i)*time.Second)); twice != (i > 0) {
			t.Errorf("look %d: twice %v", i, twice)
		}
	}
	for i := range 6 {
		lost, twice := all[0].Look([]devices.Lease{own, other}, now.Add(time.Duration(i+4)*time.Second))
		if twice || (len(lost) > 0) != (i >= 4) {
			t.Errorf("look %d: twice %v, lost %v", i+4, twice, lost)
		}
	}
}
