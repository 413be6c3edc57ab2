package wsdevice_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"go.uber.org/goleak"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
	"fleetd/internal/devicetest/client"
	"fleetd/internal/fleet"
	"fleetd/internal/wsdevice"
	"fleetd/simulator/firmware"
)

const hello = client.HelloWebSocket

const id = devices.ID("02:00:00:00:00:01")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bench is a front end with an HTTP server.
type bench struct {
	*devicetest.Ports
	pipes   *devicetest.Pipes // nil: it listens on a real socket
	service *fleet.Service
	mint    *credential.Mint
	url     string
	front   *wsdevice.Front
	reads   *devicetest.Deadlines
}

func open(t *testing.T, change ...func(*wsdevice.Options)) bench {
	t.Helper()
	return openOn(t, nil, change...)
}

// openOn is open with a listener in memory; nil: on a real socket.
func openOn(t *testing.T, pipes *devicetest.Pipes, change ...func(*wsdevice.Options)) bench {
	t.Helper()
	mint, err := credential.New([]byte("a secret for tests only"))
	if err != nil {
		t.Fatal(err)
	}
	b := bench{Ports: devicetest.New(), pipes: pipes, mint: mint}
	b.service = b.Service(t, fleet.Config{})
	options := wsdevice.Options{Service: b.service, Mint: mint, Log: slog.New(slog.DiscardHandler)}
	for _, f := range change {
		f(&options)
	}
	b.front = wsdevice.New(options)
	server := &httptest.Server{Listener: pipes, Config: &http.Server{Handler: b.front}}
	if pipes == nil {
		server = httptest.NewUnstartedServer(b.front)
	}
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

func (b bench) dial(t testing.TB, id devices.ID, clientID string) devicetest.Device {
	t.Helper()
	login := firmware.Login{URL: b.url + "/", Device: string(id), Client: clientID, Token: b.mint.DeviceToken(string(id), clientID, 0), Version: 2}
	if b.pipes != nil {
		conn, err := b.pipes.DialContext(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		line, err := login.Open(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		return client.New(line)
	}
	d, err := client.Dial(login)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// frontend is the bench as the suite sees it.
func (b bench) frontend() devicetest.Frontend {
	return devicetest.Frontend{Service: b.service, Ports: b.Ports, Dial: b.dial, Hello: hello}
}

func TestFrontEndSuite(t *testing.T) {
	t.Parallel()
	devicetest.Run(t, func(t *testing.T) devicetest.Frontend {
		f := open(t).frontend()
		f.InMemory = func(t *testing.T) devicetest.Frontend { return openOn(t, devicetest.NewPipes()).frontend() }
		f.Lacks = map[string]string{
			devicetest.ToolsBeforeHello:     "the connection begins with a hello",
			devicetest.HelloAgain:           "a second hello would break the device's next connection (websocket_protocol.cc:182-184)",
			devicetest.GoodbyeEndsAudio:     "the device closes the socket instead",
			devicetest.GoodbyeAfterNodeLoss: "the conversation ends with its connection",
			devicetest.ShortPackets:         "only packets over UDP were dropped (mqtt_protocol.cc:228)",
		}
		return f
	})
}

func TestRefusedBeforeUpgrade(t *testing.T) {
	t.Parallel()
	b := open(t)
	if _, err := b.service.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c1"}); err != nil {
		t.Fatal(err)
	}
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
		"not admitted":       {b.header(id, "", 0), 401},
		"old generation":     {b.header(id, "c1", 1), 401},
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

// After the hello a device may be silent without limit: pings detect whether it is still
// connected.
func TestNoDeadlineAfterHello(t *testing.T) {
	b := open(t)
	d := b.dial(t, id, "c1")
	defer d.Close()
	if sets, last := b.reads.Read(); sets == 0 || time.Until(last) > wsdevice.HelloTimeout {
		t.Errorf("the deadline of the hello is %v", last)
	}
	if err := d.Send(hello); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the deadline is cleared", func() bool { _, last := b.reads.Read(); return last.IsZero() })
}

// A device that sends requests and reads no responses blocks the reader in a write. Closing
// the front end ends that write, too, because no sweep follows.
func TestCloseEndsBlockedWrites(t *testing.T) {
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
		_ = ws.SetWriteDeadline(time.Now().Add(300 * time.Millisecond)) // an error shows in the write
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
		_ = ws.Close() // unblocks the front end
		t.Error("the front end waits for a device that does not read")
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
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			if _, err := d.Receive(); err != nil {
				return
			}
		}
	}()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the session goes on after the revocation")
	}
	// security: D2
	if _, response, err := websocket.DefaultDialer.Dial(b.url, b.header(id, "c1", 0)); err == nil || response.StatusCode != 401 {
		t.Errorf("old credentials after revocation: %v", err)
	}
}

// A first message other than a hello ends the connection at once, with a close code.
func TestBadFirstMessages(t *testing.T) {
	b := open(t)
	for name, c := range map[string]struct {
		kind int
		data string
		code int
	}{
		"binary before hello": {websocket.BinaryMessage, "\x00\x02", websocket.CloseProtocolError},
		"not JSON":            {websocket.TextMessage, "GET /", websocket.ClosePolicyViolation},
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
	devicetest.Eventually(t, "no session was opened", func() bool { return b.service.Stats().Connects.Get(devices.TransportWebSocket) == 0 })
}

func TestMessageOverLimitClosesOnlyItsSender(t *testing.T) {
	b := open(t)
	other := b.dial(t, "02:00:00:00:00:02", "c2")
	defer other.Close()
	d, _, err := websocket.DefaultDialer.Dial(b.url, b.header(id, "c1", 0)) // no firmware sends as much
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	if err := errors.Join(other.Send(hello), d.WriteMessage(websocket.TextMessage, []byte(hello))); err != nil {
		t.Fatal(err)
	}
	_ = d.WriteMessage(websocket.TextMessage, []byte(`{"type":"x","y":"`+strings.Repeat("y", wsdevice.MessageLimit)+`"}`)) // may fail half way
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
