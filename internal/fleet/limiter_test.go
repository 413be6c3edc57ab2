package fleet_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// More calls of one key to silent devices, over REST and MCP, than a node serves at once
// leave slots for every other caller.
func TestOneKeyLeavesSlotsOverEveryInterface(t *testing.T) {
	for _, via := range []access.Via{access.ViaREST, access.ViaMCP} {
		bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
			const count, each = 250, 17
			p.Put(devices.Member{ID: id, ClientID: "c1"})
			connect(t, s, "c1", devicetest.NewScript())
			ready(t, s)
			flooder := principalWith(t, via, "tools:call tools:call:user", "")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var refused atomic.Int64
			for n := range count {
				silent := devices.ID(fmt.Sprintf("02:00:00:00:01:%02x", n))
				if _, err := s.Accept(devices.Identity{Device: silent, ClientID: "c", Transport: devices.TransportWebSocket}, idle{}); err != nil {
					t.Fatal(err)
				}
				for range each {
					go func() {
						_, err := s.CallTool(ctx, devices.ToolCall{Device: silent, Tool: "x", Principal: flooder})
						if err != nil && devices.AsError(err).Code == devices.CodeRateLimited {
							refused.Add(1)
						}
					}()
				}
			}
			synctest.Wait()
			// security: K16
			if taken := s.Limiter().InUse(); taken > dispatch.MaxServing/2 || taken+int(refused.Load()) != count*each {
				t.Errorf("%s: one key has %d of %d slots, %d calls were refused", via, taken, dispatch.MaxServing, refused.Load())
			}
			if n := s.Limiter().OverShare.Load(); n == 0 || n != uint64(refused.Load()) {
				t.Errorf("%s: %d refusals counted", via, n)
			}
			begun := time.Now()
			if err := setVolume(t, s); err != nil || time.Since(begun) > time.Second {
				t.Errorf("%s: another caller: %v after %v", via, err, time.Since(begun))
			}
			cancel()
			synctest.Wait()
			if taken := s.Limiter().InUse(); taken != 0 {
				t.Errorf("%s: %d slots are still in use", via, taken)
			}
		})
	}
}
