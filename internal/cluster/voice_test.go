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

// A voice service that speaks in one burst is heard whole and in order: its
// messages and its audio travel on two subjects of one connection.
func TestVoiceServiceIsHeardInOrder(t *testing.T) {
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
	publish("audio", "wrong", "never heard")
	publish("send", admin, `{"session_id":"s","type":"tts","state":"start"}`)
	want = append(want, `{"session_id":"s","type":"tts","state":"start"}`)
	for n := range 20 {
		packet := fmt.Sprintf("\xbb\x03%06d", n) // three CELT frames of 20 ms
		publish("audio", admin, packet)
		want = append(want, packet)
	}
	publish("send", admin, `{"session_id":"s","type":"tts","state":"stop"}`)
	want = append(want, `{"session_id":"s","type":"tts","state":"stop"}`)
	devicetest.Eventually(t, "everything is heard", func() bool { return len(c.received()) == len(want) })
	if got := c.received(); strings.Join(got, "|") != strings.Join(want, "|") {
		t.Errorf("heard %q", got)
	}
}

// A message is answered, by the holder and over one hop alike.
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
	const alert = `{"session_id":"s","type":"alert","status":"Door","message":"It rings","emotion":"happy"}`
	if answer := ask(alert); answer != `{"ok":true}` || len(c.received()) != 1 || c.received()[0] != alert {
		t.Errorf("answer %s, the device got %q", answer, c.received())
	}
	for _, body := range []string{`{"type":"mcp","payload":{}}`, `{"type":"hello"}`} {
		if answer := ask(body); !strings.Contains(answer, `"code":"forbidden"`) {
			t.Errorf("%s: %s", body, answer)
		}
	}
	for name, service := range map[string]*fleet.Service{"local": f.holding, "routed": f.fwd} {
		if err := service.SendMessage(t.Context(), devices.Message{By: devicetest.Admin, Device: id, Body: []byte(alert)}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		err := service.SendMessage(t.Context(), devices.Message{By: devicetest.Admin, Device: id, Body: []byte(`{"type":"tts"}`)})
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
