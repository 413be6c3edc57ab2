package firmware

import (
	"encoding/json"
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
	verdicts                Verdicts
}

func (s *deviceStats) udpLocked() *udpStats {
	if s.udp == nil {
		s.udp = &udpStats{}
	}
	return s.udp
}

// Verdicts is the outcome of received datagrams in the report.
type Verdicts [verdicts]uint64

// MarshalJSON names the verdicts.
func (v Verdicts) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, name := range verdictNames() {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(append(strconv.AppendQuote(b, name), ':'), v[i], 10)
	}
	return append(b, '}'), nil
}

// UnmarshalJSON is the reverse, for tests and tools that read reports.
func (v *Verdicts) UnmarshalJSON(data []byte) error {
	var named map[string]uint64
	if err := json.Unmarshal(data, &named); err != nil {
		return err
	}
	for i, name := range verdictNames() {
		v[i] = named[name]
	}
	return nil
}

type UDPReport struct {
	Sent          uint64   `json:"sent"`
	Received      uint64   `json:"received"`
	Verdicts      Verdicts `json:"verdicts"`
	Missing       uint64   `json:"missing"`
	LostOnPurpose uint64   `json:"lost_on_purpose"`
	HeldBack      uint64   `json:"held_back"`
	Rebinds       uint64   `json:"rebinds"`
	Killed        uint64   `json:"killed"`
}

func (u *UDPReport) add(o *UDPReport) {
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

// AudioCounts is what became of the packets of conversations, per device and in total.
type AudioCounts struct {
	Spoken             uint64 `json:"spoken"`
	Audible            uint64 `json:"audible"`
	EchoIdentical      uint64 `json:"echo_identical"`
	EchoLost           uint64 `json:"echo_lost"`
	EchoOutOfOrder     uint64 `json:"echo_out_of_order"`
	EchoForeign        uint64 `json:"echo_foreign"`
	DroppedQueueFull   uint64 `json:"dropped_queue_full"`
	DroppedNotSpeaking uint64 `json:"dropped_not_speaking"`
	CutOff             uint64 `json:"cut_off"`
	ResetByStart       uint64 `json:"reset_by_start"`
}

func (a *AudioCounts) add(o *AudioCounts) {
	a.Spoken += o.Spoken
	a.Audible += o.Audible
	a.EchoIdentical += o.EchoIdentical
	a.EchoLost += o.EchoLost
	a.EchoOutOfOrder += o.EchoOutOfOrder
	a.EchoForeign += o.EchoForeign
	a.DroppedQueueFull += o.DroppedQueueFull
	a.DroppedNotSpeaking += o.DroppedNotSpeaking
	a.CutOff += o.CutOff
	a.ResetByStart += o.ResetByStart
}

type AudioReport struct {
	FramesSent     uint64 `json:"frames_sent"`
	SentSHA256     string `json:"sent_sha256"`
	FramesReceived uint64 `json:"frames_received"`
	FramesPlayed   uint64 `json:"frames_played"`
	ReceivedSHA256 string `json:"received_sha256"`
	AudioCounts
	SpokenSHA256  string `json:"spoken_sha256"`
	AudibleSHA256 string `json:"audible_sha256"`
}

func (d *Device) reportAudioLocked(r *DeviceReport) {
	a := d.stats.audio
	if a == nil {
		return
	}
	a.play(time.Now(), d.fleet.hashSeed)
	e := &a.echo
	r.Audio = AudioReport{FramesSent: a.sent, SentSHA256: hexSum(a.sentSum), FramesReceived: a.received,
		FramesPlayed: a.played, ReceivedSHA256: hexSum(a.receivedSum),
		AudioCounts: AudioCounts{Spoken: a.spoken, Audible: a.audible, EchoIdentical: e.identical, EchoLost: e.lost,
			EchoOutOfOrder: e.outOfOrder, EchoForeign: e.foreign, DroppedQueueFull: a.queueFull,
			DroppedNotSpeaking: a.notSpeaking, CutOff: a.cutOff, ResetByStart: a.resetByStart},
		SpokenSHA256: hexSum(a.spokenSum), AudibleSHA256: hexSum(a.heardSum)}
}

func (d *Device) reportMQTTLocked(r *DeviceReport) {
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
		r.UDP = &UDPReport{Sent: u.sent, Received: u.received, Verdicts: u.verdicts, Missing: u.missing,
			LostOnPurpose: u.lostOnPurpose, HeldBack: u.heldBack, Rebinds: u.rebinds, Killed: u.killed}
	}
}

func (t *Totals) addMQTT(v *DeviceReport) {
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
	t.AudioCounts.add(&v.Audio.AudioCounts)
}
