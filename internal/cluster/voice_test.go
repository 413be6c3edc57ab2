package cluster

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
	"fleetd/internal/hello"
)

// Messages and audio of a voice service that sends them in one burst arrive complete
// and in order: they use two subjects of one connection.
func TestVoiceServiceKeepsItsOrder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	c := f.dial(t, devicetest.NewScript())
	_, err := c.session.OpenAudio(hello.Device{}, hello.TransportWebSocket, func(*speech.Conversation) (speech.AudioPath, error) { return voice{c}, nil })
	if err != nil {
		t.Fatal(err)
	}
	publish := func(verb, token, body string) {
		t.Helper()
		msg := &nats.Msg{Subject: "test.v1.cmd." + id.Token() + "." + verb, Data: []byte(body), Header: nats.Header{HeaderToken: []string{token}}}
		if err := f.client.PublishMsg(msg); err != nil {
			t.Fatal(err)
		}
	}
	admin := f.mint.AdminToken()
	var want []string
	publish("audio", "wrong", "never played")
	publish("send", admin, `{"session_id":"s","type":"tts","state":"start"}`)
	want = append(want, `{"session_id":"s","type":"tts","state":"start"}`)
	for n := range 20 {
		packet := fmt.Sprintf("\xbb\x03%06d", n) // three CELT frames of 20 ms
		publish("audio", admin, packet)
		want = append(want, packet)
	}
	publish("send", admin, `{"session_id":"s","type":"tts","state":"stop"}`)
	want = append(want, `{"session_id":"s","type":"tts","state":"stop"}`)
	devicetest.Eventually(t, "everything has arrived", func() bool { return len(c.received()) == len(want) })
	if got := c.received(); strings.Join(got, "|") != strings.Join(want, "|") {
		t.Errorf("received %q", got)
	}
}

// A message is answered by the holder and over one hop alike.
func TestMessagesAreAnswered(t *testing.T) {
	f := newFleet(t)
	c := f.dial(t, devicetest.NewScript())
	ask := func(body string) string {
		t.Helper()
		msg := &nats.Msg{Subject: "test.v1.cmd." + id.Token() + ".send", Data: []byte(body), Header: nats.Header{HeaderToken: []string{f.mint.AdminToken()}}}
		answer, err := f.client.RequestMsg(msg, 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		return string(answer.Data)
	}
	const alert = `{"session_id":"s","type":"alert","status":"Bell","message":"It rings","emotion":"happy"}`
	if answer := ask(alert); answer != `{"ok":true}` || len(c.received()) != 1 || c.received()[0] != alert {
		t.Errorf("answer %s, the device got %q", answer, c.received())
	}
	for _, body := range []string{`{"type":"mcp","payload":{}}`, `{"type":"hello"}`} {
		if answer := ask(body); !strings.Contains(answer, `"code":"forbidden"`) {
			t.Errorf("%s: %s", body, answer)
		}
	}
	for name, service := range map[string]*fleet.Service{"local": f.holding, "routed": f.fwd} {
		if err := service.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: []byte(alert)}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		err := service.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: []byte(`{"type":"tts"}`)})
		if code(err) != devices.CodeBadRequest {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := len(c.received()); n != 3 {
		t.Errorf("the device got %d messages, want 3", n)
	}
}

// voice is the audio path of a script.
type voice struct{ *script }

func (v voice) SendAudio(f envelope.Frame) error { v.note(string(f.Opus)); return nil }
func (v voice) Close()                           {}
