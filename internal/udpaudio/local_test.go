//go:build linux

package udpaudio

import (
	"net"
	"net/netip"
	"testing"

	"fleetd/internal/envelope"
)

// A device's socket is connected, so it accepts responses only from the address to which it
// sends. The host of a wildcard socket may have several.
func TestSourceAddress(t *testing.T) {
	for _, c := range []struct{ listen, device string }{
		{":0", "127.0.0.2"}, {"0.0.0.0:0", "127.0.0.2"}, {"0.0.0.0:0", "127.0.0.1"}, {":0", "127.0.0.1"}, {":0", "::1"},
	} {
		t.Run(c.listen+" "+c.device, func(t *testing.T) {
			table, ear := listen(t, c.listen), &recorder{}
			if c.device == "::1" && !table.ipv6 {
				t.Skip("NOT RUN: this machine has no IPv6")
			}
			channel := open(t, table, ear)
			to := netip.AddrPortFrom(netip.MustParseAddr(c.device), table.Addr().Port())
			conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close() })
			device := &peer{t: t, conn: conn}
			for seq := uint32(1); seq <= confirmQuiet; seq++ {
				device.sendFrame(channel, seq)
			}
			settle(t, table, confirmQuiet)
			for i := range uint32(3) {
				if err := channel.SendAudio(envelope.Frame{Timestamp: 60 * i, Opus: audioFrame(i)}); err != nil {
					t.Fatal(err)
				}
				if h, _ := device.receive(channel); h.sequence != i+1 {
					t.Errorf("packet %d has sequence %d", i+1, h.sequence)
				}
			}
			if table.Stats().Sent.Load() != 3 || table.Stats().SendErrors.Load() != 0 {
				t.Errorf("%s", story(table.Stats()))
			}
		})
	}
}
