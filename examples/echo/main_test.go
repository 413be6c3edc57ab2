package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// rig is an echo, and a node that receives from devices and records what is sent to them.
type rig struct {
	t    *testing.T
	e    *echo
	nc   *nats.Conn
	sent chan *nats.Msg
	seq  int
}

func newRig(t *testing.T) *rig {
	t.Helper()
	s, err := server.NewServer(&server.Options{DontListen: true, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	connect := func() *nats.Conn {
		nc, err := nats.Connect("", nats.InProcessServer(s))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	r := &rig{t: t, nc: connect(), sent: make(chan *nats.Msg, 1000)}
	_, err = r.nc.Subscribe("p.v1.cmd.>", func(msg *nats.Msg) {
		r.sent <- msg
		if msg.Reply != "" {
			_ = msg.Respond([]byte(`{"ok":true}`))
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	e := &echo{nc: connect(), prefix: "p.v1", token: "secret", pause: 16, most: 100, devices: map[string]*recording{}}
	if err := e.subscribe("audio", e.audio); err != nil {
		t.Fatal(err)
	}
	if err := e.subscribe("messages.listen", e.listen); err != nil {
		t.Fatal(err)
	}
	r.e = e
	for _, nc := range []*nats.Conn{r.nc, e.nc} {
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// speech and silence publish packets of a device and return them.
func (r *rig) speech(device string, n int) (packets []string) {
	for range n {
		r.seq++
		packets = append(packets, r.packet(device, fmt.Sprintf("speech %030d", r.seq)))
	}
	return packets
}

func (r *rig) silence(device string, n int) (packets []string) {
	for i := range n {
		text := "\x08"
		if i%7 == 0 {
			text = strings.Repeat("comfort noise", 7)
		}
		packets = append(packets, r.packet(device, text))
	}
	return packets
}

func (r *rig) packet(device, text string) string {
	r.t.Helper()
	err := r.nc.PublishMsg(&nats.Msg{Subject: "p.v1.devices." + device + ".audio", Data: []byte(text), Header: nats.Header{"Fleetd-Session": {"s"}}})
	if err != nil {
		r.t.Fatal(err)
	}
	return text
}

func (r *rig) listen(device, rest string) {
	r.t.Helper()
	if err := r.nc.Publish("p.v1.devices."+device+".messages.listen", []byte(`{"device":"`+device+`","message":{"type":"listen",`+rest+`}}`)); err != nil {
		r.t.Fatal(err)
	}
}

// until waits for a state of a device's recording: messages and packets travel apart.
func (r *rig) until(what string, device string, true func(h *recording) bool) {
	r.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range 10_000 {
		<-tick.C
		r.e.mu.Lock()
		h := r.e.devices[device]
		done := h != nil && true(h)
		r.e.mu.Unlock()
		if done {
			return
		}
	}
	r.t.Fatalf("did not come true: %s", what)
}

// echoed expects the packets between start and stop.
func (r *rig) echoed(device string, packets []string) {
	r.t.Helper()
	next := func() *nats.Msg {
		select {
		case msg := <-r.sent:
			return msg
		case <-time.After(10 * time.Second):
			r.t.Fatal("nothing more is sent")
			return nil
		}
	}
	expect := func(i int, verb, data string) {
		r.t.Helper()
		msg := next()
		if msg.Subject != "p.v1.cmd."+device+"."+verb || !bytes.Equal(msg.Data, []byte(data)) || msg.Header.Get("Fleetd-Token") != "secret" {
			r.t.Fatalf("%d: %s %q with %v, want %s %q", i, msg.Subject, msg.Data, msg.Header, verb, data)
		}
	}
	expect(-1, "send", `{"type":"tts","state":"start"}`)
	for i, packet := range packets {
		expect(i, "audio", packet)
	}
	expect(len(packets), "send", `{"type":"tts","state":"stop"}`)
}

// A device with a button: everything until it is released, pauses included.
func TestButton(t *testing.T) {
	r := newRig(t)
	r.listen("d1", `"state":"start","mode":"manual"`)
	r.until("it has a button", "d1", func(h *recording) bool { return h.manual })
	spoken := r.speech("d1", 20)
	spoken = append(spoken, r.silence("d1", 40)...)
	spoken = append(spoken, r.speech("d1", 3)...)
	r.until("everything is recorded", "d1", func(h *recording) bool { return len(h.packets) == len(spoken) })
	r.listen("d1", `"state":"stop"`)
	r.echoed("d1", spoken)
	r.listen("d1", `"state":"stop"`) // nothing was spoken
	r.listen("d1", `"state":7`)
	r.listen("d1", `"state":"start","mode":"manual"`)
	r.until("it listens", "d1", func(h *recording) bool { return h.speaking.IsZero() })
	spoken = r.speech("d1", 1)
	r.until("it is recorded", "d1", func(h *recording) bool { return len(h.packets) == 1 })
	r.listen("d1", `"state":"stop"`)
	r.echoed("d1", spoken)
}

// A device without one: silence ends its utterance, and is not an utterance itself. Two devices do not mix.
func TestSilenceEndsAnUtterance(t *testing.T) {
	r := newRig(t)
	r.speech("d2", 3) // a cough
	before := append(r.silence("d1", 60), r.speech("d1", 3)...)
	before = append(before, r.silence("d1", 5)...)
	spoken := append(r.speech("d1", 30), r.silence("d1", 8)...) // a pause
	spoken = append(spoken, r.speech("d1", 10)...)
	after := r.silence("d1", 60)
	r.until("the answer is given", "d1", func(h *recording) bool { return !h.speaking.IsZero() })
	if start := <-r.sent; start.Subject != "p.v1.cmd.d1.send" {
		t.Fatalf("%s %q", start.Subject, start.Data)
	}
	var got []string
	for msg := range r.sent {
		if msg.Subject == "p.v1.cmd.d1.send" {
			break
		}
		got = append(got, string(msg.Data))
	}
	all := strings.Join(before, "|") + "|" + strings.Join(spoken, "|") + "|" + strings.Join(after, "|")
	if echo := strings.Join(got, "|"); !strings.Contains(all, echo) || !strings.Contains(echo, strings.Join(spoken, "|")) || len(got) > len(spoken)+32 {
		t.Errorf("%d packets for %d: %q", len(got), len(spoken), echo)
	}
	select {
	case msg := <-r.sent:
		t.Errorf("silence is echoed: %s", msg.Subject)
	default:
	}
}

// No device is recorded without limit, nor while the answer is played.
func TestLongest(t *testing.T) {
	r := newRig(t)
	spoken := r.speech("d1", 100)
	r.speech("d1", 50) // our own voice, with echo cancellation
	r.echoed("d1", spoken)
	r.until("nothing is kept", "d1", func(h *recording) bool { return len(h.packets) == 0 })
	r.listen("d1", `"state":"start","mode":"auto"`)
	r.until("it listens", "d1", func(h *recording) bool { return h.speaking.IsZero() })
	r.echoed("d1", r.speech("d1", 100))
}
