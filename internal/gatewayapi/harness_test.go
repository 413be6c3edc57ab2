package gatewayapi

import (
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"fleetd/internal/access"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
	"fleetd/internal/hello"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	robot        = devices.ID("aa:bb:cc:dd:ee:ff")
	robotClient  = "GID_default@@@aa_bb_cc_dd_ee_ff@@@36c98363-3656-43cb-a00f-8bced2391a90"
	commandRobot = "/api/commands/" + robotClient
	signatureKey = "Gq7Tz9mKfleet"
)

// logBuffer is a log that tests can read.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// testFleet is a core with the gateway's API in front of it.
type testFleet struct {
	ports   *devicetest.Ports
	service *fleet.Service
	api     *Server
	mint    *credential.Mint
	gateway *credential.Gateway
	log     *logBuffer
	url     string // set by listen
}

func newFleet(t testing.TB, change ...func(*Options)) *testFleet {
	t.Helper()
	f := &testFleet{ports: devicetest.New(), log: &logBuffer{}}
	f.service = f.ports.Service(t, fleet.Config{})
	var err error
	if f.mint, err = credential.New([]byte("0123456789abcdef")); err != nil {
		t.Fatal(err)
	}
	if f.gateway, err = credential.NewGateway(signatureKey); err != nil {
		t.Fatal(err)
	}
	opt := Options{Service: f.service, Gateway: f.gateway, Auth: &access.Authenticator{Keys: f.service.Keys(), IsAdmin: f.mint.IsAdmin}, Log: slog.New(slog.NewTextHandler(f.log, nil))}
	for _, c := range change {
		c(&opt)
	}
	f.api = New(opt)
	return f
}

// listen puts the API on a real socket.
func (f *testFleet) listen(t testing.TB) *testFleet {
	t.Helper()
	server := httptest.NewServer(f.api)
	t.Cleanup(server.Close)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	f.url = server.URL
	return f
}

// connect brings a device online and waits until its tools are known.
func (f *testFleet) connect(t testing.TB, id devices.ID, script *devicetest.Script) *devicetest.Line {
	t.Helper()
	return devicetest.Connect(t, f.service, id, script)
}

// nullAudio is an audio path that discards packets.
type nullAudio struct{}

func (nullAudio) SendAudio(envelope.Frame) error { return nil }
func (nullAudio) Close()                         {}

// talk opens a conversation of a device.
func talk(t testing.TB, l *devicetest.Line) {
	t.Helper()
	open := func(*speech.Conversation) (speech.AudioPath, error) { return nullAudio{}, nil }
	if _, err := l.Session.OpenAudio(hello.Device{}, hello.TransportUDP, open); err != nil {
		t.Fatal(err)
	}
}

// response is an answer, read.
type response struct {
	status int
	header http.Header
	body   string
}

// do sends a request with today's token; headers come in pairs, an empty value
// takes one away.
func (f *testFleet) do(t testing.TB, method, path, body string, headers ...string) response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, f.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+f.gateway.DailyToken(time.Now()))
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		if r.Header.Del(headers[i]); headers[i+1] != "" {
			r.Header.Set(headers[i], headers[i+1])
		}
	}
	if f.url == "" { // in a bubble of synctest there are no sockets
		w := httptest.NewRecorder()
		f.api.ServeHTTP(w, r)
		return response{w.Code, w.Result().Header, w.Body.String()}
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	content, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response{answer.StatusCode, answer.Header, string(content)}
}

// is checks an answer to the byte, and what all answers have.
func (r response) is(t testing.TB, status int, code devices.Code, body string) {
	t.Helper()
	if r.status != status || r.header.Get(HeaderCode) != string(code) || r.body != body {
		t.Errorf("got %d %s %s\nwant %d %s %s", r.status, r.header.Get(HeaderCode), r.body, status, code, body)
	}
	if kind := r.header.Get("Content-Type"); kind != "application/json; charset=utf-8" || len(r.header.Get(HeaderOperation)) < 16 || !json.Valid([]byte(r.body)) {
		t.Errorf("%v %s", r.header, r.body)
	}
}

// mcp is the body of a command with this payload.
func mcp(payload string) string { return `{"type":"mcp","payload":` + payload + `}` }

func failed(text string) string { return `{"success":false,"error":"` + text + `"}` }
