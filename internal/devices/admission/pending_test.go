package admission

import (
	"net/netip"
	"testing"
	"time"

	"fleetd/internal/devices"
)

// from returns a check of a client from a host.
func from(id devices.ID, client string, host netip.Addr) CheckIn {
	return CheckIn{Device: id, ClientID: client, From: host}
}

// A host that uses all slots loses some to other hosts.
func TestPendingsAreShared(t *testing.T) {
	p := newPendings()
	now := time.Now()
	many, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	id := func(n int) devices.ID {
		return devices.ID([]byte{'d', 'a' + byte(n>>12&15), 'a' + byte(n>>8&15), 'a' + byte(n>>4&15), 'a' + byte(n&15)})
	}
	for n := range MaxPending {
		if _, _, err := p.get(from(id(n), "c", many), false, now); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := p.get(from(id(MaxPending), "c", many), false, now); err == nil {
		t.Error("one host exceeds the limit")
	}
	if _, _, err := p.get(from(id(MaxPending), "c", other), false, now); err != nil {
		t.Errorf("another host is refused: %v", err)
	}
	if len(p.codes) != MaxPending || p.byHost[many] != MaxPending-1 || p.byHost[other] != 1 {
		t.Errorf("%d codes, %d and %d of the hosts", len(p.codes), p.byHost[many], p.byHost[other])
	}
	for n := range MaxPending + 1 {
		p.drop(id(n))
	}
	if len(p.codes)+len(p.byDevice)+len(p.byHost) != 0 {
		t.Error("pending clients are left")
	}
}

// Checks of other clients of a pending device do not make its code invalid, before or after
// its own check.
func TestOtherClientsKeepTheCode(t *testing.T) {
	own, strange := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	for _, before := range []int{0, 2, 4} {
		p := newPendings()
		now := time.Now()
		check := func(n int) {
			_, _, _ = p.get(from("d", "other "+string(rune('a'+n)), strange.Next()), false, now) // it may be refused
		}
		for n := range before {
			check(n)
		}
		own, _, err := p.get(from("d", "mine", own), false, now)
		if err != nil {
			t.Fatal(err)
		}
		for n := range 10 {
			check(before + n)
		}
		if id, client, err := p.byCode(own.code, now); err != nil || id != "d" || client != "mine" {
			t.Errorf("after %d checks and 10 more the code is that of %q: %v", before, client, err)
		}
	}
}
