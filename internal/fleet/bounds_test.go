package fleet_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
)

// One device cannot fill the audio queue that all devices share.
func TestUplinkIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports := devicetest.New()
		s := ports.Service(t, fleet.Config{})
		p := overMQTT(t, s)
		c, _ := p.hello(t)
		for n := range 5000 {
			c.HandleAudio(envelope.Frame{Opus: packet(n)})
		}
		if n := len(ports.Frames()); n != 2000 {
			t.Errorf("%d of 5000 packets at once were published", n)
		}
		if n := s.Stats().AudioDrops.Get(speech.AudioTooMany); n != 3000 {
			t.Errorf("%d were dropped", n)
		}
		time.Sleep(time.Second)
		c.HandleAudio(envelope.Frame{Opus: make([]byte, speech.MaxPacket+1)})
		c.HandleAudio(envelope.Frame{Opus: packet(1)})
		if n := len(ports.Frames()); n != 2001 || s.Stats().AudioDrops.Get(speech.AudioRefused) != 1 {
			t.Errorf("%d packets were published, the long one among them", n)
		}
	})
}

// A device has one notification limit, however often it connects.
func TestReconnectingBringsNoFreshShare(t *testing.T) {
	ports := devicetest.New()
	s := ports.Service(t, fleet.Config{})
	for range 5 {
		p := overMQTT(t, s)
		for n := range 40 {
			if err := p.session.HandleControl(fmt.Appendf(nil, `{"type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/x","params":{"n":%d}}}`, n)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := len(ports.Seen(devices.EventNotification)); n < 40 || n > 60 {
		t.Errorf("%d of 200 were published; the burst is 40", n)
	}
}

// A check of arguments that would cost too much is left to the device.
func TestCostlyCheckIsLeftToTheDevice(t *testing.T) {
	script := devicetest.NewScript()
	branches := strings.Repeat("false,", 2000) + "false"
	script.Tools = `[{"name":"bomb","inputSchema":{"type":"object","properties":{"a":{"type":"array","items":{"anyOf":[` + branches + `]}}}}}]`
	script.Call = func(string, json.RawMessage) string { return devicetest.True }
	s := devicetest.New().Service(t, fleet.Config{})
	connect(t, s, "c1", script)
	devicetest.Eventually(t, "the tool is listed", func() bool { return state(t, s).CatalogState == devices.CatalogReady })
	begun := time.Now()
	args := `{"a":[` + strings.Repeat("1,", 25_000) + `1]}`
	r, err := s.CallTool(t.Context(), devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "bomb", Arguments: json.RawMessage(args)})
	if err != nil || r.IsError {
		t.Errorf("%+v, %v", r, err)
	}
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	// Small arguments are checked.
	if _, err := s.CallTool(t.Context(), devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "bomb", Arguments: json.RawMessage(`{"a":[1]}`)}); devices.AsError(err).Code != devices.CodeInvalidArguments {
		t.Errorf("small arguments: %v", err)
	}
}
