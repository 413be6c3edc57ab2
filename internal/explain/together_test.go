package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/recorder"
	"fleetd/internal/selector"
)

// limited returns a key for the devices of a selector.
func limited(t *testing.T, scopes, sel string) access.Principal {
	t.Helper()
	s, err := selector.Parse(sel)
	if err != nil {
		t.Fatal(err)
	}
	granted, err := access.ParseScopes(strings.Fields(scopes))
	if err != nil {
		t.Fatal(err)
	}
	return access.Principal{Caller: &access.Caller{Key: "k", Name: "k", Scopes: granted, Devices: s}}
}

const office = "203.0.113.7"

// end records the end of a connection.
func end(r *recorder.Recorder, id devices.ID, reason devices.CloseReason, remote string) {
	r.Step(devices.Step{Kind: devices.StepClosed, Device: id, Cause: devices.StepCause(reason), Transport: devices.TransportMQTT, Remote: netip.MustParseAddr(remote), Proven: true})
}

func numbered(n int) devices.ID { return devices.ID(fmt.Sprintf("02:aa:00:00:%02x:%02x", n>>8, n&255)) }

// wentOffline is the view of a device whose connection ended now.
func wentOffline(id devices.ID, reason devices.CloseReason, room string) devices.View {
	return with(offline(string(reason)), func(v *devices.View) {
		v.Device.ID, v.Presence.LastSeen, v.Presence.OfflineSince, v.Device.Labels = id, time.Now(), time.Now(), map[string]string{"room": room}
	})
}

// A device that went away at the same time as many others with its address has the
// network as its cause, whichever node saw it; the address is shown with devices:write.
func TestManyBehindOneAddress(t *testing.T) {
	for _, reason := range []devices.CloseReason{devices.CloseGone, devices.CloseDead, devices.CloseIdle} {
		t.Run(string(reason), func(t *testing.T) {
			c := &core{view: wentOffline(lamp, reason, "lab")}
			x, a, b := pair(c, stream{})
			x.opt.Keepalive = 2 * time.Minute
			end(b, lamp, reason, office)
			end(b, lamp, reason, office) // itself, once more
			for n := range 812 {
				seen := []*recorder.Recorder{a, b}[n%2]
				end(seen, numbered(n), reason, office)
				end(seen, numbered(n), reason, office) // each counts once
			}
			end(b, numbered(900), devices.CloseSuperseded, office)
			for n := range 900 {
				end(b, numbered(1000+n), reason, "198.51.100.9") // with another address
			}
			e, err := x.Device(t.Context(), admin, lamp)
			if err != nil || e.Cause != string(reason) || !strings.Contains(e.Sentence, " 812 others with the address 203.0.113.7 went away within ") || !strings.HasSuffix(e.Sentence, ": look at the network, not the device.") ||
				!slices.Contains(e.Next, nextNetwork) || e.Next[0] != nextNetwork {
				t.Errorf("%+v, %v", e, err)
			}
			reader := access.Principal{Caller: &access.Caller{Key: "r", Name: "r", Scopes: limited(t, "events:read", "").Caller.Scopes}}
			if e, err := x.Device(t.Context(), reader, lamp); err != nil || !strings.Contains(e.Sentence, "812 others with its address") || strings.Contains(fmt.Sprint(e), office) {
				t.Errorf("without devices:write: %+v, %v", e, err)
			}
			if c.listed != 0 {
				t.Errorf("%d pages of devices were read", c.listed)
			}
		})
	}
}

// Many of one node, with many addresses, have the network before the node as their cause;
// a few have none in common, and neither have those of an address where as many go away at
// any time.
func TestManyOfOneNode(t *testing.T) {
	address := func(n int) string { return fmt.Sprintf("198.51.%d.%d", n>>8, n&255) }
	for _, c := range []struct {
		name  string
		ends  func(a, b *recorder.Recorder)
		text  string
		never string
	}{
		{"of the node", func(_, b *recorder.Recorder) {
			for n := range 40 {
				end(b, numbered(n), devices.CloseGone, address(n))
			}
		}, " 40 others of node b went away within 5 s of it", ""},
		{"of another node", func(a, _ *recorder.Recorder) {
			for n := range 40 {
				end(a, numbered(n), devices.CloseGone, address(n))
			}
		}, "", "others"},
		{"a few", func(_, b *recorder.Recorder) {
			for n := range manyEnds - 1 {
				end(b, numbered(n), devices.CloseGone, office)
			}
		}, "", "others"},
		{"for another reason", func(_, b *recorder.Recorder) {
			for n := range 40 {
				end(b, numbered(n), devices.CloseProtocol, office)
			}
		}, "", "others"},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, a, b := pair(&core{view: wentOffline(lamp, devices.CloseGone, "lab")}, stream{})
			end(b, lamp, devices.CloseGone, office)
			c.ends(a, b)
			e, err := x.Device(t.Context(), admin, lamp)
			if err != nil || e.Cause != "gone" || !strings.Contains(e.Sentence, c.text) || c.never != "" && strings.Contains(e.Sentence, c.never) {
				t.Errorf("%+v, %v", e, err)
			}
		})
	}
	for _, n := range []struct {
		now, before int
		common      bool
	}{{40, 0, true}, {40, 10, true}, {40, 11, false}, {9, 0, false}} {
		if isCommon(n.now, n.before) != n.common {
			t.Errorf("%d, and %d before: want %v", n.now, n.before, n.common)
		}
	}
}

// A key that is limited to devices learns nothing of others, counts included: of its own it
// does.
func TestManyUnderALimitedKey(t *testing.T) {
	c := &core{view: wentOffline(lamp, devices.CloseGone, "lab")}
	x, a, b := pair(c, stream{})
	end(b, lamp, devices.CloseGone, office)
	c.list = append(c.list, c.view)
	const own, others = 25, 800
	for n := range own + others {
		room := "lab"
		if n >= own {
			room = "hall"
		}
		c.list = append(c.list, wentOffline(numbered(n), devices.CloseGone, room))
		end([]*recorder.Recorder{a, b}[n%2], numbered(n), devices.CloseGone, office)
	}
	all, mine, alone := " 825 others with its address ", " 25 others with its address ", "others"
	for _, key := range []struct {
		sel, text, never string
	}{{"", all, ""}, {"room=lab", mine, " 825 "}, {"device=" + string(lamp), "", alone}} {
		e, err := x.Device(t.Context(), limited(t, "events:read", key.sel), lamp)
		if err != nil || e.Cause != "gone" || !strings.Contains(e.Sentence, key.text) || key.never != "" && strings.Contains(fmt.Sprint(e), key.never) {
			t.Errorf("key for %q: %+v, %v", key.sel, e, err)
		}
	}
	if e, err := x.Device(t.Context(), access.Principal{}, lamp); err != nil || strings.Contains(e.Sentence, alone) {
		t.Errorf("without a caller: %+v, %v", e, err)
	}
	c.list, c.listed = nil, 0
	for n := range 10 * maxCompared { // as many of its own as there may be
		c.list = append(c.list, wentOffline(numbered(n), devices.CloseGone, "lab"))
	}
	if _, err := x.Device(t.Context(), limited(t, "events:read", "room=lab"), lamp); err != nil || c.listed > comparedPages {
		t.Errorf("%d pages were read, %v", c.listed, err)
	}
}
