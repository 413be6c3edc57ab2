package firmware

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	live "fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/envelope"
	core "fleetd/internal/fleet"
	"fleetd/internal/hello"
)

// What fleetd's own writers write must be survived by a device of every generation, and mean to it what was meant. These
// tests are where the two meet; survival_test.go does the same with OTA replies.

// survivor is a device without a network, of the profile that a number picks.
func survivor(t *testing.T, choice uint8, out link) *Device {
	t.Helper()
	o := Defaults()
	o.OTA, o.Devices, o.Profiles, o.TimeScale = "http://127.0.0.1:1/", 1, profiles()[int(choice)%len(profiles()):][:1], 1e-9
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	d := f.devices[0]
	d.out, d.opened, d.bootedAt = out, true, time.Now()
	return d
}

// mustLive fails if the device aborted, hangs, or could not read what it was sent.
func mustLive(t *testing.T, d *Device, sent any) {
	t.Helper()
	r := d.Report()
	switch {
	case r.Crashes > 0 || r.State == StateCrashed || r.State == StateHung || r.State == StateBootLoop:
		t.Fatalf("%s is %s after %s: %s", r.Profile, r.State, sent, r.Error)
	case r.ServerMessages["(invalid)"] > 0 || r.ServerMessages["hello (invalid)"] > 0 || r.ServerMessages["hello (other transport)"] > 0:
		t.Fatalf("%s cannot read %s: %v", r.Profile, sent, r.ServerMessages)
	}
}

// FuzzHelloToFirmware: a hello that hello.Server writes opens the channel with exactly what it was given.
func FuzzHelloToFirmware(f *testing.F) {
	f.Add(uint8(0), "s-1", "192.0.2.1", uint16(8884), uint16(16000), uint8(60), []byte("0123456789abcdef"), []byte{1})
	f.Add(uint8(5), "s-1", "audio.example.test", uint16(1), uint16(48000), uint8(20), []byte("\x00\xff"), []byte("fedcba9876543210"))
	f.Add(uint8(2), strings.Repeat("x", 64), "", uint16(65535), uint16(24000), uint8(120), []byte{}, []byte{})
	f.Fuzz(func(t *testing.T, choice uint8, session, server string, port, rate uint16, frame uint8, key, nonce []byte) {
		answer := hello.Server{Transport: hello.TransportWebSocket, SessionID: session, Audio: hello.AudioParams{SampleRate: int(rate), Channels: 1, FrameDuration: int(frame)}}
		d := survivor(t, choice>>1, &recorder{})
		if choice&1 != 0 {
			answer.Transport, answer.UDP = hello.TransportUDP, &hello.UDP{Server: server, Port: port}
			copy(answer.UDP.Key[:], key)
			copy(answer.UDP.Nonce[:], nonce)
			d.mqtt = &mqttState{}
		}
		text, err := answer.Append(nil)
		if err != nil {
			return
		}
		d.helloWait = make(chan struct{})
		d.feed(string(text))
		mustLive(t, d, text)
		if d.helloWait != nil || d.sessionID != session || d.playFrame != time.Duration(frame)*time.Millisecond {
			t.Fatalf("%s is session %q with frames of %v", text, d.sessionID, d.playFrame)
		}
		if u := answer.UDP; u != nil {
			if o := d.mqtt.offer; o.server != server || o.port != int(port) || !bytes.Equal(o.key, u.Key[:]) || !bytes.Equal(o.nonce, u.Nonce[:]) {
				t.Fatalf("%s is %+v", text, o)
			}
		}
	})
}

// FuzzFrameToFirmware: a packet that envelope frames is the packet that the device plays.
func FuzzFrameToFirmware(f *testing.F) {
	for _, opus := range []string{"", "\xf8", "\x58 packet"} {
		f.Add(uint8(1), uint32(60), []byte(opus))
		f.Add(uint8(2), uint32(1<<32-1), []byte(opus))
		f.Add(uint8(3), uint32(0), []byte(opus))
	}
	f.Fuzz(func(t *testing.T, version uint8, timestamp uint32, opus []byte) {
		msg, err := envelope.FramingOf(int(version)).AppendFrame(nil, envelope.Frame{Timestamp: timestamp, Opus: opus})
		if err != nil {
			return
		}
		got, _, err := unpackAudio(int32(envelope.FramingOf(int(version))), msg)
		if err != nil || !bytes.Equal(got, opus) {
			t.Fatalf("version %d: %x is %x, %v", version, msg, got, err)
		}
	})
}

// wire joins a device with a session of fleetd's core. Each direction has a goroutine, as a connection has.
type wire struct {
	up, down chan string
	ended    chan struct{}
	once     sync.Once
}

func newWire() *wire {
	return &wire{up: make(chan string, 1000), down: make(chan string, 1000), ended: make(chan struct{})}
}

// write is the device's link.
func (w *wire) write(_ byte, room *[]byte) error {
	w.up <- string((*room)[frameRoom:])
	return nil
}

func (w *wire) drop() { w.once.Do(func() { close(w.ended) }) }

// SendControl and Close are the session's connection.
func (w *wire) SendControl(msg []byte) error {
	w.down <- string(msg)
	return nil
}

func (w *wire) Close(devices.CloseReason) { w.drop() }

// join connects the device to a new core, and waits until its tools are known.
func (w *wire) join(t *testing.T, d *Device) *core.Service {
	t.Helper()
	service := devicetest.New().Service(t, core.Config{})
	devicetest.SetPolicy(t, service, access.Policy{URLs: []access.URLRule{{Tools: []string{"*"}, Prefixes: []string{"http://192.0.2.1/"}}}})
	var s *live.Session
	ready := make(chan struct{})
	var tasks sync.WaitGroup
	t.Cleanup(func() { w.drop(); tasks.Wait() })
	carry := func(from chan string, to func(text string)) {
		tasks.Go(func() {
			<-ready
			for {
				select {
				case text := <-from:
					to(text)
				case <-w.ended:
					return
				}
			}
		})
	}
	carry(w.down, func(text string) { d.feed(text); d.pump(true) })
	carry(w.up, func(text string) { _ = s.HandleControl([]byte(text)) }) // the session has ended
	var err error
	if s, err = service.Accept(devices.Identity{Device: devices.ID(d.id), ClientID: d.clientID, Transport: devices.TransportWebSocket}, w); err != nil {
		t.Fatal(err)
	}
	close(ready)
	s.StartMCP(devices.FeaturesMCP)
	devicetest.Eventually(t, "tools are listed", func() bool {
		v, err := service.Get(t.Context(), devices.ID(d.id))
		return err == nil && v.Presence.MCP == devices.MCPReady
	})
	return service
}

// FuzzMessageToFirmware goes the whole way: a caller's message or call, fleetd's core, the bytes that it sends, the device.
// What the core takes, the device survives and understands; a call that succeeds was made once.
func FuzzMessageToFirmware(f *testing.F) {
	const alert = `{"type":"alert","status":"s","message":"m","emotion":"happy"}`
	for _, body := range []string{alert, `{"type":"tts","state":"start"}`, `{"type":"tts"}`, `{"type":"tts","state":7}`, `{"TYPE":"tts","type":"alert"}`, `{"type":"goodbye","session_id":7}`,
		`{"type":"custom","payload":{"a":"\ud83d\u0000"}}`, `{"type":"llm","emotion":"x","text":"\u0000"}`, `{"type":"system","command":"nothing"}`, `{"type":"stt","text":"` + strings.Repeat("x", 70_000) + `"}`,
		`{"type":"notify","title":[[[[]]]]}`, `{"type":"hello","transport":1}`, `{"type":"mcp","payload":[]}`} {
		f.Add(uint8(0), uint8(0), "", body)
	}
	for _, args := range []string{`{"volume":50}`, `{"volume":1e2}`, `{"volume":50,"x":"\ud83d"}`, `{"volume":5e1,"VOLUME":7}`, `{}`, `[]`, `{"theme":"da\u0000rk"}`, `{"theme":"\ud83d\ude00"}`} {
		f.Add(uint8(1), uint8(1), "self.audio_speaker.set_volume", args)
		f.Add(uint8(2), uint8(1), "self.screen.set_theme", args)
	}
	f.Add(uint8(0), uint8(1), "self.assets.set_download_url", `{"url":"http://192.0.2.1/`+strings.Repeat("x", 4000)+`"}`)
	f.Add(uint8(3), uint8(1), "self.test.echo", `{"text":"a \"quoted\" \\ path\n"}`)
	f.Add(uint8(3), uint8(2), "tools/list", `{"cursor":"self.otto.walk"}`)
	f.Add(uint8(1), uint8(2), "tools/list", `{"cursor":"\u0000","withUserTools":true}`)
	f.Add(uint8(1), uint8(2), "tools/call", `{"name":"self.audio_speaker.set_volume","Name":1,"arguments":{"volume":1}}`)
	// Tools that wait for the network or restart the device are left out: what they do is not decided by the text.
	callable := []string{"self.audio_speaker.set_volume", "self.screen.set_brightness", "self.screen.set_theme", "self.assets.set_download_url", "self.test.echo", "self.otto.set_trim", "self.get_device_status"}
	f.Fuzz(func(t *testing.T, choice, kind uint8, name, body string) {
		w := newWire()
		d := survivor(t, choice, w)
		service := w.join(t, d)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		id := devices.ID(d.id)
		var err error
		switch kind % 3 {
		case 0:
			if strings.Contains(strings.ToLower(body), "reboot") {
				return
			}
			err = service.SendMessage(ctx, devices.Message{Principal: devicetest.Admin, Device: id, Body: json.RawMessage(body)})
		case 1:
			if !slices.Contains(callable, name) {
				return
			}
			_, err = service.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: name, Arguments: json.RawMessage(body)})
		default:
			if !json.Valid([]byte(body)) {
				return // callers read params from a valid document
			}
			if name == "tools/call" && !slices.ContainsFunc(callable, func(tool string) bool { return strings.Contains(body, tool) }) {
				return
			}
			_, err = service.CallRPC(ctx, devices.RPCCall{Principal: devicetest.Admin, Device: id, Method: name, Params: json.RawMessage(body)})
		}
		if err == nil && kind%3 == 1 {
			if r := d.Report(); r.CallsTotal != 1 || r.Calls[0].Tool != name {
				t.Fatalf("a call of %s with %s was made as %v", name, body, r.Calls)
			}
		}
		if e := new(devices.Error); errors.As(err, &e) && e.Code == devices.CodeDeviceTimeout && kind%3 == 1 {
			t.Fatalf("the device does not answer a call of %s with %s", name, body)
		}
		// Everything that was sent before has been read when this is answered.
		if _, err := service.CallTool(ctx, devices.ToolCall{Principal: devicetest.Admin, Device: id, Tool: "self.get_device_status"}); err != nil && ctx.Err() == nil {
			t.Fatalf("after %s %s: %v", name, body, err)
		}
		mustLive(t, d, name+" "+body)
	})
}
