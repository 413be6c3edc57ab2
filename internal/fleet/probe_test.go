package fleet_test

import (
	"context"
	"encoding/json"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// shortCall calls a tool with a timeout of its own.
func shortCall(t *testing.T, s *fleet.Service, timeout time.Duration) *devices.Error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	_, err := s.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "self.audio_speaker.set_volume", Arguments: json.RawMessage(`{"volume":1}`)})
	if err == nil {
		return nil
	}
	return devices.AsError(err)
}

// busyScript returns a device that answers nothing while busy is set.
func busyScript(busy *atomic.Bool) *devicetest.Script {
	script := devicetest.NewScript()
	script.Call = func(string, json.RawMessage) string {
		if busy.Load() {
			return ""
		}
		return devicetest.True
	}
	script.Other = func(r devicetest.Request) string {
		if busy.Load() {
			return "silent"
		}
		return ""
	}
	return script
}

// requests returns how many requests of a method the device has received.
func requests(script *devicetest.Script, method string) (n int) {
	for _, r := range script.Received() {
		if r.Method == method {
			n++
		}
	}
	return n
}

// Only one probe runs at a time, however many calls time out.
func TestOneProbeForManyTimeouts(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		var busy atomic.Bool
		script := busyScript(&busy)
		connect(t, s, "c1", script)
		ready(t, s)
		synctest.Wait()
		before := runtime.NumGoroutine()
		busy.Store(true)
		for range 500 {
			if err := shortCall(t, s, time.Millisecond); err == nil || err.Code != devices.CodeDeviceTimeout {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if n := runtime.NumGoroutine(); n > before+2 {
			t.Errorf("%d goroutines, %d before the calls", n, before)
		}
		if n := requests(script, "ping"); n > 1 {
			t.Errorf("%d probes in half a second", n)
		}
	})
}

// A busy device is ready again with its first answer, late or not, and does not count as
// a failed handshake.
func TestBusyDeviceIsReadyAtItsFirstAnswer(t *testing.T) {
	for _, answer := range []string{"a late one", "to a call", "to the probe"} {
		t.Run(answer, func(t *testing.T) {
			bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
				var busy atomic.Bool
				script := busyScript(&busy)
				p := connect(t, s, "c1", script)
				ready(t, s)
				busy.Store(true)
				var late string
				for range 3 {
					_ = shortCall(t, s, 2*time.Second) // it times out
					time.Sleep(2 * time.Second)
				}
				for _, r := range script.Received() {
					if r.Method == "tools/call" {
						late = fmt.Sprintf(`{"type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"result":{"content":[],"isError":false}}}`, r.ID)
					}
				}
				time.Sleep(8 * time.Second)
				synctest.Wait()
				if v := state(t, s); v.Presence.MCP != devices.MCPUnresponsive || v.CatalogState != devices.CatalogStale {
					t.Fatalf("after 20 s without an answer: MCP %s, list %s", v.Presence.MCP, v.CatalogState)
				}
				busy.Store(false)
				switch answer {
				case "a late one":
					if err := p.session.HandleControl([]byte(late)); err != nil {
						t.Fatal(err)
					}
				case "to a call":
					if err := shortCall(t, s, time.Second); err != nil {
						t.Fatal(err)
					}
				default:
					time.Sleep(30 * time.Second) // the current probe fails, the next one succeeds
				}
				synctest.Wait()
				if v := state(t, s); v.Presence.MCP != devices.MCPReady || v.CatalogState != devices.CatalogReady {
					t.Errorf("after its answer: MCP %s, list %s", v.Presence.MCP, v.CatalogState)
				}
				if n := requests(script, "initialize"); n != 1 {
					t.Errorf("%d handshakes", n)
				}
			})
		})
	}
}

// No probe is sent while a call runs: the device answers nothing else meanwhile.
func TestNoProbeDuringACall(t *testing.T) {
	bubble(t, fleet.Config{CallsPerDevice: 2}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		var busy atomic.Bool
		script := busyScript(&busy)
		connect(t, s, "c1", script)
		ready(t, s)
		busy.Store(true)
		ended := make(chan struct{})
		go func() {
			_ = shortCall(t, s, 20*time.Second)
			close(ended)
		}()
		_ = shortCall(t, s, time.Second)
		time.Sleep(15 * time.Second)
		if n := requests(script, "ping"); n != 0 {
			t.Errorf("%d probes during a call", n)
		}
		<-ended
		synctest.Wait()
		if n := requests(script, "ping"); n != 1 {
			t.Errorf("%d probes after it", n)
		}
	})
}

// A list that changes again within half a minute is read again after that time.
func TestListChangedTwice(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		script := devicetest.NewScript()
		p := connect(t, s, "c1", script)
		ready(t, s)
		pages := requests(script, "tools/list")
		changed := func() {
			if err := p.session.HandleControl([]byte(`{"type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}}`)); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		time.Sleep(time.Minute)
		changed()
		time.Sleep(time.Second)
		for range 5 {
			changed()
		}
		if n := requests(script, "tools/list"); n != 2*pages {
			t.Errorf("%d pages were read at once, want %d", n, 2*pages)
		}
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if n := requests(script, "tools/list"); n != 3*pages {
			t.Errorf("%d pages were read in all, want %d", n, 3*pages)
		}
	})
}

// An answer during a probe counts, even if the probe itself gets none.
func TestAnswerWhileTheProbeRuns(t *testing.T) {
	for _, answer := range []string{"a late one", "to a call"} {
		t.Run(answer, func(t *testing.T) {
			bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
				var busy atomic.Bool
				script := busyScript(&busy)
				p := connect(t, s, "c1", script)
				ready(t, s)
				busy.Store(true) // messages to the device are lost
				_ = shortCall(t, s, 2*time.Second)
				synctest.Wait()
				var late string
				for _, r := range script.Received() {
					if r.Method == "tools/call" {
						late = fmt.Sprintf(`{"type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"result":{"content":[],"isError":false}}}`, r.ID)
					}
				}
				time.Sleep(5 * time.Second)
				busy.Store(false)
				if answer == "a late one" {
					if err := p.session.HandleControl([]byte(late)); err != nil {
						t.Fatal(err)
					}
				} else if err := shortCall(t, s, time.Second); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if v := state(t, s); v.Presence.MCP != devices.MCPReady || v.CatalogState != devices.CatalogReady {
					t.Errorf("a minute after its answer: MCP %s, list %s", v.Presence.MCP, v.CatalogState)
				}
			})
		})
	}
}
