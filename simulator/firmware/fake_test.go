package firmware

import (
	"bufio"
	"context"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devicetest"
)

// fakeServer is a fleet server as small as a test needs it, on real sockets: OTA answers from a function, WebSocket
// connections handed to the test.
type fakeServer struct {
	t     *testing.T
	base  string
	conns chan *fakeConn

	mu       sync.Mutex
	ota      func(n int, body []byte) (int, string)
	checks   int
	activate func(n int, body string) int
	acts     []string
	uploads  func(r *http.Request, file []byte) (int, string)
	image    func(w http.ResponseWriter)
}

type fakeConn struct {
	net.Conn
	r      *bufio.Reader
	header http.Header
}

func newFakeServer(t *testing.T) *fakeServer {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &fakeServer{t: t, base: "http://" + ln.Addr().String(), conns: make(chan *fakeConn, 64)}
	ws := "ws://" + ln.Addr().String() + "/xiaozhi/v1/"
	s.ota = func(int, []byte) (int, string) {
		return 200, `{"websocket":{"url":"` + ws + `","token":"tok-1","version":1},"server_time":{"timestamp":1786150000000,"timezone_offset":480}}`
	}
	s.activate = func(int, string) int { return 200 }
	mux := http.NewServeMux()
	mux.HandleFunc("/xiaozhi/ota/", s.serveOTA)
	mux.HandleFunc("/xiaozhi/ota/activate", s.serveActivate)
	mux.HandleFunc("/xiaozhi/v1/", s.serveWS)
	mux.HandleFunc("/upload", s.serveUpload)
	mux.HandleFunc("/image", func(w http.ResponseWriter, _ *http.Request) { s.image(w) })
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })
	return s
}

func (s *fakeServer) serveOTA(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.checks++
	n, answer := s.checks, s.ota
	s.mu.Unlock()
	status, text := answer(n, body)
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text)
}

func (s *fakeServer) serveActivate(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.acts = append(s.acts, string(body))
	status := s.activate(len(s.acts), string(body))
	s.mu.Unlock()
	w.WriteHeader(status)
}

func (s *fakeServer) serveUpload(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseMultipartForm(1 << 20); err != nil {
		http.Error(w, err.Error(), 400)
		return
	}
	file, _, err := r.FormFile("file")
	if err != nil {
		http.Error(w, err.Error(), 400)
		return
	}
	data, _ := io.ReadAll(file)
	s.mu.Lock()
	answer := s.uploads
	s.mu.Unlock()
	status, text := answer(r, data)
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text)
}

func (s *fakeServer) serveWS(w http.ResponseWriter, r *http.Request) {
	conn, rw, err := w.(http.Hijacker).Hijack()
	if err != nil {
		s.t.Error(err)
		return
	}
	sum := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	_, _ = fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n",
		base64.StdEncoding.EncodeToString(sum[:]))
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	s.conns <- &fakeConn{Conn: conn, r: rw.Reader, header: r.Header}
}

// accept waits for the next WebSocket connection.
func (s *fakeServer) accept() *fakeConn {
	s.t.Helper()
	select {
	case c := <-s.conns:
		s.t.Cleanup(func() { _ = c.Close() })
		return c
	case <-time.After(30 * time.Second):
		s.t.Fatal("no WebSocket connection within 30 s")
		return nil
	}
}

// acceptHello also reads the device's hello and answers it.
func (s *fakeServer) acceptHello(session string) *fakeConn {
	s.t.Helper()
	c := s.accept()
	if _, text := c.read(s.t); !strings.Contains(text, `"type":"hello"`) {
		s.t.Fatalf("the first message is not a hello: %s", text)
	}
	c.send(s.t, `{"type":"hello","transport":"websocket","session_id":"`+session+`"}`)
	return c
}

func (c *fakeConn) send(t *testing.T, text string) { t.Helper(); c.frame(t, opText, []byte(text)) }

func (c *fakeConn) frame(t *testing.T, opcode byte, data []byte) {
	t.Helper()
	b := []byte{0x80 | opcode}
	if len(data) < 126 {
		b = append(b, byte(len(data)))
	} else {
		b = binary.BigEndian.AppendUint16(append(b, 126), uint16(len(data)))
	}
	if _, err := c.Write(append(b, data...)); err != nil {
		t.Fatal(err)
	}
}

// read returns the next frame and insists on what the firmware always does: final and masked.
func (c *fakeConn) read(t *testing.T) (byte, string) {
	t.Helper()
	opcode, text, err := c.tryRead()
	if err != nil {
		t.Fatal(err)
	}
	return opcode, text
}

func (c *fakeConn) tryRead() (byte, string, error) {
	var h [4]byte
	if _, err := io.ReadFull(c.r, h[:2]); err != nil {
		return 0, "", err
	}
	if h[0]&0xF0 != 0x80 || h[1]&0x80 == 0 {
		return 0, "", fmt.Errorf("frame header %x: want a final, masked frame", h[:2])
	}
	n := int(h[1] & 0x7F)
	switch n {
	case 126:
		var l [2]byte
		if _, err := io.ReadFull(c.r, l[:]); err != nil {
			return 0, "", err
		}
		n = int(binary.BigEndian.Uint16(l[:]))
	case 127:
		return 0, "", fmt.Errorf("64 bit length: the firmware has none")
	}
	b := make([]byte, 4+n)
	if _, err := io.ReadFull(c.r, b); err != nil {
		return 0, "", err
	}
	for i := range n {
		b[4+i] ^= b[i&3]
	}
	return h[0] & 0xF, string(b[4:]), nil
}

// rpc is the part of a reply that tests look at.
type rpc struct {
	SessionID string `json:"session_id"`
	Payload   struct {
		ID     int             `json:"id"`
		Method string          `json:"method"`
		Result json.RawMessage `json:"result"`
		Error  *struct {
			Message string `json:"message"`
		} `json:"error"`
	} `json:"payload"`
}

// call sends a request and returns the next message of the device.
func (c *fakeConn) call(t *testing.T, id int, method, params string) (rpc, string) {
	t.Helper()
	c.request(t, id, method, params)
	_, text := c.read(t)
	var r rpc
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return r, text
}

func (c *fakeConn) request(t *testing.T, id int, method, params string) {
	t.Helper()
	if params != "" {
		params = `"params":` + params + `,`
	}
	c.send(t, fmt.Sprintf(`{"session_id":"s","type":"mcp","payload":{"jsonrpc":"2.0","method":%q,%s"id":%d}}`, method, params, id))
}

// parseFlags reads options as the command does. It has no help to write.
func parseFlags(args []string, _ io.Writer) (Options, error) {
	o := Defaults()
	fs := flag.NewFlagSet("firmware", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	read := o.Flags(fs)
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	return o, read()
}

// startFleet runs devices against the server until the test ends and returns its report function.
func startFleet(t *testing.T, s *fakeServer, args ...string) *Fleet {
	t.Helper()
	o, err := parseFlags(append([]string{"--ota", s.base + "/xiaozhi/ota/", "--time-scale", "0.01", "--devices", "1"}, args...), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.Run(ctx, nil)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		f.Close()
	})
	return f
}

// eventually polls the first device's report until ok returns true, and returns that report.
func eventually(t *testing.T, f *Fleet, what string, ok func(DeviceReport) bool) (r DeviceReport) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("the device is %+v", r)
		}
	}()
	devicetest.Eventually(t, what, func() bool {
		r = f.devices[0].Report()
		return ok(r)
	})
	return r
}

func inState(s State) func(DeviceReport) bool {
	return func(r DeviceReport) bool { return r.State == s }
}

func named(t *testing.T, profile string) *Profile {
	t.Helper()
	list, err := ParseProfiles(profile)
	if err != nil {
		t.Fatal(err)
	}
	return list[0]
}
