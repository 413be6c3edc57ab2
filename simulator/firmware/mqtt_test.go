package firmware

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestMQTTMessagesBeforeDuringAndAfterAConversation(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t)
	f := startFleet(t, b.http, "--talk", "--utterance", "600ms", "--reconnect", "2s")
	c := b.accept()
	want := "\x00\x04MQTT\x04\xc2\x00\x78\x00\x0c02f1ee000000\x00\x08client:u\x00\x02pw"
	if c.connect != want {
		t.Errorf("CONNECT %q\nwant    %q", c.connect, want)
	}
	s := c.answerHello("udp-1", "c0ffee01")
	var audible [][]byte
	for n := uint32(1); n <= wakeBurst; n++ {
		opus, sequence := s.hear()
		if sequence != n {
			t.Fatalf("packet %d has sequence %d", n, sequence)
		}
		audible = append(audible, opus)
	}
	for _, want := range []string{`"state":"detect"`, `"state":"start","mode":"auto"`} {
		if text := c.text(); !strings.Contains(text, want) || !strings.Contains(text, `"session_id":"udp-1"`) {
			t.Errorf("message %s, want %s", text, want)
		}
	}
	if r := c.call(1, "initialize"); r.SessionID != "udp-1" {
		t.Errorf("session %q", r.SessionID)
	}
	// Ten packets of speech, then silence until the server answers.
	for range 14 {
		opus, _ := s.hear()
		audible = append(audible, opus)
	}
	for _, opus := range audible[wakeBurst+11:] {
		if len(opus) > dtxFrame {
			t.Errorf("packet %x where nobody speaks", opus)
		}
	}
	c.send(`{"type":"tts","state":"start"}`)
	eventually(t, f, "speaking", func(DeviceReport) bool { return f.devices[0].appNow() == appSpeaking })
	for _, opus := range audible[wakeBurst:] {
		s.say(opus)
	}
	eventually(t, f, "all audible", func(r DeviceReport) bool { return r.Audio.Audible == uint64(len(audible)-wakeBurst) })
	c.send(`{"type":"tts","state":"stop"}`)
	for _, want := range []string{`"state":"start","mode":"auto"`, `{"session_id":"udp-1","type":"goodbye"}`} {
		if text := c.text(); !strings.Contains(text, want) {
			t.Errorf("message %s, want %s", text, want)
		}
	}
	if r := c.call(2, "initialize"); r.SessionID != "udp-1" {
		t.Errorf("session after goodbye %q", r.SessionID)
	}
	r := f.devices[0].Report()
	a := r.Audio
	if a.Spoken != 10 || a.EchoIdentical != uint64(len(audible)-wakeBurst) || a.EchoLost+a.EchoForeign+a.EchoOutOfOrder+a.CutOff != 0 {
		t.Errorf("audio %+v", a)
	}
	if r.State != StateConnected || r.Transport != "mqtt" || r.UDPSSRC != "c0ffee01" || r.GoodbyesSent != 1 || r.CONNACKCodes["0"] != 1 || r.Conversations != 1 {
		t.Errorf("report %+v", r)
	}
}

// appNow is the device's state as a test may look at it.
func (d *Device) appNow() appState {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.app
}

func TestMQTTBeforeTheFirstHello(t *testing.T) {
	b := newFakeBroker(t)
	startFleet(t, b.http)
	c := b.accept()
	c.publish(1, `{"type":"mcp","payload":{"jsonrpc":"2.0","method":"initialize","id":5}}`)
	if kind, body := c.next(); kind != mqttPubAck || body != "\x00\x07" {
		t.Errorf("answer to quality 1: type %d %q", kind, body)
	}
	if text := c.text(); !strings.HasPrefix(text, `{"session_id":"","type":"mcp","payload":{"jsonrpc":"2.0","id":5,"result"`) {
		t.Errorf("reply %s", text)
	}
	// Longer than any buffer the device keeps.
	c.send(`{"type":"noop","pad":"` + strings.Repeat("x", 70_000) + `"}`)
	if r := c.call(6, "initialize"); r.SessionID != "" {
		t.Errorf("session %q", r.SessionID)
	}
}

func TestMQTTLossLeavesTheConversationAlone(t *testing.T) {
	b := newFakeBroker(t)
	f := startFleet(t, b.http, "--talk", "--utterance", "1h", "--reconnect", "10s")
	c := b.accept()
	s := c.answerHello("udp-1", "c0ffee01")
	for range wakeBurst + 2 {
		s.hear()
	}
	_ = c.Close()
	c = b.accept()
	for range 5 {
		s.hear()
	}
	if got := f.devices[0].appNow(); got != appListening {
		t.Errorf("state %d after the reconnect", got)
	}
	r := eventually(t, f, "connected again", inState(StateConnected))
	if r.MQTTReconnects != 1 || r.CONNACKCodes["0"] != 2 || r.Disconnects != 1 || r.SendErrors != 0 {
		t.Errorf("report %+v", r)
	}
	if total := f.Report().Totals; total.ReconnectWait.Max < 90 || total.ConnectWait.Max <= 0 {
		t.Errorf("waits %+v %+v", total.ConnectWait, total.ReconnectWait)
	}
	c.send(`{"type":"tts","state":"start"}`)
	eventually(t, f, "speaking", func(DeviceReport) bool { return f.devices[0].appNow() == appSpeaking })
}

func TestMQTTFailedPublishEndsTheConversation(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t)
	f := startFleet(t, b.http, "--talk", "--utterance", "1h", "--reconnect", "1h")
	c := b.accept()
	s := c.answerHello("udp-1", "c0ffee01")
	for range wakeBurst + 2 {
		s.hear()
	}
	_ = c.Close()
	eventually(t, f, "lost", func(r DeviceReport) bool { return r.Disconnects == 1 })
	d := f.devices[0]
	if d.appNow() != appListening {
		t.Error("the loss alone ended the conversation")
	}
	d.sendText(`{"type":"mcp"}`)
	if r := d.Report(); r.SendErrors != 1 || d.appNow() != appIdle {
		t.Errorf("state %d, send errors %d", d.appNow(), r.SendErrors)
	}
	// The next wake connects at once and sends a hello without a goodbye.
	d.wake()
	c = b.accept()
	if text := c.text(); text != d.profile.helloUDP() {
		t.Errorf("first message %s", text)
	}
}

func TestMQTTRefusedComesBack(t *testing.T) {
	b := newFakeBroker(t)
	b.connack = 5
	f := startFleet(t, b.http, "--reconnect", "2s")
	r := eventually(t, f, "refused", func(r DeviceReport) bool { return r.CONNACKCodes["5"] >= 2 })
	if !strings.Contains(r.Error, "not authorized") || r.Connects != 0 {
		t.Errorf("report %+v", r)
	}
	b.mu.Lock()
	b.connack = 0
	b.mu.Unlock()
	b.accept()
	r = eventually(t, f, "connected", inState(StateConnected))
	if r.Error != "" || r.MQTTReconnects != 0 {
		t.Errorf("report %+v", r)
	}
}

func TestMQTTKeepalive(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t)
	b.keep = 1
	f := startFleet(t, b.http, "--reconnect", "1s")
	c := b.accept()
	if kind, _ := c.next(); kind != mqttPingReq {
		t.Fatalf("packet %d, want PINGREQ", kind)
	}
	_, _ = c.Write([]byte{mqttPingResp << 4, 0})
	if kind, _ := c.next(); kind != mqttPingReq {
		t.Fatalf("packet %d, want PINGREQ", kind)
	}
	// Without an answer the device gives the connection up and comes back.
	b.accept()
	if r := f.devices[0].Report(); r.KeepalivePings < 2 || r.Disconnects != 1 {
		t.Errorf("pings %d, disconnects %d", r.KeepalivePings, r.Disconnects)
	}
}

func TestMQTTSubscribesOnlyWhenAsked(t *testing.T) {
	for _, ask := range []bool{false, true} {
		b := newFakeBroker(t)
		var args []string
		if ask {
			args = []string{"--subscribe"}
		}
		startFleet(t, b.http, args...)
		c := b.accept()
		if ask {
			if kind, body := c.next(); kind != mqttSubscribe || body != "\x00\x01\x00\x18fleetd/02f1ee000000/down\x00" {
				t.Errorf("packet %d %q", kind, body)
			}
		}
		c.call(1, "initialize")
	}
}

func TestMQTTHelloTimesOutOnNonsense(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t)
	f := startFleet(t, b.http, "--talk")
	c := b.accept()
	c.text()
	c.send(`{"type":"hello","transport":"udp","session_id":"x","udp":{"server":"127.0.0.1","port":"1","key":"00","nonce":"00"}}`)
	r := eventually(t, f, "gave up", func(r DeviceReport) bool { return strings.Contains(r.Error, "hello_timeout") })
	if r.ServerHellos != 0 || r.ServerMessages["hello (invalid)"] != 1 || r.State != StateConnected {
		t.Errorf("report %+v", r)
	}
	// The id was taken over all the same.
	if r := c.call(1, "initialize"); r.SessionID != "x" {
		t.Errorf("session %q", r.SessionID)
	}
}

func TestMQTTManualModeAndServerGoodbye(t *testing.T) {
	b := newFakeBroker(t)
	f := startFleet(t, b.http, "--talk", "--talk-for", "200ms", "--utterance", "1h", "--wake", "400ms") // not before the goodbye has arrived
	c := b.accept()
	s := c.answerHello("udp-1", "00000001")
	for range wakeBurst {
		s.hear()
	}
	for _, want := range []string{`"detect"`, `"start","mode":"manual"`, `"stop"`} {
		if text := c.text(); !strings.Contains(text, want) {
			t.Errorf("message %s, want %s", text, want)
		}
	}
	c.send(`{"type":"goodbye"}`)
	c.send(`{"type":"goodbye","session_id":"other"}`)
	c.send(`{"type":"goodbye","session_id":"udp-1"}`)
	// The next wake: a new session, and no goodbye before it.
	s = c.answerHello("udp-2", "00000002")
	for n := uint32(1); n <= wakeBurst; {
		p := s.datagram()
		if bytes.Equal(p[4:8], []byte{0, 0, 0, 2}) {
			if p[15] != byte(n) {
				t.Fatalf("packet %d of the new session has sequence %d", n, p[15])
			}
			n++
		}
	}
	if r := f.devices[0].Report(); r.GoodbyesReceived != 1 || r.GoodbyesSent != 0 || r.Conversations != 2 {
		t.Errorf("report %+v", r)
	}
}

func TestEmptyDatagramEndsTheReceiver(t *testing.T) {
	b := newFakeBroker(t)
	f := startFleet(t, b.http, "--talk", "--utterance", "1h", "--wake", "10ms")
	c := b.accept()
	s := c.answerHello("udp-1", "00000001")
	s.hear()
	s.raw(nil)
	r := eventually(t, f, "killed", func(r DeviceReport) bool { return r.UDP != nil && r.UDP.Killed == 1 })
	if !strings.Contains(r.Error, "empty datagram") {
		t.Errorf("error %q", r.Error)
	}
	s.say([]byte("for nobody"))
	c.send(`{"type":"goodbye","session_id":"udp-1"}`)
	for n := range 2 {
		if text := c.text(); !strings.Contains(text, `"listen"`) {
			t.Fatalf("message %d: %s", n, text)
		}
	}
	s = c.answerHello("udp-2", "00000002")
	for s.datagram()[7] != 2 {
	}
	s.say([]byte("an Opus packet"))
	r = eventually(t, f, "receives again", func(r DeviceReport) bool { return r.UDP.Received == 1 })
	if r.Audio.DroppedNotSpeaking != 1 {
		t.Errorf("audio %+v", r.Audio)
	}
}

func TestUDPFaults(t *testing.T) {
	run := func(name string, check func(t *testing.T, f *Fleet, c *fakeMQTT, s *fakeSession)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newFakeBroker(t)
			f := startFleet(t, b.http, "--talk", "--utterance", "1h", "--fault", name)
			c := b.accept()
			if name == "bad-frame" {
				for range 4 {
					c.text()
				}
			}
			check(t, f, c, c.answerHello("udp-1", "00000001"))
		})
	}
	run("udp-loss", func(t *testing.T, f *Fleet, _ *fakeMQTT, s *fakeSession) {
		gaps, last := 0, uint32(0)
		for last < wakeBurst+20 {
			_, sequence := s.hear()
			gaps += int(sequence - last - 1)
			last = sequence
		}
		if r := f.devices[0].Report(); gaps == 0 || r.UDP.LostOnPurpose < uint64(gaps) {
			t.Errorf("%d gaps, %d lost on purpose", gaps, r.UDP.LostOnPurpose)
		}
	})
	run("udp-reorder", func(t *testing.T, f *Fleet, _ *fakeMQTT, s *fakeSession) {
		swaps, last := 0, uint32(0)
		seen := map[uint32]bool{}
		for n := uint32(1); n <= wakeBurst+20; n++ {
			sequence := uint32(s.datagram()[15])
			if sequence < last {
				swaps++
			}
			last = sequence
			seen[sequence] = true
		}
		if r := f.devices[0].Report(); swaps == 0 || len(seen) != wakeBurst+20 || r.UDP.HeldBack == 0 {
			t.Errorf("%d swaps, %d different packets, %d held back", swaps, len(seen), r.UDP.HeldBack)
		}
	})
	run("nat", func(t *testing.T, f *Fleet, c *fakeMQTT, s *fakeSession) {
		s.hear()
		first := s.from.Port
		for range 200 {
			s.hear()
			if s.from.Port != first {
				break
			}
		}
		if s.from.Port == first {
			t.Fatal("the port never changed")
		}
		s.say([]byte("an Opus packet"))
		r := eventually(t, f, "receives at the new port", func(r DeviceReport) bool { return r.UDP.Received == 1 })
		if r.UDP.Rebinds != 1 || r.UDP.Verdicts[Accepted] != 1 {
			t.Errorf("udp %+v", r.UDP)
		}
	})
	run("bad-frame", func(t *testing.T, f *Fleet, c *fakeMQTT, s *fakeSession) {
		verdicts := map[Verdict]int{}
		for range 13 {
			_, _, verdict := s.keys.open(s.datagram())
			verdicts[verdict]++
		}
		if len(verdicts) < 4 {
			t.Errorf("verdicts %v", verdicts)
		}
		s.hear()
	})
	run("dup-hello", func(t *testing.T, f *Fleet, c *fakeMQTT, s *fakeSession) {
		// The answer to the second one re-keys the session.
		second := c.answerHello("udp-2", "00000002")
		for p := second.datagram(); p[7] != 2; p = second.datagram() {
		}
		r := f.devices[0].Report()
		if r.ServerHellos != 2 || r.Conversations != 1 || r.UDPSSRC != "00000002" {
			t.Errorf("report %+v", r)
		}
	})
	run("flap", func(t *testing.T, f *Fleet, c *fakeMQTT, s *fakeSession) {
		c.broker.accept()
		s.hear()
		if r := eventually(t, f, "back", inState(StateConnected)); r.MQTTReconnects == 0 || r.Conversations != 1 {
			t.Errorf("report %+v", r)
		}
	})
}

func TestIdleTimerComesBackEarlier(t *testing.T) {
	t.Parallel()
	b := newFakeBroker(t)
	// Ten hours of esp-mqtt against the firmware's own sixty seconds, both a hundredth of that.
	startFleet(t, b.http, "--reconnect", "10h")
	c := b.accept()
	_ = c.Close()
	started := time.Now()
	b.accept()
	if waited := time.Since(started); waited < 500*time.Millisecond {
		t.Errorf("came back after %s", waited)
	}
}

func TestEndpoint(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want string
	}{
		{"h", "h 8883 true"}, {"h:1883", "h 1883 false"}, {"h:8883", "h 8883 true"}, {"192.0.2.5:18830x", "192.0.2.5 18830 false"},
	} {
		u, err := parseEndpoint(tt.in)
		if got := fmt.Sprint(u.host, " ", u.port, " ", u.secure); err != nil || got != tt.want {
			t.Errorf("%s: %s, %v", tt.in, got, err)
		}
	}
}
