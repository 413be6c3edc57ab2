package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/devices"
	live "fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

// BenchmarkCall measures a call of a device's tool without sockets.
func BenchmarkCall(b *testing.B) {
	f := newFleet(b)
	f.connect(b, lamp, devicetest.NewScript())
	const body = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"call_device_tool","arguments":{"device":"` + string(lamp) + `","tool":"self.audio_speaker.set_volume","arguments":{"volume":5}},` +
		`"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"bench","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}}`
	b.ReportAllocs()
	for b.Loop() {
		r := httptest.NewRequest(http.MethodPost, PathMCP, strings.NewReader(body))
		r.Host = "127.0.0.1"
		for name, value := range map[string]string{"Authorization": "Bearer " + admin, "Accept": "application/json, text/event-stream", "Content-Type": "application/json",
			"Mcp-Protocol-Version": revisionModern, "Mcp-Method": "tools/call", "Mcp-Name": "call_device_tool"} {
			r.Header.Set(name, value)
		}
		w := httptest.NewRecorder()
		f.mcp.ServeHTTP(w, r)
		if text, err := io.ReadAll(w.Body); err != nil || !strings.Contains(string(text), `"is_error":false`) {
			b.Fatalf("%d %s", w.Code, text)
		}
	}
}

// benchSessions is the number of hosts that call concurrently, each in its own session.
const benchSessions = 32

// benchFleet is the number of devices beside which hosts ask.
const benchFleet = 10_000

const benchCall = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"call_device_tool","arguments":{"device":"%s","tool":"self.audio_speaker.set_volume","arguments":{"volume":5}}%s}}`

const benchMeta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"bench","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`

// BenchmarkHost measures requests of one host, one after another: here beside a fleet, and on a bare server of the SDK with
// the same tools that returns results at once; without a session, as the newest revision has it, and in one.
func BenchmarkHost(b *testing.B) {
	for _, side := range []string{"fleetd", "bare"} {
		url := ""
		if side == "bare" {
			url = bareServer(b)
		} else {
			f := newFleet(b)
			f.connectMany(b, benchFleet)
			url = f.url
		}
		for _, revision := range []string{revisionModern, "2025-06-18"} {
			for _, method := range []string{"tools/list", "tools/call"} {
				b.Run(fmt.Sprintf("side=%s/revision=%s/method=%s", side, revision, strings.TrimPrefix(method, "tools/")), func(b *testing.B) {
					h := benchHost{b: b, url: url, client: &http.Client{Transport: &http.Transport{}}}
					defer h.client.CloseIdleConnections()
					body, want := `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{%s}}`, `"call_device_tool"`
					if method == "tools/call" {
						body, want = fmt.Sprintf(benchCall, benchDevice(0), "%s"), `"is_error":false`
					}
					if revision == revisionModern {
						meta := benchMeta
						if method == "tools/call" {
							meta = "," + meta
						}
						body = fmt.Sprintf(body, meta)
						h.header = map[string]string{"Mcp-Protocol-Version": revisionModern, "Mcp-Method": method, "Mcp-Name": "call_device_tool"}
						if method == "tools/list" {
							delete(h.header, "Mcp-Name")
						}
					} else {
						body = fmt.Sprintf(body, "")
						h.open()
						defer h.end()
					}
					size := 0
					b.ReportAllocs()
					for b.Loop() {
						text, _ := h.post(body)
						if size = len(text); !strings.Contains(text, want) {
							b.Fatalf("%.300s", text)
						}
					}
					b.ReportMetric(float64(size), "bytes/answer")
				})
			}
		}
	}
}

// countedLists are records that answer from what was read before: the database, which has indexes for it, is measured apart.
type countedLists struct {
	fleet.Records
	lists []devices.CatalogCount
	page  devices.Page
}

func (c *countedLists) List(context.Context, devices.ListQuery) (devices.Page, error) {
	return c.page, nil
}

func (c *countedLists) CatalogsOf(context.Context, selector.Selector) ([]devices.CatalogCount, error) {
	return c.lists, nil
}

// BenchmarkSearch measures a search of the fleet, which must cost no more with ten times the devices.
func BenchmarkSearch(b *testing.B) {
	for _, n := range []int{benchFleet / 10, benchFleet} {
		b.Run(fmt.Sprintf("devices=%d", n), func(b *testing.B) {
			records := &countedLists{}
			f := newFleetOver(b, func(p *fleet.Ports) { records.Records, p.Records = p.Records, records })
			f.connectMany(b, n)
			var err, pageErr error
			records.lists, err = records.Records.CatalogsOf(b.Context(), selector.Selector{})
			records.page, pageErr = records.Records.List(b.Context(), devices.ListQuery{Limit: 5})
			if err = errors.Join(err, pageErr); err != nil || len(records.lists) != 1 {
				b.Fatalf("%v, %v", records.lists, err)
			}
			h := benchHost{b: b, url: f.url, client: &http.Client{Transport: &http.Transport{}}}
			defer h.client.CloseIdleConnections()
			h.open()
			defer h.end()
			b.ReportAllocs()
			for b.Loop() {
				if text, _ := h.post(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"search_device_tools","arguments":{"query":"volume"}}}`); !strings.Contains(text, "set_volume") {
					b.Fatalf("%.300s", text)
				}
			}
		})
	}
}

// BenchmarkSessions measures calls in concurrent sessions, here and on the bare server.
func BenchmarkSessions(b *testing.B) {
	b.Run("side=fleetd", func(b *testing.B) {
		f := newFleet(b)
		f.connectMany(b, benchSessions)
		benchCalls(b, f.url)
	})
	b.Run("side=bare", func(b *testing.B) { benchCalls(b, bareServer(b)) })
}

// bareServer is the SDK as its documentation shows it, for revisions with and without sessions.
func bareServer(b *testing.B) (url string) {
	server := mcp.NewServer(&mcp.Implementation{Name: "bare", Version: "1"}, nil)
	for _, tool := range fleetTools {
		server.AddTool(&tool, func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			text := `{"device":"aa:bb:cc:dd:ee:01","tool":"self.audio_speaker.set_volume","text":["true"],"is_error":false,"duration_ms":0.123,"node":"n-test","call":"rl6ppvb52p2u53ou"}`
			return &mcp.CallToolResult{StructuredContent: json.RawMessage(text), Content: []mcp.Content{&mcp.TextContent{Text: text}}}, nil
		})
	}
	get := func(*http.Request) *mcp.Server { return server }
	stateful, stateless := mcp.NewStreamableHTTPHandler(get, nil), mcp.NewStreamableHTTPHandler(get, &mcp.StreamableHTTPOptions{Stateless: true})
	bare := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Mcp-Protocol-Version") == revisionModern {
			stateless.ServeHTTP(w, r)
			return
		}
		stateful.ServeHTTP(w, r)
	}))
	b.Cleanup(bare.Close)
	return bare.URL
}

func benchDevice(i int) devices.ID {
	return devices.ID(fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&255))
}

// connectMany brings devices online, all at once.
func (f *testFleet) connectMany(b *testing.B, n int) {
	for i := range n {
		l := &devicetest.Line{Script: devicetest.NewScript()}
		var err error
		if l.Session, err = f.service.Accept(devices.Identity{Device: benchDevice(i), ClientID: "client-1", Transport: devices.TransportWebSocket}, l); err != nil {
			b.Fatal(err)
		}
		l.Session.StartMCP(devices.FeaturesMCP)
	}
	devicetest.Eventually(b, "all tools are listed", func() bool {
		return f.service.Stats().States.Get(live.State{Transport: devices.TransportWebSocket, MCP: devices.MCPReady}) == int64(n)
	})
}

// benchHost is a host with a connection of its own.
type benchHost struct {
	b       *testing.B
	url     string
	client  *http.Client
	session string
	header  map[string]string
}

func (h *benchHost) do(method, body string) (string, http.Header) {
	r, err := http.NewRequestWithContext(h.b.Context(), method, h.url+PathMCP, strings.NewReader(body))
	if err != nil {
		h.b.Error(err)
		return "", nil
	}
	for name, value := range map[string]string{"Authorization": "Bearer " + admin, "Accept": "application/json, text/event-stream", "Content-Type": "application/json", "Mcp-Session-Id": h.session} {
		if value != "" {
			r.Header.Set(name, value)
		}
	}
	for name, value := range h.header {
		r.Header.Set(name, value)
	}
	response, err := h.client.Do(r)
	if err != nil {
		h.b.Error(err)
		return "", nil
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		h.b.Error(err)
	}
	return string(text), response.Header
}

func (h *benchHost) post(body string) (string, http.Header) { return h.do(http.MethodPost, body) }

// open begins a session, and end ends it.
func (h *benchHost) open() {
	_, header := h.post(hello)
	h.session = header.Get("Mcp-Session-Id")
	h.post(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)
}

func (h *benchHost) end() { h.do(http.MethodDelete, "") }

func benchCalls(b *testing.B, url string) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: benchSessions}}
	b.Cleanup(client.CloseIdleConnections)
	var next atomic.Int64
	var hosts sync.WaitGroup
	b.ReportAllocs()
	sessions := make([]benchHost, benchSessions)
	for i := range sessions {
		sessions[i] = benchHost{b: b, url: url, client: client}
		sessions[i].open()
	}
	b.ResetTimer()
	for i := range sessions {
		hosts.Go(func() {
			body := fmt.Sprintf(benchCall, benchDevice(i), "")
			for next.Add(1) <= int64(b.N) {
				if text, _ := sessions[i].post(body); !strings.Contains(text, `"is_error":false`) {
					b.Errorf("%.300s", text)
					return
				}
			}
		})
	}
	hosts.Wait()
	b.StopTimer()
	for i := range sessions {
		sessions[i].end()
	}
}
