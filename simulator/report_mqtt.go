package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"strconv"
	"time"
)

// connackCounts counts CONNECTs by the code that answered them; codes above 5 share the last place.
type connackCounts [7]uint64

func (c *connackCounts) add(code byte) { c[min(int(code), len(c)-1)]++ }

// mqttStats exists only on devices that use MQTT.
type mqttStats struct {
	connack           connackCounts
	reconnects, pings uint64
	ssrc              string
}

func (s *deviceStats) mqttLocked() *mqttStats {
	if s.mqtt == nil {
		s.mqtt = &mqttStats{}
	}
	return s.mqtt
}

// udpStats exists only on devices that had an audio channel over UDP.
type udpStats struct {
	sent, received, missing uint64
	lostOnPurpose, heldBack uint64
	rebinds, killed         uint64
	verdicts                verdictCounts
}

func (s *deviceStats) udpLocked() *udpStats {
	if s.udp == nil {
		s.udp = &udpStats{}
	}
	return s.udp
}

// verdictCounts is the outcome of received datagrams in the report.
type verdictCounts [udpVerdicts]uint64

// MarshalJSON names the verdicts.
func (v verdictCounts) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, name := range udpVerdictNames() {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(append(strconv.AppendQuote(b, name), ':'), v[i], 10)
	}
	return append(b, '}'), nil
}

// UnmarshalJSON is the reverse, for tests and tools that read reports.
func (v *verdictCounts) UnmarshalJSON(data []byte) error {
	var named map[string]uint64
	if err := json.Unmarshal(data, &named); err != nil {
		return err
	}
	for i, name := range udpVerdictNames() {
		v[i] = named[name]
	}
	return nil
}

type udpReport struct {
	Sent          uint64        `json:"sent"`
	Received      uint64        `json:"received"`
	Verdicts      verdictCounts `json:"verdicts"`
	Missing       uint64        `json:"missing"`
	LostOnPurpose uint64        `json:"lost_on_purpose"`
	HeldBack      uint64        `json:"held_back"`
	Rebinds       uint64        `json:"rebinds"`
	Killed        uint64        `json:"killed"`
}

func (u *udpReport) add(o *udpReport) {
	u.Sent += o.Sent
	u.Received += o.Received
	u.Missing += o.Missing
	u.LostOnPurpose += o.LostOnPurpose
	u.HeldBack += o.HeldBack
	u.Rebinds += o.Rebinds
	u.Killed += o.Killed
	for i := range u.Verdicts {
		u.Verdicts[i] += o.Verdicts[i]
	}
}

// audioCounts is what became of the packets of conversations, per device and in total.
type audioCounts struct {
	Spoken             uint64 `json:"spoken"`
	Heard              uint64 `json:"heard"`
	EchoIdentical      uint64 `json:"echo_identical"`
	EchoLost           uint64 `json:"echo_lost"`
	EchoOutOfOrder     uint64 `json:"echo_out_of_order"`
	EchoForeign        uint64 `json:"echo_foreign"`
	DroppedQueueFull   uint64 `json:"dropped_queue_full"`
	DroppedNotSpeaking uint64 `json:"dropped_not_speaking"`
	CutOff             uint64 `json:"cut_off"`
	ResetByStart       uint64 `json:"reset_by_start"`
}

func (a *audioCounts) add(o *audioCounts) {
	a.Spoken += o.Spoken
	a.Heard += o.Heard
	a.EchoIdentical += o.EchoIdentical
	a.EchoLost += o.EchoLost
	a.EchoOutOfOrder += o.EchoOutOfOrder
	a.EchoForeign += o.EchoForeign
	a.DroppedQueueFull += o.DroppedQueueFull
	a.DroppedNotSpeaking += o.DroppedNotSpeaking
	a.CutOff += o.CutOff
	a.ResetByStart += o.ResetByStart
}

type audioReport struct {
	FramesSent     uint64 `json:"frames_sent"`
	SentSHA256     string `json:"sent_sha256"`
	FramesReceived uint64 `json:"frames_received"`
	FramesPlayed   uint64 `json:"frames_played"`
	ReceivedSHA256 string `json:"received_sha256"`
	audioCounts
	SpokenSHA256 string `json:"spoken_sha256"`
	HeardSHA256  string `json:"heard_sha256"`
}

func (d *device) reportAudioLocked(r *deviceReport) {
	a := d.stats.audio
	if a == nil {
		return
	}
	a.play(time.Now(), d.fleet.hashSeed)
	e := &a.echo
	r.Audio = audioReport{FramesSent: a.sent, SentSHA256: hexSum(a.sentSum), FramesReceived: a.received,
		FramesPlayed: a.played, ReceivedSHA256: hexSum(a.receivedSum),
		audioCounts: audioCounts{Spoken: a.spoken, Heard: a.heard, EchoIdentical: e.identical, EchoLost: e.lost,
			EchoOutOfOrder: e.outOfOrder, EchoForeign: e.foreign, DroppedQueueFull: a.queueFull,
			DroppedNotSpeaking: a.notSpeaking, CutOff: a.cutOff, ResetByStart: a.resetByStart},
		SpokenSHA256: hexSum(a.spokenSum), HeardSHA256: hexSum(a.heardSum)}
}

func (d *device) reportMQTTLocked(r *deviceReport) {
	s := &d.stats
	switch {
	case s.mqtt != nil || d.mqtt != nil:
		r.Transport = "mqtt"
	case s.connects+s.connectFailures > 0:
		r.Transport = "websocket"
	}
	r.Conversations, r.GoodbyesSent, r.GoodbyesReceived = s.conversations, s.goodbyesSent, s.goodbyesObeyed
	if m := s.mqtt; m != nil {
		r.MQTTReconnects, r.KeepalivePings, r.UDPSSRC = m.reconnects, m.pings, m.ssrc
		r.CONNACKCodes = make(map[string]uint64)
		for code, n := range m.connack {
			if n > 0 {
				r.CONNACKCodes[strconv.Itoa(code)] = n
			}
		}
	}
	if u := s.udp; u != nil {
		r.UDP = &udpReport{Sent: u.sent, Received: u.received, Verdicts: u.verdicts, Missing: u.missing,
			LostOnPurpose: u.lostOnPurpose, HeldBack: u.heldBack, Rebinds: u.rebinds, Killed: u.killed}
	}
}

func (t *totals) addMQTT(v *deviceReport) {
	if v.Transport != "" {
		t.Transports[v.Transport]++
	}
	t.Conversations += v.Conversations
	t.GoodbyesSent += v.GoodbyesSent
	t.GoodbyesReceived += v.GoodbyesReceived
	t.MQTTReconnects += v.MQTTReconnects
	t.KeepalivePings += v.KeepalivePings
	for code, n := range v.CONNACKCodes {
		t.CONNACKCodes[code] += n
	}
	if v.UDP != nil {
		t.UDP.add(v.UDP)
	}
	t.audioCounts.add(&v.Audio.audioCounts)
}

// writeMQTT writes the lines about MQTT, UDP and conversations, as far as there were any.
func (t *totals) writeMQTT(w *bufio.Writer) {
	if t.Transports["mqtt"] > 0 {
		fmt.Fprintf(w, "MQTT devices %d, CONNACK codes %v, reconnects %d, keepalive pings %d\n",
			t.Transports["mqtt"], t.CONNACKCodes, t.MQTTReconnects, t.KeepalivePings)
		fmt.Fprintf(w, "start to CONNACK: p50 %.1f ms, p99 %.1f ms, max %.1f ms; loss to CONNACK: p50 %.1f ms, p99 %.1f ms, max %.1f ms\n",
			t.ConnectWait.P50, t.ConnectWait.P99, t.ConnectWait.Max, t.ReconnectWait.P50, t.ReconnectWait.P99, t.ReconnectWait.Max)
	}
	if t.Conversations > 0 {
		fmt.Fprintf(w, "conversations over UDP %d, goodbyes %d sent %d received; packets %d up, %d down, %d missing, refused",
			t.Conversations, t.GoodbyesSent, t.GoodbyesReceived, t.UDP.Sent, t.UDP.Received, t.UDP.Missing)
		for i, name := range udpVerdictNames() {
			if udpVerdict(i) != udpAccepted {
				fmt.Fprintf(w, " %s %d", name, t.UDP.Verdicts[i])
			}
		}
		fmt.Fprintln(w)
	}
	if t.Spoken+t.Heard > 0 {
		fmt.Fprintf(w, "spoken %d, heard %d, echo: identical %d, lost %d, out of order %d, foreign %d; dropped: queue full %d, not speaking %d, cut off %d, reset %d\n",
			t.Spoken, t.Heard, t.EchoIdentical, t.EchoLost, t.EchoOutOfOrder, t.EchoForeign,
			t.DroppedQueueFull, t.DroppedNotSpeaking, t.CutOff, t.ResetByStart)
	}
}
