package node

import (
	"fleetd/internal/counters"
	"fleetd/internal/gatewayapi"
	"fleetd/internal/mqttdevice"
	"fleetd/internal/udpaudio"
)

var (
	connacks        = counter("mqtt_connects_total", "MQTT connections by CONNACK code; no_connect where none was sent, not_accepted where the socket failed, refused behind a broker.", "code")
	connectSeconds  = newMetric(0, "mqtt_connect_seconds", "From an MQTT connection to its CONNACK, waiting included.")
	mqttWaiting     = gauge("mqtt_connections_waiting", "MQTT connections that are not let in yet.")
	mqttDrops       = counter("mqtt_dropped_total", "MQTT messages dropped, by reason.", "reason")
	brokerUp        = gauge("mqtt_broker_connected", "Whether the external MQTT broker is connected.")
	udpPackets      = counter("udp_packets_total", "UDP datagrams received, by verdict.", "verdict")
	udpHeld         = counter("udp_held_total", "What became of packets held from an address not proven yet.", "outcome")
	udpChannels     = gauge("udp_channels", "Open UDP audio channels.")
	udpSent         = counter("udp_packets_sent_total", "UDP datagrams sent.")
	udpErrors       = counter("udp_errors_total", "UDP socket errors, by direction.", "direction")
	udpMoves        = counter("udp_address_moves_total", "Devices whose proven UDP address changed.")
	gatewayRequests = counter("gateway_requests_total", "Requests of the gateway API, by route and outcome.", "route", "code")
)

// collect reads the counters of the MQTT side, as far as it is on.
func (m *mqttSide) collect(put func(metric, float64, ...string), histogram func(metric, *counters.Histogram)) {
	messages := func(s *mqttdevice.Stats) {
		s.Connacks.Each(func(code string, n int64) { put(connacks, float64(n), code) })
		put(mqttDrops, float64(s.ForeignTopics.Load()), "foreign_topic")
		put(mqttDrops, float64(s.HelloDrops.Load()), "hello_rate")
		put(mqttDrops, float64(s.Unpublished.Load()), "broker")
	}
	switch {
	case m.front != nil:
		messages(m.front.Stats())
		histogram(connectSeconds, m.front.ConnectTime())
		_, waiting := m.front.Connected()
		put(mqttWaiting, float64(waiting))
	case m.broker != nil:
		messages(m.broker.Stats())
		put(brokerUp, truth(m.broker.Up()))
	}
	if m.audio != nil {
		s := m.audio.Stats()
		for v := range udpaudio.Verdicts {
			put(udpPackets, float64(s.Packets(v)), v.String())
		}
		put(udpHeld, float64(s.Released.Load()), "released")
		put(udpHeld, float64(s.Discarded.Load()), "discarded")
		put(udpChannels, float64(s.Channels.Load()))
		put(udpSent, float64(s.Sent.Load()))
		put(udpErrors, float64(s.SendErrors.Load()), "send")
		put(udpErrors, float64(s.ReadErrors.Load()), "receive")
		put(udpMoves, float64(s.Moves.Load()))
	}
	if m.gatewayAPI != nil {
		m.gatewayAPI.Requests.Each(func(k gatewayapi.RequestKey, n int64) {
			put(gatewayRequests, float64(n), string(k.Route), string(k.Code))
		})
	}
}
