package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/fleetbench/load"
)

// Figures of MCP. Times are those of one request of one host that asks again and again.
const (
	figureList        = "tools/list, µs"
	figureSessionList = "tools/list in a session, µs"
	figureMCPCall     = "call over MCP, µs"
	figureRESTCall    = "the same call over REST, µs"
	figureMCPCalls    = "calls in 32 sessions at once, /s"
	figureCallShare   = "call over MCP ÷ (bare call + 1.2 × REST call)"
	figureListBytes   = "tools/list, bytes (baseline: a tenth of the fleet)"
	figureSearch      = "search of the fleet, bytes allocated (baseline: a tenth of the fleet)"
)

var mcpLines = []line{
	{name: figureList, precision: 1, goal: &goal{ratioAtMost, 1.3}}, {name: figureSessionList, precision: 1, goal: &goal{ratioAtMost, 1.3}},
	{name: figureMCPCalls, goal: &goal{ratioAtLeast, 0.8}}, {name: figureMCPCall, precision: 1}, {name: figureRESTCall, precision: 1}, {name: figureCallShare, precision: 2, goal: &goal{atMost, 1}},
	{name: figureListBytes, goal: &goal{ratioAtMost, 1}}, {name: figureSearch, goal: &goal{ratioAtMost, 1.2}},
}

const (
	mcpCommand  = "mcp-server" // the hidden command under which this program is a bare server of the SDK
	mcpSlice    = 500 * time.Millisecond
	mcpSlices   = 6   // of each kind in a run, in turn
	mcpSearches = 200 // whose allocations are counted
	mcpSessions = 32  // that call at once, each a device of its own
	mcpTurns    = 4   // of both servers
	mcpTurn     = 2 * time.Second
)

// measureMCP measures hosts of language models beside a bare server of the official SDK that has the same tools.
func (b *bench) measureMCP(ctx context.Context) error {
	m := measurement{Name: "mcp", Title: fmt.Sprintf("MCP: %d devices, all embedded, one host", b.opt.mcp), Baseline: "a bare server of go-sdk v1.8.0 with the same tools"}
	fleetd, baseline := samples{}, samples{}
	for run := range b.opt.runs {
		both := samples{}
		if err := b.quietly("mcp", both, func(into samples) error { return b.mcpRun(ctx, run, into) }); err != nil {
			return fmt.Errorf("mcp, run %d: %w", run+1, err)
		}
		fleetd.merge(baseline, lastOf(both))
		b.progress(m.Name, run, fleetd, baseline, figureList)
	}
	m.tabulate(fleetd, baseline, mcpLines)
	b.add(m)
	return nil
}

// lastOf has one value of each figure.
func lastOf(s samples) samples {
	out := samples{}
	for name, values := range s {
		out.add(name, values[len(values)-1])
	}
	return out
}

func (b *bench) mcpRun(ctx context.Context, run int, into samples) (err error) {
	d, f, end, err := b.stage(ctx, variant{}, overWebSocket, b.opt.mcp, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	tenth := max(1, b.opt.mcp/10)
	if err := f.bring(ctx, d, 0, tenth); err != nil {
		return err
	}
	own := strings.TrimPrefix(d.api, "http://")
	before, err := b.mcpFleet(ctx, d, own)
	if err != nil {
		return err
	}
	if err := f.bring(ctx, d, tenth, b.opt.mcp); err != nil {
		return err
	}
	after, err := b.mcpFleet(ctx, d, own)
	if err != nil {
		return err
	}
	for name, value := range after {
		into.add(name, value[0])
		into.add(baselineMark+name, before[name][0])
	}
	return b.mcpTimes(ctx, d, own, b.profileFile("mcp", run), into)
}

// mcpFleet measures what must not grow with the fleet.
func (b *bench) mcpFleet(ctx context.Context, d *daemon, address string) (samples, error) {
	h, err := newMCPHost(address, d.token, false, 0)
	if err != nil {
		return nil, err
	}
	defer h.close()
	list, err := h.ask(h.list)
	if err != nil {
		return nil, err
	}
	search := h.request("tools/call", "search_device_tools", `{"name":"search_device_tools","arguments":{"query":"volume"}`)
	for range 20 { // the first ones make room for their answers
		if answer, err := h.ask(search); err != nil || !bytes.Contains(answer, []byte(`set_volume`)) {
			return nil, errors.Join(err, fmt.Errorf("search: %.300q", answer))
		}
	}
	begun, err := d.metrics(ctx)
	if err != nil {
		return nil, err
	}
	for range mcpSearches {
		if _, err := h.ask(search); err != nil {
			return nil, err
		}
	}
	ended, err := d.metrics(ctx)
	if err != nil {
		return nil, err
	}
	s := samples{}
	s.add(figureListBytes, float64(len(list)))
	s.add(figureSearch, (ended[seriesAllocated]-begun[seriesAllocated])/mcpSearches)
	return s, nil
}

// mcpTimes measures requests of all kinds in turn, so that a disturbance meets all of them.
func (b *bench) mcpTimes(ctx context.Context, d *daemon, address, profile string, into samples) (err error) {
	hosts := map[string]*mcpHost{}
	defer func() {
		for _, h := range hosts {
			h.close()
		}
	}()
	open := func(name, address, token string, session bool) error {
		h, err := newMCPHost(address, token, session, 0)
		hosts[name] = h
		return err
	}
	if err := errors.Join(open("own", address, d.token, false), open("own session", address, d.token, true)); err != nil {
		return err
	}
	tools, err := hosts["own"].ask(hosts["own"].list)
	if err != nil {
		return err
	}
	answer, err := hosts["own"].ask(hosts["own"].call)
	if err != nil || !bytes.Contains(answer, []byte(`"is_error":false`)) {
		return errors.Join(err, fmt.Errorf("call: %.300q", answer))
	}
	bare, err := b.startBareMCP(ctx, tools, answer)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bare.stop()) }()
	if err := errors.Join(open("bare", bare.url, "", false), open("bare session", bare.url, "", true)); err != nil {
		return err
	}
	rest, err := load.NewCaller(d.target(), time.Now().Add(b.opt.limit))
	if err != nil {
		return err
	}
	defer rest.Close()
	kinds := []struct {
		name string
		ask  func() error
	}{
		{baselineMark + figureList, hosts["bare"].asks(hosts["bare"].list)}, {figureList, hosts["own"].asks(hosts["own"].list)},
		{baselineMark + figureSessionList, hosts["bare session"].asks(hosts["bare session"].list)}, {figureSessionList, hosts["own session"].asks(hosts["own session"].list)},
		{baselineMark + figureMCPCall, hosts["bare"].asks(hosts["bare"].call)}, {figureMCPCall, hosts["own"].asks(hosts["own"].call)},
		{figureRESTCall, func() error { return rest.Call(0) }},
	}
	spent, asked := map[string]time.Duration{}, map[string]int{}
	saved := d.profile(ctx, profile, int((mcpSlice * (mcpSlices + 1) * time.Duration(len(kinds))).Seconds()))
	meter, err := startMeter(bare.pid, d.pid())
	if err != nil {
		return err
	}
	for slice := range mcpSlices + 1 {
		for _, kind := range kinds {
			for begun := time.Now(); time.Since(begun) < mcpSlice && ctx.Err() == nil; {
				one := time.Now()
				if err := kind.ask(); err != nil {
					return fmt.Errorf("%s: %w", kind.name, err)
				}
				if slice > 0 { // the first one warms up
					spent[kind.name] += time.Since(one)
					asked[kind.name]++
				}
			}
		}
	}
	s, err := meter.stop(runtime.NumCPU())
	if err := errors.Join(err, saved()); err != nil {
		return err
	}
	per := func(name string) float64 { return spent[name].Seconds() * 1e6 / float64(max(1, asked[name])) }
	for _, kind := range kinds {
		into.add(kind.name, per(kind.name))
	}
	into.add(figureCallShare, per(figureMCPCall)/(per(baselineMark+figureMCPCall)+1.2*per(figureRESTCall)))
	into.add(figureOthers, s.others*100)
	return errors.Join(ctx.Err(), mcpAtOnce(ctx, address, d.token, bare.url, into))
}

// mcpAtOnce measures calls of many sessions at once, here and at the bare server in turn.
func mcpAtOnce(ctx context.Context, own, token, bare string, into samples) error {
	var hosts [2][]*mcpHost
	defer func() {
		for _, h := range slices.Concat(hosts[:]...) {
			h.close()
		}
	}()
	for i := range mcpSessions {
		for server, address := range []string{own, bare} {
			h, err := newMCPHost(address, token, true, i)
			if err != nil {
				return err
			}
			hosts[server] = append(hosts[server], h)
		}
	}
	var made [2]atomic.Int64
	for turn := range mcpTurns + 1 {
		for server := range hosts {
			var calls errgroup
			end := time.Now().Add(mcpTurn)
			for _, h := range hosts[server] {
				calls.run(func() error {
					for time.Now().Before(end) && ctx.Err() == nil {
						if _, err := h.ask(h.call); err != nil {
							return err
						}
						if turn > 0 { // the first one warms up
							made[server].Add(1)
						}
					}
					return nil
				})
			}
			if err := calls.wait(); err != nil {
				return fmt.Errorf("calls of %d sessions: %w", mcpSessions, err)
			}
		}
	}
	whole := (mcpTurns * mcpTurn).Seconds()
	into.add(figureMCPCalls, float64(made[0].Load())/whole)
	into.add(baselineMark+figureMCPCalls, float64(made[1].Load())/whole)
	return nil
}

// errgroup runs functions at once and keeps their errors.
type errgroup struct {
	running sync.WaitGroup
	mu      sync.Mutex
	errs    []error
}

func (g *errgroup) run(f func() error) {
	g.running.Go(func() {
		if err := f(); err != nil {
			g.mu.Lock()
			g.errs = append(g.errs, err)
			g.mu.Unlock()
		}
	})
}

func (g *errgroup) wait() error {
	g.running.Wait()
	return errors.Join(g.errs...)
}

// mcpHost is one host with one connection.
type mcpHost struct {
	conn       net.Conn
	br         *bufio.Reader
	head       string
	session    string
	list, call []byte
}

const mcpMeta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"bench","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`

func newMCPHost(address, token string, session bool, device int) (*mcpHost, error) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	h := &mcpHost{conn: c, br: bufio.NewReaderSize(c, 64<<10), head: "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json, text/event-stream\r\nContent-Type: application/json\r\n" +
		"Authorization: Bearer " + token + "\r\n"}
	if session {
		if err := h.open(); err != nil {
			h.close()
			return nil, err
		}
	}
	h.list = h.request("tools/list", "", `{`)
	h.call = h.request("tools/call", "call_device_tool", `{"name":"call_device_tool","arguments":{"device":"`+load.DeviceID(device)+`","tool":"`+load.ToolSetVolume+`","arguments":{"volume":50}}`)
	return h, nil
}

func (h *mcpHost) close() {
	if h != nil {
		_ = h.conn.Close() // nothing is under way
	}
}

// request is one request; params lack their end.
func (h *mcpHost) request(method, name, params string) []byte {
	head := h.head
	if h.session == "" {
		head += "Mcp-Protocol-Version: 2026-07-28\r\nMcp-Method: " + method + "\r\nMcp-Name: " + name + "\r\n"
		if params != "{" {
			params += ","
		}
		params += mcpMeta
	} else {
		head += "Mcp-Protocol-Version: 2025-06-18\r\nMcp-Session-Id: " + h.session + "\r\n"
	}
	body := `{"jsonrpc":"2.0","id":1,"method":"` + method + `","params":` + params + `}}`
	return fmt.Appendf(nil, "%sContent-Length: %d\r\n\r\n%s", head, len(body), body)
}

func (h *mcpHost) open() error {
	body := `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"bench","version":"1"}}}`
	_, header, err := h.exchange(fmt.Appendf(nil, "%sContent-Length: %d\r\n\r\n%s", h.head, len(body), body))
	if err != nil {
		return err
	}
	h.session = header.Get("Mcp-Session-Id")
	body = `{"jsonrpc":"2.0","method":"notifications/initialized"}`
	_, _, err = h.exchange(fmt.Appendf(nil, "%sMcp-Protocol-Version: 2025-06-18\r\nMcp-Session-Id: %s\r\nContent-Length: %d\r\n\r\n%s", h.head, h.session, len(body), body))
	return err
}

func (h *mcpHost) exchange(request []byte) ([]byte, http.Header, error) {
	if _, err := h.conn.Write(request); err != nil {
		return nil, nil, err
	}
	response, err := http.ReadResponse(h.br, nil)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode >= 300 {
		err = fmt.Errorf("status %d, %.300q", response.StatusCode, body)
	}
	return body, response.Header, err
}

// ask makes a request and returns the message in its answer.
func (h *mcpHost) ask(request []byte) ([]byte, error) {
	body, _, err := h.exchange(request)
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(body) {
		if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok && bytes.Contains(data, []byte(`"result"`)) {
			return bytes.TrimSpace(data), nil
		}
	}
	if bytes.Contains(body, []byte(`"result"`)) {
		return body, nil
	}
	return nil, fmt.Errorf("no result in %.300q", body)
}

func (h *mcpHost) asks(request []byte) func() error {
	return func() error {
		_, err := h.ask(request)
		return err
	}
}

// bareMCP is what a bare server answers: fleetd's own answers.
type bareMCP struct {
	Tools []*mcp.Tool     `json:"tools"`
	Call  json.RawMessage `json:"call"`
}

// startBareMCP runs the bare server in a process of its own.
func (b *bench) startBareMCP(ctx context.Context, list, call []byte) (x external, err error) {
	var tools struct{ Result bareMCP }
	var called struct {
		Result struct {
			StructuredContent json.RawMessage `json:"structuredContent"`
		}
	}
	if err := errors.Join(json.Unmarshal(list, &tools), json.Unmarshal(call, &called)); err != nil {
		return x, err
	}
	tools.Result.Call = called.Result.StructuredContent
	text, err := json.Marshal(tools.Result)
	if err != nil {
		return x, err
	}
	dir, err := os.MkdirTemp(b.dir, "mcp")
	if err != nil {
		return x, err
	}
	self, err := os.Executable()
	if err != nil {
		return x, err
	}
	if err := os.WriteFile(filepath.Join(dir, "answers"), text, 0o600); err != nil {
		return x, err
	}
	cmd := exec.Command(self, mcpCommand, dir)
	load.DieWithParent(cmd)
	if err := cmd.Start(); err != nil {
		return x, err
	}
	x = external{pid: strconv.Itoa(cmd.Process.Pid), stop: func() error {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
		return nil
	}}
	for deadline := time.Now().Add(startLimit); ; time.Sleep(20 * time.Millisecond) {
		if content, err := os.ReadFile(filepath.Join(dir, "address")); err == nil {
			x.url = string(content)
			return x, nil
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return x, errors.Join(errors.New("the bare MCP server does not start"), x.stop())
		}
	}
}

// serveMCP is the bare server: the SDK as its documentation shows it, for both eras.
func serveMCP(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, "answers"))
	if err != nil {
		return err
	}
	var answers bareMCP
	if err := json.Unmarshal(text, &answers); err != nil {
		return err
	}
	server := mcp.NewServer(&mcp.Implementation{Name: "bare", Version: "1"}, nil)
	for _, tool := range answers.Tools {
		server.AddTool(tool, func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return &mcp.CallToolResult{StructuredContent: answers.Call, Content: []mcp.Content{&mcp.TextContent{Text: string(answers.Call)}}}, nil
		})
	}
	get := func(*http.Request) *mcp.Server { return server }
	stateful, stateless := mcp.NewStreamableHTTPHandler(get, nil), mcp.NewStreamableHTTPHandler(get, &mcp.StreamableHTTPOptions{Stateless: true})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	partial := filepath.Join(dir, "address.partial")
	if err := errors.Join(os.WriteFile(partial, []byte(l.Addr().String()), 0o600), os.Rename(partial, filepath.Join(dir, "address"))); err != nil {
		return err
	}
	return http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Mcp-Protocol-Version") >= "2026-07-28" {
			stateless.ServeHTTP(w, r)
			return
		}
		stateful.ServeHTTP(w, r)
	}))
}
