package firmware

import (
	"io"
	"testing"
	"time"
)

// A device without power has no connection and wakes for nobody; it boots when it is back. Executions are counted by
// marker over both lives.
func TestAwayAndMarkers(t *testing.T) {
	s := newFakeServer(t)
	f := startFleet(t, s, "--away", "500ms/1s", "--wake", "50ms")
	mark := func(c *fakeConn, id int, marker string) {
		t.Helper()
		if r, text := c.call(t, id, "tools/call", `{"name":"self.get_device_status","arguments":{"marker":"`+marker+`"}}`); r.Payload.Error != nil {
			t.Error(text)
		}
	}
	c := s.acceptHello("one")
	mark(c, 1, "a")
	mark(c, 2, "b")
	if _, _, err := c.tryRead(); err == nil {
		t.Error("it did not leave")
	}
	if r := eventually(t, f, "away", inState(StateAway)); r.Absences != 1 || r.OTAChecks != 1 {
		t.Errorf("%d absences, %d checks", r.Absences, r.OTAChecks)
	}
	left := time.Now()
	c = s.acceptHello("two")
	if gone := time.Since(left); gone < 300*time.Millisecond {
		t.Errorf("back after %v", gone)
	}
	mark(c, 3, "a")
	r := eventually(t, f, "connected", inState(StateConnected))
	if r.Markers["a"] != 2 || r.Markers["b"] != 1 || r.MarkersRepeated != 1 || r.OTAChecks != 2 || r.Reboots != 0 {
		t.Errorf("%v, %d repeated, %d checks, %d reboots", r.Markers, r.MarkersRepeated, r.OTAChecks, r.Reboots)
	}
	if totals := f.Report().Totals; totals.Markers["a"] != 2 || totals.MarkersRepeated != 1 || totals.Absences != 1 {
		t.Errorf("totals %+v", totals)
	}
}

func TestAwayFlag(t *testing.T) {
	for _, text := range []string{"30s", "2m/30s", "30s/30s", "-1s/2m", "x/2m", "0s/1m"} {
		if _, err := parseFlags([]string{"--away", text}, io.Discard); err == nil {
			t.Errorf("%s is accepted", text)
		}
	}
	o, err := parseFlags([]string{"--away", "30s/2m"}, io.Discard)
	if err != nil || o.Away != (Away{For: 30 * time.Second, Every: 2 * time.Minute}) {
		t.Errorf("%+v %v", o.Away, err)
	}
}
