package connlimit

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"fleetd/internal/racetest"
)

// Many addresses with one check do not reset the limiter of an address with too many.
func TestManyAddressesDoNotReset(t *testing.T) {
	racetest.Skip(t, "what one goroutine computes")
	var l Rates
	loud := netip.MustParseAddr("203.0.113.1")
	const perMinute, burst = 1, 5
	for range burst {
		if !l.Allow(loud, perMinute, burst) {
			t.Fatal("it is refused within its burst")
		}
	}
	for i := range 3 * maxRates {
		var address [16]byte
		address[0] = 0x20
		binary.BigEndian.PutUint32(address[4:], uint32(i))
		if !l.Allow(netip.AddrFrom16(address), perMinute, burst) {
			t.Fatal("an address with one check is refused")
		}
	}
	// security: N33
	if l.Allow(loud, perMinute, burst) {
		t.Error("20,001 other addresses reset its limiter")
	}
	if len(l.byAddress) > maxRates {
		t.Errorf("%d addresses are remembered", len(l.byAddress))
	}
}
