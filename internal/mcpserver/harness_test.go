package mcpserver

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"go.uber.org/goleak"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	lamp  = devices.ID("aa:bb:cc:dd:ee:01")
	robot = devices.ID("aa:bb:cc:dd:ee:02")
	admin = "the admin token of this test"
)

var eras = []string{"2024-11-05", "2025-06-18", "2025-11-25", "2026-07-28"}

// testFleet is a core with an MCP server.
type testFleet struct {
	ports    *devicetest.Ports
	service  *fleet.Service
	events   *fakeEvents
	photos   *fakePhotos
	mcp      *Server
	url      string
	client   *http.Client
	draining atomic.Bool
}

func newFleet(t testing.TB, change ...func(*Options)) *testFleet {
	t.Helper()
	return newFleetOver(t, nil, change...)
}

// newFleetOver is newFleet with other ports where replace sets them.
func newFleetOver(t testing.TB, replace func(*fleet.Ports), change ...func(*Options)) *testFleet {
	t.Helper()
	return newFleetOn(t, nil, replace, change...)
}

// newFleetInMemory is newFleet over pipes, for a synctest bubble.
func newFleetInMemory(t testing.TB) *testFleet {
	t.Helper()
	return newFleetOn(t, devicetest.NewPipes(), nil)
}

// newFleetOn is newFleetOver with a listener in memory; nil: on a real socket.
func newFleetOn(t testing.TB, pipes *devicetest.Pipes, replace func(*fleet.Ports), change ...func(*Options)) *testFleet {
	t.Helper()
	f := &testFleet{ports: devicetest.New(), events: &fakeEvents{}, photos: &fakePhotos{}, client: http.DefaultClient}
	f.service = f.ports.ServiceOver(t, fleet.Config{Node: "n-test", CallsPerDevice: 2, Handshakes: 4, IsNodeAlive: func(string) bool { return true }}, replace)
	mint, err := credential.New([]byte("0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	opt := Options{Service: f.service, Mint: mint, Events: f.events, Photos: f.photos, Audit: (*fakeAudit)(f.ports), Explainer: fakeExplainer{}, Node: "n-test", Version: "1.2.3", Draining: f.draining.Load,
		Auth: &access.Authenticator{Keys: f.service.Keys(), IsAdmin: func(token string) bool { return token == admin }},
		Log:  slog.New(slog.DiscardHandler)}
	for _, c := range change {
		c(&opt)
	}
	f.mcp = New(opt)
	var server *httptest.Server
	if pipes == nil {
		server = httptest.NewServer(f.mcp)
	} else {
		server = &httptest.Server{Listener: pipes, Config: &http.Server{Handler: f.mcp}}
		server.Start()
		f.client = &http.Client{Transport: &http.Transport{DialContext: pipes.DialContext}}
	}
	t.Cleanup(server.Close)
	t.Cleanup(f.mcp.Close)
	t.Cleanup(f.client.CloseIdleConnections)
	f.url = server.URL
	return f
}

// fakeEvents delivers the events of a test.
type fakeEvents struct {
	mu     sync.Mutex
	past   []devices.StreamEvent
	listen []chan devices.StreamEvent
}

func (e *fakeEvents) Follow(ctx context.Context, _ devices.EventQuery, deliver func(devices.StreamEvent) error) error {
	ch := make(chan devices.StreamEvent, 100)
	e.mu.Lock()
	e.listen = append(e.listen, ch)
	e.mu.Unlock()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case event := <-ch:
			if err := deliver(event); err != nil {
				return err
			}
		}
	}
}

func (e *fakeEvents) Recent(_ context.Context, q devices.EventQuery, limit int, keep func(*devices.StreamEvent) bool) (found []devices.StreamEvent, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, event := range e.past {
		if (q.Device == "" || q.Device == event.Device) && (q.Kind == "" || q.Kind == event.Kind) && keep(&event) {
			found = append(found, event)
		}
	}
	return found[max(0, len(found)-limit):], nil
}

func (e *fakeEvents) happen(t testing.TB, event devices.StreamEvent) {
	t.Helper()
	devicetest.Eventually(t, "the server follows the events", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.listen) > 0
	})
	e.mu.Lock()
	defer e.mu.Unlock()
	event.ID = devices.EventPosition{uint64(len(e.past) + 1)}
	e.past = append(e.past, event)
	for _, ch := range e.listen {
		ch <- event
	}
}

// fakeAudit is what the core has recorded, as one block.
type fakeAudit devicetest.Ports

func (a *fakeAudit) AuditBlocks(context.Context, audit.Query) ([]audit.Block, error) {
	var lines []byte
	for i, e := range (*devicetest.Ports)(a).Recorded() {
		line, err := json.Marshal(audit.Line{Seq: int64(i) + 1, Entry: e})
		if err != nil {
			return nil, err
		}
		lines = append(append(lines, line...), '\n')
	}
	return []audit.Block{{Run: "run", Node: "n-test", FirstSeq: 1, Entries: lines}}, nil
}

type fakePhotos struct {
	mu   sync.Mutex
	byID map[string]devices.Photo
}

func (p *fakePhotos) add(photo devices.Photo) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.byID == nil {
		p.byID = map[string]devices.Photo{}
	}
	p.byID[photo.ID] = photo
}

func (p *fakePhotos) Open(_ context.Context, _, id string) (devices.Photo, io.ReadCloser, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	photo, ok := p.byID[id]
	if !ok {
		return photo, nil, &devices.Error{Code: devices.CodeNotFound, Detail: "photo not found"}
	}
	return photo, io.NopCloser(strings.NewReader("jpeg of " + id)), nil
}

// connect connects a device and waits until its tools are known.
func (f *testFleet) connect(t testing.TB, id devices.ID, script *devicetest.Script) *devicetest.Line {
	t.Helper()
	return devicetest.Connect(t, f.service, id, script)
}

func (f *testFleet) label(t testing.TB, id devices.ID, labels map[string]string) {
	t.Helper()
	if err := f.service.Edit(t.Context(), devicetest.Admin, id, 0, fleet.Edit{Labels: devicetest.Labels(labels)}); err != nil {
		t.Fatal(err)
	}
}

// key creates an API key.
func (f *testFleet) key(t testing.TB, scopes, selector string, life time.Duration, tools ...string) (access.Key, string) {
	t.Helper()
	s, d := devicetest.Rights(t, scopes, selector)
	now := time.Now()
	k, token, err := access.NewKey("key of "+strings.ReplaceAll(t.Name(), "/", " "), s, d, tools, now, now.Add(life))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.service.Keys().Put(k, now); err != nil {
		t.Fatal(err)
	}
	return k, token
}

type rawJSON = json.RawMessage

type withToken struct {
	token string
	next  http.RoundTripper // nil: http.DefaultTransport
}

func (t withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+t.token)
	return cmp.Or(t.next, http.DefaultTransport).RoundTrip(r)
}

// host connects a client of the SDK.
func (f *testFleet) host(t testing.TB, path, version, token string, opt *mcp.ClientOptions) *mcp.ClientSession {
	t.Helper()
	s, err := f.tryHost(t, path, version, token, opt)
	if err != nil {
		t.Fatalf("%s %s: %v", path, version, err)
	}
	return s
}

func (f *testFleet) tryHost(t testing.TB, path, version, token string, opt *mcp.ClientOptions) (*mcp.ClientSession, error) {
	t.Helper()
	client := &http.Client{Transport: withToken{token, f.client.Transport}}
	var transport mcp.Transport = &mcp.StreamableClientTransport{Endpoint: f.url + path, HTTPClient: client}
	if path == PathSSE {
		transport = &mcp.SSEClientTransport{Endpoint: f.url + path, HTTPClient: client}
	}
	s, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, opt).Connect(t.Context(), transport, &mcp.ClientSessionOptions{ProtocolVersion: version})
	if err == nil {
		t.Cleanup(func() { _ = s.Close() })
	}
	return s, err
}

func call(t testing.TB, s *mcp.ClientSession, name string, args any) *mcp.CallToolResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	r, err := s.CallTool(ctx, &mcp.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return &mcp.CallToolResult{}
	}
	return r
}

func textOf(r *mcp.CallToolResult) string {
	var b strings.Builder
	for _, c := range r.Content {
		if text, ok := c.(*mcp.TextContent); ok {
			b.WriteString(text.Text)
		}
	}
	return b.String()
}

// answer is an HTTP response.
type answer struct {
	status int
	header http.Header
	body   string
}

const hello = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"raw","version":"1"}}}`

// send sends an HTTP request without the SDK; headers are pairs of name and value.
func (f *testFleet) send(t testing.TB, method, path, token, body string, headers ...string) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, f.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	r.Header.Set("Accept", "application/json, text/event-stream")
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		if headers[i] == "Host" {
			r.Host = headers[i+1]
			continue
		}
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := f.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	content, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{response.StatusCode, response.Header, string(content)}
}

// open opens a session without the SDK.
func (f *testFleet) open(t testing.TB, path, token string) (session string) {
	t.Helper()
	a := f.send(t, http.MethodPost, path, token, hello)
	if session = a.header.Get("Mcp-Session-Id"); a.status != http.StatusOK || session == "" {
		t.Fatalf("no session: %d %s", a.status, a.body)
	}
	if a = f.send(t, http.MethodPost, path, token, `{"jsonrpc":"2.0","method":"notifications/initialized"}`, "Mcp-Session-Id", session, "Mcp-Protocol-Version", "2025-06-18"); a.status != http.StatusAccepted {
		t.Fatalf("initialized: %d %s", a.status, a.body)
	}
	return session
}

// tools returns a device's tool list with the given names, all without arguments.
func tools(names ...string) string {
	var b bytes.Buffer
	for i, name := range names {
		if i > 0 {
			b.WriteByte(',')
		}
		quoted, err := json.Marshal(name)
		if err != nil {
			panic(err) // a string can be encoded
		}
		fmt.Fprintf(&b, `{"name":%s,"description":"Does %s.","inputSchema":{"type":"object","properties":{}}}`, quoted, strings.Trim(string(quoted), `"`))
	}
	return "[" + b.String() + "]"
}
