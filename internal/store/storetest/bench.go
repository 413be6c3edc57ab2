package storetest

import (
	"fmt"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// Benchmark measures how fast rows become durable, in devices per second: one
// operation is one device with its facts, its presence and a history
// entry of one of 20 catalogs.
func Benchmark(b *testing.B, makeDatabase Maker) {
	var catalogs []devices.CatalogText
	for firmware := range 20 {
		tools := "["
		for n := range 50 {
			if n > 0 {
				tools += ","
			}
			tools += fmt.Sprintf(`{"name":"self.module_%02d.set_%d","description":"Firmware 2.%d: sets a property. Ask for its value first.",`+
				`"inputSchema":{"type":"object","properties":{"value":{"type":"integer","minimum":0,"maximum":100}},"required":["value"]}}`, n/4, n%4, firmware)
		}
		catalogs = append(catalogs, catalogOf(tools+"]"))
	}
	for _, shape := range []struct {
		name    string
		devices int // how many devices take part: each once, or the same again
		catalog bool
	}{
		{"facts+presence, first", 1 << 24, false},
		{"facts+presence, again", 2000, false},
		{"facts+presence+catalog, first", 1 << 24, true},
		{"facts+presence+catalog, again", 2000, true},
	} {
		b.Run(shape.name, func(b *testing.B) {
			db := makeDatabase(b)
			s := openStore(b, db.URL)
			var list []devices.Device
			for n := range min(b.N, shape.devices) {
				list = append(list, devices.Device{ID: mac(n)})
			}
			db.Add(b, list...)
			db.analyze(b)
			b.ReportAllocs()
			b.ResetTimer()
			for n := range b.N {
				id := mac(n % shape.devices)
				facts := factsOf(fullDevice(id))
				facts.CheckedAt = start.Add(time.Duration(n) * time.Second)
				s.SaveFacts(facts)
				s.SavePresence(fullPresence(id, devices.Epoch(n+1), 1))
				if shape.catalog {
					text := catalogs[n%len(catalogs)]
					s.SaveCatalog(devices.HistoryEntry{Device: id, Epoch: devices.Epoch(n + 1), Catalog: text.Hash, At: start}, text, nil)
				}
				// As many devices as a storm has in progress; without a bound
				// rows would only be coalesced.
				if n%100 == 0 && s.Stats().PresenceWaiting.Load() > 1500 {
					devicetest.Eventually(b, "room in the queue", func() bool { return s.Stats().PresenceWaiting.Load() < 1000 })
				}
			}
			devicetest.Eventually(b, "rows written", func() bool {
				st := s.Stats()
				return st.DevicesWaiting.Load()+st.PresenceWaiting.Load()+st.HistoryWaiting.Load() == 0
			})
			b.StopTimer()
			if bad := s.Stats().BadRows.Load() + s.Stats().DroppedHistory.Load(); bad > 0 {
				b.Errorf("%d rows lost", bad)
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "devices/s")
			b.ReportMetric(float64(s.Stats().DeviceRows.Load())/b.Elapsed().Seconds(), "rows/s")
		})
	}
}
