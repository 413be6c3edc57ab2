package upstream

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"go.uber.org/goleak"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
	"fleetd/internal/hello"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	id     = devices.ID("aa:bb:cc:dd:ee:ff")
	uuid   = "36c98363-3656-43cb-a00f-8bced2391a90"
	volume = "self.audio_speaker.set_volume"
)

// deviceHello is the hello of the tests' device.
const deviceHello = `{"type":"hello","version":3,"transport":"udp","features":{"mcp":true,"glyph_push":true},"text_font":{"name":"puhui","size":20},` +
	`"audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}`

// upstreamHello is the corresponding hello to the chat server.
const upstreamHello = `{"type":"hello","version":2,"transport":"websocket","audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60},` +
	`"features":{"mcp":true,"glyph_push":true},"text_font":{"name":"puhui","size":20}}`

// chat is a chat server: every connection waits in peers for the test to serve it.
type chat struct {
	listener net.Listener
	dial     func(ctx context.Context, network, addr string) (net.Conn, error) // nil for the real one
	url      string
	peers    chan *peer
	refuse   func() int // status of the next request; 0 or nil accepts it
}

// peer is one connection as the chat server sees it.
type peer struct {
	t       testing.TB
	ws      *websocket.Conn
	request *http.Request
}

// serve runs a chat server on the listener until the test ends.
func serve(t testing.TB, listener net.Listener) *chat {
	c := &chat{listener: listener, url: "ws://" + listener.Addr().String() + "/xiaozhi/v1/", peers: make(chan *peer, 16)}
	var conns sync.WaitGroup
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c.refuse != nil {
			if status := c.refuse(); status != 0 {
				http.Error(w, "no", status)
				return
			}
		}
		ws, err := (&websocket.Upgrader{}).Upgrade(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		p := &peer{t, ws, r}
		t.Cleanup(func() { ws.Close() })
		c.peers <- p
	})}
	conns.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() { server.Close(); conns.Wait() })
	return c
}

// server runs a chat server on a real socket.
func server(t testing.TB) *chat {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, listener)
}

// next returns the next connection, after reading and checking its hello.
func (c *chat) next(t testing.TB) *peer {
	t.Helper()
	select {
	case p := <-c.peers:
		if text := p.text(); text != upstreamHello {
			t.Fatalf("hello is %s\nwant %s", text, upstreamHello)
		}
		return p
	case <-time.After(30 * time.Second):
		t.Fatal("no connection was dialled")
	}
	return nil
}

// open returns the next connection, after sending the chat server's hello.
func (c *chat) open(t testing.TB) *peer {
	t.Helper()
	p := c.next(t)
	p.send(`{"type":"hello","transport":"websocket","session_id":"theirs","audio_params":{"sample_rate":24000}}`)
	return p
}

func (p *peer) send(text string) {
	p.t.Helper()
	if err := p.ws.WriteMessage(websocket.TextMessage, []byte(text)); err != nil {
		p.t.Error(err)
	}
}

// play sends one packet with the header of xiaozhi-server.
func (p *peer) play(opus []byte) {
	p.t.Helper()
	n := len(opus)
	header := []byte{1, 0, byte(n >> 8), byte(n), 0, 0, 0, 7, 0, 0, 0, 60, 0, 0, byte(n >> 8), byte(n)}
	if err := p.ws.WriteMessage(websocket.BinaryMessage, append(header, opus...)); err != nil {
		p.t.Error(err)
	}
}

// read returns the next message; text has kind text, a packet has its header.
func (p *peer) read() (kind int, data []byte) {
	p.t.Helper()
	_ = p.ws.SetReadDeadline(time.Now().Add(20 * time.Second))
	kind, data, err := p.ws.ReadMessage()
	if err != nil {
		p.t.Fatalf("chat server reads: %v", err)
	}
	return kind, data
}

func (p *peer) text() string {
	p.t.Helper()
	kind, data := p.read()
	if kind != websocket.TextMessage {
		p.t.Fatalf("a packet instead of a message: %q", data)
	}
	return string(data)
}

// frame returns the next message, which must be a packet with a header of framing 2.
func (p *peer) frame() envelope.Frame {
	p.t.Helper()
	kind, data := p.read()
	f, err := envelope.Framing2.ParseFrame(data)
	if kind != websocket.BinaryMessage || err != nil {
		p.t.Fatalf("%q instead of a packet: %v", data, err)
	}
	return f
}

// ended waits for the end of the connection.
func (p *peer) ended() {
	p.t.Helper()
	_ = p.ws.SetReadDeadline(time.Now().Add(20 * time.Second))
	for {
		if _, _, err := p.ws.ReadMessage(); err != nil {
			if isTimeout(err) {
				p.t.Fatal("the connection to the chat server stays open")
			}
			return
		}
	}
}

// device is a device without a transport: it records what it receives in order, and its
// script answers MCP.
type device struct {
	script  *devicetest.Script
	via     devices.Transport
	session *session.Session
	c       *speech.Conversation

	mu     sync.Mutex
	log    []string // messages, and packets as they are
	closed bool     // its audio path
}

func (d *device) SendControl(msg []byte) error {
	if m, err := envelope.Parse(msg); err == nil && string(m.Type) != envelope.TypeMCP {
		d.note(string(msg))
	}
	if answer := d.script.Answer(msg); answer != "" {
		_ = d.session.HandleControl([]byte(answer)) // fails if the session has ended
	}
	return nil
}

func (d *device) Close(devices.CloseReason) {}

func (d *device) note(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.log = append(d.log, what)
}

func (d *device) received() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]string(nil), d.log...)
}

// path is the device's audio path.
type path struct{ d *device }

func (p path) SendAudio(f envelope.Frame) error { p.d.note(string(f.Opus)); return nil }

func (p path) Close() {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	p.d.closed = true
}

func (d *device) isClosed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

// testFleet is a core with a bridge to a chat server.
type testFleet struct {
	t      testing.TB
	bridge *Bridge
	svc    *fleet.Service
	ports  *devicetest.Ports
}

func newFleet(t testing.TB, c *chat) *testFleet {
	t.Helper()
	b, err := New(Options{URL: c.url, Version: "1.2.3", Log: slog.New(slog.DiscardHandler),
		Token: func(string, string, time.Time) string { return credential.UpstreamTestToken }})
	if err != nil {
		t.Fatal(err)
	}
	if c.dial != nil {
		b.dialNet = c.dial
	}
	p := devicetest.New()
	p.SaveDevice(devices.Device{ID: id, ClientID: uuid, Admission: devices.AdmissionMember, Facts: devices.Facts{Board: "bread-compact-wifi", Firmware: "2.4.2"}})
	s := p.ServiceOver(t, fleet.Config{}, func(ports *fleet.Ports) { ports.Voice = b })
	b.Attach(s)
	t.Cleanup(func() { s.Close(); b.Close() })
	return &testFleet{t, b, s, p}
}

// connect connects a device that has not sent a hello.
func (f *testFleet) connect(transport devices.Transport, script *devicetest.Script) *device {
	f.t.Helper()
	d := &device{script: script, via: transport}
	session, err := f.svc.Accept(devices.Identity{Device: id, ClientID: uuid, Transport: transport, Remote: "203.0.113.9:4711"}, d)
	if err != nil {
		f.t.Fatal(err)
	}
	d.session = session
	return d
}

// hello opens a conversation as a front end does.
func (f *testFleet) hello(d *device) {
	f.t.Helper()
	transport := hello.TransportUDP
	if d.via == devices.TransportWebSocket {
		transport = hello.TransportWebSocket
	}
	if _, err := d.session.OpenAudio(helloOf(f.t), transport, func(c *speech.Conversation) (speech.AudioPath, error) {
		d.c = c
		return path{d}, nil
	}); err != nil {
		f.t.Fatal(err)
	}
	d.session.BeginConversation()
	d.session.StartMCP(devices.FeaturesMCP)
}

func helloOf(t testing.TB) hello.Device {
	t.Helper()
	h, err := hello.ParseDevice([]byte(deviceHello))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// conversation returns a device over this transport whose conversation the chat server has
// accepted.
func (f *testFleet) conversation(c *chat, transport devices.Transport) (*device, *peer) {
	f.t.Helper()
	d := f.connect(transport, devicetest.NewScript())
	f.hello(d)
	return d, c.open(f.t)
}

// send sends a message of the device.
func (f *testFleet) send(d *device, text string) {
	f.t.Helper()
	if err := d.session.HandleControl([]byte(text)); err != nil {
		f.t.Fatal(err)
	}
}

// sendAudio sends an audio packet of the device.
func (d *device) sendAudio(n int) {
	d.c.HandleAudio(envelope.Frame{Timestamp: uint32(60 * n), Opus: devicetest.Packet(n)})
}

// expect waits until the device has received these messages and no others.
func (d *device) expect(t testing.TB, want ...string) {
	t.Helper()
	devicetest.Eventually(t, "the device receives "+strings.Join(want, " "), func() bool { return len(d.received()) >= len(want) })
	if got := d.received(); strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Fatalf("the device received\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

const (
	listenStart = `{"session_id":"","type":"listen","state":"start","mode":"auto"}`
	chatListen  = `{"session_id":"theirs","type":"listen","state":"start","mode":"auto"}`
	chatStart   = `{"type":"tts","state":"start","session_id":"theirs"}`
	chatStop    = `{"type":"tts","state":"stop","session_id":"theirs"}`
)

// message returns a message as the device receives it.
func (d *device) message(wait string) string {
	return fmt.Sprintf(`{"session_id":"%s",%s}`, d.c.ID(), wait)
}

// pipeServer runs a chat server in fake time.
func pipeServer(t testing.TB) *chat {
	l := devicetest.NewPipes()
	c := serve(t, l)
	c.dial = l.DialContext
	return c
}
