package udpaudio

import "fleetd/internal/counters"

// Metrics adds the metrics of the audio socket.
func (s *Stats) Metrics(r *counters.Registry) {
	packets := r.Counter("udp_packets_total", "UDP datagrams received, by [verdict](../protocol.md#udp-audio).", "verdict")
	for v := range Verdicts {
		counters.Value(packets, func() uint64 { return s.Packets(v) }, v.String())
	}
	held := r.Counter("udp_held_total", "Packets held because their address was not proven yet: `released`, `discarded`.", "outcome")
	counters.Value(held, s.Released.Load, "released")
	counters.Value(held, s.Discarded.Load, "discarded")
	counters.Value(r.Gauge("udp_channels", "Open UDP audio channels."), s.Channels.Load)
	counters.Value(r.Counter("udp_packets_sent_total", "UDP datagrams sent."), s.Sent.Load)
	errors := r.Counter("udp_errors_total", "UDP socket errors: `send`, `receive`.", "direction")
	counters.Value(errors, s.SendErrors.Load, "send")
	counters.Value(errors, s.ReadErrors.Load, "receive")
	counters.Value(r.Counter("udp_address_moves_total", "Devices whose proven UDP address changed."), s.Moves.Load)
}
