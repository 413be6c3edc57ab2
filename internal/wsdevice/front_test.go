package wsdevice_test

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"go.uber.org/goleak"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
	"fleetd/internal/wsdevice"
)

const hello = `{"type":"hello","version":1,"features":{"mcp":true},"transport":"websocket","audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}`

const id = devices.ID("02:00:00:00:00:01")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bench is a front end behind a real HTTP server.
type bench struct {
	*devicetest.Ports
	service *fleet.Service
	mint    *credential.Mint
	url     string
	front   *wsdevice.Front
	reads   *devicetest.Deadlines
}

func open(t *testing.T, change ...func(*wsdevice.Options)) bench {
	t.Helper()
	mint, err := credential.New([]byte("a secret for tests only"))
	if err != nil {
		t.Fatal(err)
	}
	b := bench{Ports: devicetest.New(), mint: mint}
	b.service = b.Service(t, fleet.Config{})
	options := wsdevice.Options{Service: b.service, Mint: mint, Log: slog.New(slog.DiscardHandler)}
	for _, f := range change {
		f(&options)
	}
	b.front = wsdevice.New(options)
	server := httptest.NewUnstartedServer(b.front)
	b.reads = &devicetest.Deadlines{Listener: server.Listener}
	server.Listener = b.reads
	server.Start()
	t.Cleanup(func() {
		server.Close()
		b.service.Close()
		b.front.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	b.url = "ws" + strings.TrimPrefix(server.URL, "http")
	return b
}

func (b bench) header(id devices.ID, client string, generation int64) http.Header {
	return http.Header{"Device-Id": {string(id)}, "Client-Id": {client}, "Protocol-Version": {"2"},
		"Authorization": {"Bearer " + b.mint.DeviceToken(string(id), client, generation)}}
}

// device is a gorilla client: another implementation than the simulator's.
type device struct {
	ws *websocket.Conn
	mu sync.Mutex

	text, audio chan []byte // closed at the end
}

// read sorts what comes until the connection ends.
func (d *device) read() {
	defer close(d.text)
	defer close(d.audio)
	for {
		kind, data, err := d.ws.ReadMessage()
		switch {
		case err != nil:
			return
		case kind == websocket.TextMessage:
			d.text <- data
		default:
			frame, err := envelope.Framing2.ParseFrame(data)
			if err != nil {
				return
			}
			d.audio <- bytes.Clone(frame.Opus)
		}
	}
}

func (b bench) dial(t testing.TB, id devices.ID, client string) devicetest.Device {
	t.Helper()
	ws, _, err := websocket.DefaultDialer.Dial(b.url, b.header(id, client, 0))
	if err != nil {
		t.Fatal(err)
	}
	d := &device{ws: ws, text: make(chan []byte, 1000), audio: make(chan []byte, 1000)}
	go d.read()
	return d
}

func (d *device) Send(text string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ws.WriteMessage(websocket.TextMessage, []byte(text))
}

func (d *device) SendAudio(opus []byte) error {
	frame, err := envelope.Framing2.AppendFrame(nil, envelope.Frame{Opus: opus})
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ws.WriteMessage(websocket.BinaryMessage, frame)
}

func (d *device) Receive() (string, error) {
	data, ok := <-d.text
	if !ok {
		return "", io.EOF
	}
	return string(data), nil
}

func (d *device) ReceiveAudio() ([]byte, error) {
	data, ok := <-d.audio
	if !ok {
		return nil, io.EOF
	}
	return data, nil
}

func (d *device) Hear(string) error { return nil }

func (d *device) Close() { _ = d.ws.Close() }

func TestFrontEndSuite(t *testing.T) {
	t.Parallel()
	devicetest.Run(t, func(t *testing.T) devicetest.Frontend {
		b := open(t)
		return devicetest.Frontend{Service: b.service, Ports: b.Ports, Dial: b.dial, Hello: hello, Lacks: map[string]string{
			devicetest.ToolsBeforeHello: "the connection begins with a hello",
			devicetest.HelloAgain:       "a second hello would poison the device's next connection (websocket_protocol.cc:182-184)",
			devicetest.GoodbyeEndsAudio: "the device closes the socket instead",
			devicetest.GoodbyeToTheDead: "the conversation ends with its connection",
			devicetest.ShortPackets:     "only packets over UDP were dropped (mqtt_protocol.cc:228)",
		}}
	})
}

func TestRefusedBeforeUpgrade(t *testing.T) {
	t.Parallel()
	b := open(t)
	good := b.header(id, "c1", 0)
	change := func(key, value string) http.Header {
		h := good.Clone()
		h.Set(key, value)
		return h
	}
	for name, c := range map[string]struct {
		header http.Header
		status int
	}{
		"no device id":       {change("Device-Id", ""), 400},
		"hostile device id":  {change("Device-Id", "../../etc/passwd"), 400},
		"wildcard device id": {change("Device-Id", "*"), 400},
		"long client id":     {change("Client-Id", strings.Repeat("x", 129)), 400},
		"no token":           {change("Authorization", ""), 401},
		"wrong token":        {change("Authorization", "Bearer x"), 401},
		"another device":     {change("Device-Id", "02:00:00:00:00:02"), 401},
		"another client":     {change("Client-Id", "c2"), 401},
		"dead generation":    {b.header(id, "c1", 1), 401},
		"token of the admin": {change("Authorization", "Bearer "+b.mint.AdminToken()), 401},
	} {
		_, response, err := websocket.DefaultDialer.Dial(b.url, c.header)
		if err == nil || response == nil || response.StatusCode != c.status {
			t.Errorf("%s: %v %v, want status %d", name, response, err, c.status)
		}
	}
	if _, _, err := websocket.DefaultDialer.Dial(b.url, good); err != nil {
		t.Errorf("good credentials: %v", err)
	}
}

// A device that has said hello is silent for as long as it likes: pings find
// out whether it is there.
func TestNoDeadlineAfterHello(t *testing.T) {
	b := open(t)
	d := b.dial(t, id, "c1")
	defer d.Close()
	if sets, last := b.reads.Read(); sets == 0 || time.Until(last) > wsdevice.HelloTimeout {
		t.Errorf("the hello may come until %v", last)
	}
	if err := d.Send(hello); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "no deadline is left", func() bool { _, last := b.reads.Read(); return last.IsZero() })
}

// A device that asks and takes no answer keeps the reader in a write, which ends with
// the front end, too: no sweep comes any more then.
func TestStopEndsTheReadersWrite(t *testing.T) {
	b := open(t)
	ws, _, err := websocket.DefaultDialer.Dial(b.url, b.header(id, "c1", 0))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ws.Close() }()
	if err := ws.WriteMessage(websocket.TextMessage, []byte(hello)); err != nil {
		t.Fatal(err)
	}
	request := fmt.Appendf(nil, `{"type":"mcp","payload":{"jsonrpc":"2.0","id":"%s","method":"x"}}`, strings.Repeat("x", 60<<10))
	for err == nil {
		_ = ws.SetWriteDeadline(time.Now().Add(300 * time.Millisecond)) // an error shows at the write
		err = ws.WriteMessage(websocket.TextMessage, request)
	}
	ended := make(chan struct{})
	go func() {
		b.service.Close()
		b.front.Close()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(2 * wsdevice.WriteTimeout):
		_ = ws.Close() // lets all of them go
		t.Error("the front end waits for a device that takes nothing")
	}
}

func TestRevokedCredentialsAreRefused(t *testing.T) {
	b := open(t)
	d := b.dial(t, id, "c1")
	defer d.Close()
	if err := d.Send(hello); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Receive(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.service.Revoke(t.Context(), devicetest.Admin, id); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := d.Receive(); err != nil {
			break // the session ended
		}
	}
	// security: D2
	if _, response, err := websocket.DefaultDialer.Dial(b.url, b.header(id, "c1", 0)); err == nil || response.StatusCode != 401 {
		t.Errorf("old credentials after revocation: %v", err)
	}
}

// What comes instead of a hello ends the connection, soon and with a reason.
func TestBadFirstMessages(t *testing.T) {
	b := open(t)
	for name, c := range map[string]struct {
		kind int
		data string
		code int
	}{
		"binary before hello": {websocket.BinaryMessage, "\x00\x02", websocket.CloseProtocolError},
		"no JSON":             {websocket.TextMessage, "GET /", websocket.ClosePolicyViolation},
		"another message":     {websocket.TextMessage, `{"type":"listen"}`, websocket.ClosePolicyViolation},
		"another transport":   {websocket.TextMessage, `{"type":"hello","transport":"udp"}`, websocket.ClosePolicyViolation},
		"over 16 KiB":         {websocket.TextMessage, `{"type":"hello","x":"` + strings.Repeat("x", 17<<10) + `"}`, websocket.CloseMessageTooBig},
	} {
		ws, _, err := websocket.DefaultDialer.Dial(b.url, b.header(id, "c1", 0))
		if err != nil {
			t.Fatal(err)
		}
		if err := ws.WriteMessage(c.kind, []byte(c.data)); err != nil {
			t.Fatal(err)
		}
		_ = ws.SetReadDeadline(time.Now().Add(4 * time.Second))
		if _, _, err := ws.ReadMessage(); !websocket.IsCloseError(err, c.code) {
			t.Errorf("%s: %v, want close code %d", name, err, c.code)
		}
		_ = ws.Close()
	}
	devicetest.Eventually(t, "no session was made", func() bool { return b.service.Stats().Connects.Get(devices.TransportWebSocket) == 0 })
}

func TestMessageOverLimitClosesOnlyItsSender(t *testing.T) {
	b := open(t)
	other := b.dial(t, "02:00:00:00:00:02", "c2")
	defer other.Close()
	d := b.dial(t, id, "c1")
	defer d.Close()
	for _, x := range []devicetest.Device{other, d} {
		if err := x.Send(hello); err != nil {
			t.Fatal(err)
		}
	}
	_ = d.Send(`{"type":"x","y":"` + strings.Repeat("y", wsdevice.MessageLimit) + `"}`) // may fail half way
	// security: D11
	devicetest.Eventually(t, "the sender is closed", func() bool { return b.service.Stats().Closed.Get(devices.CloseTooLarge) == 1 })
	if err := other.Send(`{"type":"mcp","payload":{"jsonrpc":"2.0","id":1,"method":"ping"}}`); err != nil {
		t.Fatal(err)
	}
	for {
		text, err := other.Receive()
		// security: D11
		if err != nil {
			t.Fatalf("the other device: %v", err)
		}
		if strings.Contains(text, `"id":1,"result":{}`) {
			return
		}
	}
}
