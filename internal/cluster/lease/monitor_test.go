package lease

import (
	"slices"
	"testing"
	"time"

	"fleetd/internal/devices"
)

// monitorsOf are three nodes, each with its own observations of the leases.
func monitorsOf(names ...string) (all []*Monitor, leases func(beat int64, still ...string) []devices.Lease) {
	for _, name := range names {
		all = append(all, &Monitor{Self: devices.Lease{Node: name, Instance: name + "-1"}, Every: time.Second, Lifetime: 5 * time.Second, CleanupDelay: 10 * time.Second})
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

// One node cleans up after a stopped node: the live one whose name sorts first. The
// next one does it if the first does not.
func TestOneNodeCleansUp(t *testing.T) {
	t.Parallel()
	all, leases := monitorsOf("a", "b", "c", "d")
	begun := time.Unix(1_000_000, 0)
	first := map[string]int{} // second in which each node had to clean up after d
	for s := range 60 {
		still := []string{}
		if s >= 10 {
			still = []string{"d"}
		}
		if s >= 22 { // the node that should have cleaned up has stopped, too
			still = []string{"a", "d"}
		}
		for _, b := range all[:3] {
			if b.Self.Node == "a" && s >= 22 {
				continue
			}
			lost, twice := b.Observe(leases(int64(s+1), still...), begun.Add(time.Duration(s)*time.Second))
			if twice {
				t.Fatal("no node runs twice")
			}
			if _, known := first[b.Self.Node]; !known && slices.ContainsFunc(lost, func(l devices.Lease) bool { return l.Node == "d" }) {
				first[b.Self.Node] = s
			}
		}
	}
	// d has not renewed its lease since second 10; b comes second until a has been gone
	// for five seconds, then c comes after b.
	if want := map[string]int{"a": 15, "b": 25, "c": 27}; first["a"] != want["a"] || first["b"] != want["b"] || first["c"] != want["c"] {
		t.Errorf("cleaned up in second %v, want %v", first, want)
	}
}

// A node that could not observe the leases, or has just started, considers none as
// lost; nor does another wait for one that has just started.
func TestUnobservedLeasesAreNotLost(t *testing.T) {
	t.Parallel()
	all, leases := monitorsOf("a", "b", "c")
	now := time.Unix(1_000_000, 0)
	b := all[1]
	look := func(d time.Duration, beat int64, still ...string) (names []string) {
		now = now.Add(d)
		lost, _ := b.Observe(leases(beat, still...), now)
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
			t.Errorf("lost after %d s of observation: %v", i+1, lost)
		}
	}
	if !b.IsAlive(devices.Lease{Instance: "new"}, now) || !b.IsAlive(devices.Lease{Instance: "c-1"}, now) {
		t.Error("a lease that was never observed, or is not lost yet, counts as alive")
	}
	b.observed["a-1"] = observation{first: now.Add(-time.Second)} // a has just started, so b does not wait for it
	if lost := look(time.Second, 9, "c"); !slices.Equal(lost, []string{"c"}) {
		t.Errorf("lost: %v", lost)
	}
	if b.IsAlive(devices.Lease{Instance: "c-1"}, now) {
		t.Error("c counts as alive")
	}
}

// A second process under this node's name is found if it renews its lease, and
// cleaned up after if it does not.
func TestLeasesOfTheSameName(t *testing.T) {
	t.Parallel()
	all, _ := monitorsOf("a")
	own := devices.Lease{Node: "a", Instance: "a-1"}
	other := devices.Lease{Node: "a", Instance: "a-2"}
	now := time.Unix(1_000_000, 0)
	for i := range 4 {
		other.Beat++
		if _, twice := all[0].Observe([]devices.Lease{own, other}, now.Add(time.Duration(i)*time.Second)); twice != (i > 0) {
			t.Errorf("look %d: twice %v", i, twice)
		}
	}
	for i := range 6 {
		lost, twice := all[0].Observe([]devices.Lease{own, other}, now.Add(time.Duration(i+4)*time.Second))
		if twice || (len(lost) > 0) != (i >= 4) {
			t.Errorf("look %d: twice %v, lost %v", i+4, twice, lost)
		}
	}
}
