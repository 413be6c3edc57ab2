package fleet_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// bulky returns a list of about 900 KB, different for every n.
func bulky(n int) string {
	return fmt.Sprintf(`[{"name":"tool-%d","description":%q,"inputSchema":{"type":"object","properties":{}}}]`, n, strings.Repeat("x", 900_000))
}

// A member that reconnects with a new long list each time fills neither the memory nor
// the database, and is still served.
func TestEverNewListsAreBounded(t *testing.T) {
	const memory = 5 << 20
	bubble(t, fleet.Config{CatalogMemory: memory}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		come := func(n int) {
			script := devicetest.NewScript()
			script.Tools = bulky(n)
			connect(t, s, "c1", script)
			ready(t, s)
			time.Sleep(2 * time.Second)
			if lists, bytes := s.CatalogUsage(); bytes > memory || lists > 5 {
				t.Fatalf("after %d lists: %d in memory with %d bytes", n, lists, bytes)
			}
		}
		for n := range 30 {
			come(n)
		}
		stored := 0
		for _, text := range p.Texts {
			stored += len(text.Tools)
		}
		if stored > 4<<20 || stored < 3<<20 || len(p.Entries) != 4 || s.Stats().Unrecorded.Load() != 26 {
			t.Errorf("%d bytes and %d entries were stored, %d lists were not", stored, len(p.Entries), s.Stats().Unrecorded.Load())
		}
		if s.Stats().CatalogsEvicted.Load() == 0 || s.Stats().CatalogsRefused.Load() != 0 {
			t.Errorf("%d evicted, %d refused", s.Stats().CatalogsEvicted.Load(), s.Stats().CatalogsRefused.Load())
		}
		// It was not recorded; the same list is recorded once there is room.
		seen := len(p.Seen(devices.EventCatalog))
		time.Sleep(24 * time.Hour)
		come(29)
		if last := p.Entries[len(p.Entries)-1]; len(p.Entries) != 5 || p.Texts[last.Catalog].Count != 1 || len(p.Seen(devices.EventCatalog)) != seen+1 {
			t.Errorf("a day later there are %d entries and %d new events", len(p.Entries), len(p.Seen(devices.EventCatalog))-seen)
		}
	})
}

// Lists of connected devices are not evicted for others, which get an error with
// the reason. Lists of absent devices are evicted, and read from the database later.
func TestCatalogMemoryIsBounded(t *testing.T) {
	bubble(t, fleet.Config{CatalogMemory: 3 << 20}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		come := func(n int) *pipe {
			script := devicetest.NewScript()
			script.Tools = bulky(n)
			x := &pipe{script: script}
			session, err := s.Accept(devices.Identity{Device: devices.ID(fmt.Sprintf("02:00:00:00:00:%02x", n)), Transport: devices.TransportMQTT}, x)
			if err != nil {
				t.Fatal(err)
			}
			x.session = session
			session.StartMCP(devices.FeaturesMCP)
			time.Sleep(2 * time.Second)
			return x
		}
		listOf := func(n int) (devices.ToolList, error) {
			return s.Tools(t.Context(), devices.ID(fmt.Sprintf("02:00:00:00:00:%02x", n)), true)
		}
		first := come(0)
		come(1)
		come(2)
		come(3)
		if list, err := listOf(3); err != nil || list.State != devices.CatalogError || s.Stats().CatalogsRefused.Load() == 0 {
			t.Errorf("one too many: %v, %v", list.State, err)
		}
		first.session.Close(devices.CloseGone)
		time.Sleep(time.Minute) // it retries
		if list, err := listOf(3); err != nil || list.State != devices.CatalogReady || len(list.Tools) != 1 {
			t.Errorf("with room: %v, %v", list.State, err)
		}
		if list, err := listOf(0); err != nil || list.State != devices.CatalogStale || len(list.Tools) != 1 {
			t.Errorf("the absent device: %v, %v", list.State, err)
		}
	})
}

// No row names a list that the store dropped, not even the next connection's row,
// until a listing finds room for it.
func TestDroppedListIsNotNamed(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		p.Full = true
		for range 2 {
			connect(t, s, "c1", devicetest.NewScript())
			ready(t, s)
			// security: D16
			if row := p.Presences[id]; !row.Online || row.Catalog != (devices.Hash{}) || row.Tools != 0 || len(p.Entries) != 0 {
				t.Fatalf("the row names a list that is not in the database: %+v, %d entries", row, len(p.Entries))
			}
		}
		p.Full = false
		connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		if row := p.Presences[id]; len(p.Entries) != 1 || row.Catalog != p.Entries[0].Catalog || row.Tools == 0 {
			t.Errorf("with room the row is %+v, with %d entries", row, len(p.Entries))
		}
	})
}
