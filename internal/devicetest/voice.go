package devicetest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
)

// Packet returns an Opus packet of 60 ms that is different for each n: three CELT frames
// of 20 ms (RFC 6716, configuration 23, code 3).
func Packet(n int) []byte { return fmt.Appendf([]byte{23<<3 | 3, 3}, "packet %08d", n) }

func audio(t *testing.T, f Frontend) {
	d := f.Online(t, testID, "c1", NewScript())
	Eventually(t, "audio is open", func() bool { v, err := f.Service.Get(t.Context(), testID); return err == nil && v.AudioOpen })
	const packets = 5
	for n := range packets {
		if err := d.SendAudio(Packet(n)); err != nil {
			t.Fatal(err)
		}
	}
	Eventually(t, "all packets are published", func() bool { return len(f.Ports.Frames()) == packets })
	for n, frames := range f.Ports.Frames() {
		if frames.Seq != uint64(n+1) || !bytes.Equal(frames.Opus, Packet(n)) || frames.Session == "" || frames.Topic != "audio."+testID.Token() {
			t.Errorf("packet %d: %+v", n, frames)
		}
	}
	v, err := f.Service.Get(t.Context(), testID)
	if err != nil || v.AudioPackets != packets || v.AudioDropped != 0 {
		t.Errorf("%d packets, %d dropped, %v", v.AudioPackets, v.AudioDropped, err)
	}
}

// tell sends a message to the device under test.
func (f Frontend) tell(t testing.TB, body string) {
	t.Helper()
	if err := f.Service.SendMessage(t.Context(), devices.Message{Principal: Admin, Device: testID, Body: json.RawMessage(body)}); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
}

// withOpenAudio returns a device whose audio has arrived, so that audio can be sent to it.
func (f Frontend) withOpenAudio(t testing.TB, script *Script) Device {
	t.Helper()
	d := f.Online(t, testID, "c1", script)
	Eventually(t, "audio is open", func() bool { v, err := f.Service.Get(t.Context(), testID); return err == nil && v.AudioOpen })
	const packets = 6 // enough to make its address known over UDP
	before := len(f.Ports.Frames())
	for n := range packets {
		if err := d.SendAudio(Packet(1000 + n)); err != nil {
			t.Fatal(err)
		}
	}
	Eventually(t, "the audio of the device arrives", func() bool { return len(f.Ports.Frames()) == before+packets })
	return d
}

func speaks(t *testing.T, f Frontend) {
	script := NewScript()
	d := f.withOpenAudio(t, script)
	const packets = 25 // 1.5 s, more than the server sends ahead
	f.tell(t, `{"type":"tts","state":"start"}`)
	for n := range packets {
		f.Service.SendAudio(testID, Packet(n))
	}
	f.tell(t, `{"type":"tts","state":"stop"}`)
	begun := time.Now()
	for n := range packets {
		opus, err := d.ReceiveAudio()
		if err != nil || !bytes.Equal(opus, Packet(n)) {
			t.Fatalf("packet %d is %q, %v", n, opus, err)
		}
		if n == packets-1 && time.Since(begun) < 300*time.Millisecond {
			t.Error("all packets came at once: the device could not keep them")
		}
	}
	if messages := script.Messages(); strings.Contains(strings.Join(messages, ""), "stop") {
		t.Error("the stop overtook the end of the speech")
	}
	Eventually(t, "start and stop arrive", func() bool { return len(script.Messages()) == 2 })
	for i, state := range []string{"start", "stop"} {
		if m := script.Messages()[i]; !strings.Contains(m, `"type":"tts","state":"`+state+`"`) || !strings.Contains(m, `"session_id":"`) {
			t.Errorf("message %d is %s", i, m)
		}
	}
}

func interruption(t *testing.T, f Frontend) {
	script := NewScript()
	d := f.withOpenAudio(t, script)
	f.tell(t, `{"type":"tts","state":"start"}`)
	for n := range 100 {
		f.Service.SendAudio(testID, Packet(n))
	}
	if _, err := d.ReceiveAudio(); err != nil {
		t.Fatal(err)
	}
	if err := d.Send(`{"session_id":"","type":"abort"}`); err != nil {
		t.Fatal(err)
	}
	Eventually(t, "the device receives the stop", func() bool {
		messages := script.Messages()
		return len(messages) == 2 && strings.Contains(messages[1], `"type":"tts","state":"stop"`)
	})
	if n := f.Service.Stats().AudioDrops.Get(speech.AudioAborted); n < 60 {
		t.Errorf("%d packets were thrown away; some 80 waited", n)
	}
	Eventually(t, "the service receives it", func() bool {
		seen := f.Ports.Seen(devices.EventMessage)
		return len(seen) == 1 && seen[0].Subject == "abort"
	})
}

func messages(t *testing.T, f Frontend) {
	script := NewScript()
	f.Online(t, testID, "c1", script)
	const alert = `{"session_id":"s","type":"alert","status":"Door","message":"It rings","emotion":"happy"}`
	f.tell(t, alert)
	Eventually(t, "the alert arrives", func() bool { return len(script.Messages()) == 1 && script.Messages()[0] == alert })
}

func toolsBeforeHello(t *testing.T, f Frontend) {
	d := f.Dial(t, testID, "c1")
	t.Cleanup(d.Close)
	script := NewScript()
	go script.Play(d)
	Eventually(t, "the device's tools are ready", func() bool {
		v, err := f.Service.Get(t.Context(), testID)
		return err == nil && v.CatalogState == devices.CatalogReady
	})
	if _, err := call(f.Service, volume, `{"volume":1}`, 5*time.Second); err != nil {
		t.Error(err)
	}
	f.tell(t, `{"session_id":"s","type":"alert","status":"a","message":"b","emotion":"c"}`)
	Eventually(t, "the alert arrives", func() bool { return len(script.Messages()) == 1 })
	if v, err := f.Service.Get(t.Context(), testID); err != nil || v.AudioOpen {
		t.Errorf("audio is open %t, %v", v.AudioOpen, err)
	}
}

// reopen sends another hello and returns the server's answer.
func (f Frontend) reopen(t *testing.T, d Device) string {
	t.Helper()
	if err := d.Send(f.Hello); err != nil {
		t.Fatal(err)
	}
	for {
		text, err := d.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(text, `"type":"hello"`) {
			if err := d.HandleHello(text); err != nil {
				t.Fatal(err)
			}
			return text
		}
	}
}

func helloAgain(t *testing.T, f Frontend) {
	d := f.Dial(t, testID, "c1")
	defer d.Close()
	first, second := f.reopen(t, d), f.reopen(t, d)
	var a, b struct {
		SessionID string `json:"session_id"`
		UDP       struct{ Key, Nonce string }
	}
	if json.Unmarshal([]byte(first), &a) != nil || json.Unmarshal([]byte(second), &b) != nil {
		t.Fatalf("%s, %s", first, second)
	}
	if a.SessionID == b.SessionID || a.UDP.Key == b.UDP.Key || a.UDP.Nonce == b.UDP.Nonce {
		t.Errorf("the second hello repeats the first: %s, %s", first, second)
	}
	if err := d.SendAudio(Packet(1)); err != nil {
		t.Fatal(err)
	}
	Eventually(t, "the audio of the second conversation arrives", func() bool {
		frames := f.Ports.Frames()
		return len(frames) == 1 && frames[0].Session == b.SessionID && frames[0].Seq == 1
	})
	if n := f.Service.Stats().Conversations.Load(); n != 1 {
		t.Errorf("%d conversations are open", n)
	}
	if v, err := f.Service.Get(t.Context(), testID); err != nil || v.State != devices.StateOnline {
		t.Errorf("after the second hello the device is %s, %v", v.State, err)
	}
}

func goodbye(t *testing.T, f Frontend) {
	d := f.Dial(t, testID, "c1")
	defer d.Close()
	var h struct {
		SessionID string `json:"session_id"`
	}
	if text := f.reopen(t, d); json.Unmarshal([]byte(text), &h) != nil {
		t.Fatal(text)
	}
	if err := d.Send(`{"session_id":"` + h.SessionID + `","type":"goodbye"}`); err != nil {
		t.Fatal(err)
	}
	Eventually(t, "audio is closed and the device online", func() bool {
		v, err := f.Service.Get(t.Context(), testID)
		return err == nil && !v.AudioOpen && v.State == devices.StateOnline
	})
}
