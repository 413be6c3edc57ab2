package devicetest

import (
	"errors"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
)

func deviceRequests(t *testing.T, f Frontend) {
	d := f.Dial(t, testID, "c1")
	defer d.Close()
	if err := errors.Join(d.Send(f.Hello), d.Send(`{"type":"mcp","payload":{"jsonrpc":"2.0","id":"r1","method":"roots/list"}}`),
		d.Send(`{"type":"mcp","payload":{"jsonrpc":"2.0","id":2,"method":"sampling/createMessage"}}`)); err != nil {
		t.Fatal(err)
	}
	want := []string{`"id":"r1","result":{"roots":[]}`, `"id":2,"error":{"code":-32601`}
	for len(want) > 0 {
		text, err := d.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(text, want[0]) {
			want = want[1:]
		}
	}
}

func withoutMCP(t *testing.T, f Frontend) {
	d := f.Dial(t, testID, "c1")
	defer d.Close()
	if err := d.Send(strings.Replace(f.Hello, `"mcp":true`, `"aec":true`, 1)); err != nil {
		t.Fatal(err)
	}
	Eventually(t, "state none", func() bool {
		v, err := f.Service.Get(t.Context(), testID)
		return err == nil && v.CatalogState == devices.CatalogNone && v.Presence.MCP == devices.MCPNone
	})
	if _, err := call(f.Service, volume, `{"volume":1}`, time.Second); err == nil || err.Code != devices.CodeToolUnknown {
		t.Errorf("%v", err)
	}
}

func onlineOffline(t *testing.T, f Frontend) {
	d := f.Online(t, testID, "c1", NewScript())
	d.Close()
	Eventually(t, "the offline event", func() bool { return len(f.Ports.Seen(devices.EventOffline)) == 1 })
	on, off := f.Ports.Seen(devices.EventOnline)[0], f.Ports.Seen(devices.EventOffline)[0]
	if on.Epoch != off.Epoch || on.Session != off.Session || on.Seq >= off.Seq || string(off.Fields) != `"reason":"gone"` {
		t.Errorf("online %+v, offline %+v", on, off)
	}
	catalog := f.Ports.Seen(devices.EventCatalog)
	if len(catalog) != 1 || !strings.Contains(string(catalog[0].Fields), `"added":["self.audio_speaker.set_volume","self.reboot"],"removed":[],"changed":[],"partial":false`) {
		t.Errorf("catalog events %v", catalog)
	}
	if _, n, history, held := f.Ports.Of(testID); n.Online || len(history) != 1 || history[0].Firmware != "2.4.2" || held != 0 {
		t.Errorf("presence %+v, history %+v, held %d", n, history, held)
	}
}
