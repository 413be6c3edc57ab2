package restapi

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"fleetd/internal/attest"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/jsontest"
	"fleetd/internal/recorder"
	"fleetd/internal/stats"
	"fleetd/internal/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const robot = devices.ID("aa:bb:cc:dd:ee:ff")

// records adds to the recording ports what lists need: filters are remembered,
// history is paged.
type records struct {
	*devicetest.Ports
	mu    sync.Mutex
	asked devices.ListQuery
}

func (r *records) List(ctx context.Context, q devices.ListQuery) (devices.Page, error) {
	r.mu.Lock()
	r.asked = q
	r.mu.Unlock()
	return r.Ports.List(ctx, q)
}

func (r *records) History(ctx context.Context, id devices.ID, epoch devices.Epoch, seq int64, limit int) ([]devices.HistoryEntry, error) {
	all, err := r.Ports.History(ctx, id, 0, 0, 1<<30)
	older := slices.DeleteFunc(all, func(e devices.HistoryEntry) bool {
		return epoch != 0 && (e.Epoch > epoch || e.Epoch == epoch && e.Seq >= seq)
	})
	return older[:min(len(older), limit)], err
}

// testFleet is a core with an API in front of it.
type testFleet struct {
	ports    *records
	service  *fleet.Service
	events   *fakeEvents
	photos   *fakePhotos
	archive  *fakeArchive
	jobs     *fakeJobs
	recorder *recorder.Recorder
	traces   *trace.Tracer
	webhooks *fakeWebhooks
	api      *Server
	url      string
	token    string
	level    slog.LevelVar
	log      *logBuffer
	draining atomic.Bool
	mu       sync.Mutex
	down     map[string]error
	nodes    []devices.Node
}

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

func newFleet(t testing.TB, change ...func(*Options)) *testFleet {
	t.Helper()
	f := &testFleet{ports: &records{Ports: devicetest.New()}, events: &fakeEvents{}, photos: &fakePhotos{}, archive: &fakeArchive{}, jobs: &fakeJobs{}, webhooks: &fakeWebhooks{}, log: &logBuffer{}}
	f.service = f.ports.ServiceOver(t, fleet.Config{CallsPerDevice: 1, Handshakes: 4, Approve: true}, func(p *fleet.Ports) {
		p.Records, p.Catalogs, p.Changes = f.ports, f.ports, changeLog{f.ports.Ledger}
	})
	mint, err := credential.New([]byte("0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	f.token = mint.AdminToken()
	opt := Options{Service: f.service, Mint: mint, Events: f.events, Photos: f.photos, Archive: f.archive, Jobs: f.jobs, Webhooks: f.webhooks, Firmware: &fakeFirmware{dir: t.TempDir()}, MaxFirmware: 32 << 20, Explainer: f.explainer(), Tracer: f.tracer(t), Attest: attest.New(f.ports, mint, slog.New(slog.DiscardHandler)), Diagnoser: fakeDiagnoser{}, Draining: f.draining.Load,
		LogLevel: &f.level, Log: slog.New(slog.NewTextHandler(f.log, nil)), Version: "1.2.3",
		Nodes: func() []devices.Node { return f.nodes },
		Ready: func() map[string]error {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.down
		}}
	opt.Stats = &stats.Fleet{Recorder: stats.New("n-test", time.Now(), &counters.Registry{}), Nodes: func() []string { return []string{"n-test", "n-gone"} },
		Gather: func(_ context.Context, _ string, _ []byte, nodes []string) (map[string][]byte, []string) {
			return nil, slices.DeleteFunc(slices.Clone(nodes), func(n string) bool { return n == "n-test" })
		}}
	for _, c := range change {
		c(&opt)
	}
	f.api = New(opt)
	server := httptest.NewServer(f.api)
	t.Cleanup(server.Close)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	f.url = server.URL
	return f
}

// line is a device's connection that answers from its script at once.
type line struct {
	script  *devicetest.Script
	session *session.Session
	mu      sync.Mutex
	broken  error
	sent    chan string // every envelope, if set
}

func (l *line) SendControl(msg []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken != nil {
		return l.broken
	}
	if l.sent != nil {
		l.sent <- string(msg)
	}
	if text := l.script.Answer(msg); text != "" {
		_ = l.session.HandleControl([]byte(text)) // the script is right or the test fails for want of an answer
	}
	return nil
}

func (l *line) Close(devices.CloseReason) {}

// connect brings a device online and waits until its tools are known.
func (f *testFleet) connect(t testing.TB, id devices.ID, script *devicetest.Script) *line {
	t.Helper()
	l := &line{script: script}
	devicetest.Online(t, f.service, id, l, &l.session)
	return l
}

// response is an answer, read.
type response struct {
	status int
	header http.Header
	body   string
}

func (f *testFleet) do(t testing.TB, method, path, body string, headers ...string) response {
	t.Helper()
	return f.send(t, t.Context(), method, path, strings.NewReader(body), headers...)
}

func (f *testFleet) send(t testing.TB, ctx context.Context, method, path string, body io.Reader, headers ...string) response {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, f.url+path, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+f.token)
	for i := 0; i < len(headers); i += 2 {
		if headers[i+1] == "" {
			r.Header.Del(headers[i])
		} else {
			r.Header.Set(headers[i], headers[i+1])
		}
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
	got := response{answer.StatusCode, answer.Header, string(content)}
	if lie := f.document(t).Lie(r, got.status, got.header, content); lie != "" {
		t.Errorf("an answer is not as the OpenAPI document describes it: %s\n%s", lie, got.body[:min(len(got.body), 2000)])
	}
	return got
}

// documents are those of the servers of all tests, which differ in whether they have the operation for an external broker: each takes longer to
// make than most tests do.
var documents sync.Map

// document returns the document that the server serves.
func (f *testFleet) document(t testing.TB) *jsontest.Document {
	t.Helper()
	one, _ := documents.LoadOrStore(f.api.opt.Authenticate != nil, sync.OnceValues(func() (*jsontest.Document, error) {
		answer := httptest.NewRecorder()
		f.api.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/openapi.json", nil))
		return jsontest.NewDocument(answer.Body.String())
	}))
	read, _ := one.(func() (*jsontest.Document, error))
	d, err := read()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// json decodes a successful answer.
func (r response) json(t testing.TB, target any) {
	t.Helper()
	if r.status != http.StatusOK || r.header.Get("Content-Type") != "application/json" {
		t.Fatalf("status %d, %s: %s", r.status, r.header.Get("Content-Type"), r.body)
	}
	if err := json.Unmarshal([]byte(r.body), target); err != nil {
		t.Fatalf("%v in %s", err, r.body)
	}
}

// problem decodes a failed answer and checks what all of them have.
func (r response) problem(t testing.TB, status int, code devices.Code) problem {
	t.Helper()
	var p problem
	if err := json.Unmarshal([]byte(r.body), &p); err != nil {
		t.Fatalf("status %d: %v in %q", r.status, err, r.body)
	}
	if r.status != status || p.Status != status || devices.Code(p.Code) != code || p.Title != http.StatusText(status) || p.Detail == "" ||
		r.header.Get("Content-Type") != "application/problem+json" || r.header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("want %d %s, got %d: %s %v", status, code, r.status, r.body, r.header)
	}
	return p
}

// fakeEvents delivers what a test puts in.
type fakeEvents struct {
	mu    sync.Mutex
	asked []devices.EventQuery
	err   error
	queue chan devices.StreamEvent
	ended chan error
}

func (e *fakeEvents) Erase(context.Context, devices.ID) error { return nil }

func (e *fakeEvents) Follow(ctx context.Context, q devices.EventQuery, deliver func(devices.StreamEvent) error) (err error) {
	e.mu.Lock()
	e.asked = append(e.asked, q)
	err, queue, ended := e.err, e.queue, e.ended
	e.mu.Unlock()
	if err != nil {
		return err
	}
	defer func() {
		if ended != nil {
			ended <- err
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case event := <-queue:
			if err := deliver(event); err != nil {
				return err
			}
		}
	}
}

// fakePhotos keeps photos in memory.
type fakePhotos struct {
	mu     sync.Mutex
	photos []devices.Photo // newest first
	jpeg   []byte
	err    error
}

func (p *fakePhotos) List(_ context.Context, device devices.ID, before string, limit int) (found []devices.Photo, more bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, photo := range p.photos {
		if (device == "" || photo.Device == device) && (before == "" || photo.ID < before) {
			found = append(found, photo)
		}
	}
	return found[:min(len(found), limit)], len(found) > limit, p.err
}

func (p *fakePhotos) Open(_ context.Context, _, id string) (devices.Photo, io.ReadCloser, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, photo := range p.photos {
		if photo.ID == id {
			return photo, io.NopCloser(bytes.NewReader(p.jpeg)), p.err
		}
	}
	return devices.Photo{}, nil, &devices.Error{Code: devices.CodeNotFound, Detail: "no photo " + id}
}

func (p *fakePhotos) DeleteAll(_ context.Context, device devices.ID) (deleted int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := len(p.photos)
	p.photos = slices.DeleteFunc(p.photos, func(photo devices.Photo) bool { return photo.Device == device })
	return before - len(p.photos), p.err
}

func (p *fakePhotos) Delete(_ context.Context, id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := len(p.photos)
	p.photos = slices.DeleteFunc(p.photos, func(photo devices.Photo) bool { return photo.ID == id })
	if len(p.photos) == before {
		return &devices.Error{Code: devices.CodeNotFound, Detail: "no photo " + id}
	}
	return p.err
}

type fakeDiagnoser struct{}

func (fakeDiagnoser) Diagnose(id devices.ID) devices.Diagnosis {
	return devices.Diagnosis{OTAURL: "http://192.0.2.1:8000/xiaozhi/ota/", Device: id, Status: 200, Reply: json.RawMessage(`{"websocket": {"url":"ws://x"}}`),
		Findings: []devices.Finding{{Severity: devices.SeverityWarning, Setting: "--public-host", Message: `"quoted"`}}}
}

// silence is a device that never answers a call.
func silence() *devicetest.Script {
	script := devicetest.NewScript()
	script.Call = func(string, json.RawMessage) string { return "" }
	return script
}

const volumePath = "/v1/devices/aa:bb:cc:dd:ee:ff/tools/self.audio_speaker.set_volume/call"
