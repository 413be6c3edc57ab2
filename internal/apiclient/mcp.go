package apiclient

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"sync"
	"time"
)

const (
	maxMCPLine   = 1 << 20  // bytes of one message of the host
	maxMCPEvent  = 64 << 20 // bytes of one message for it; photos are in base64
	maxMCPAtOnce = 64       // requests of the host in progress
	mcpGoodbye   = 2 * time.Second
	// mcpPatience is how long answers are waited for when the host has closed its end: as long as a call may last.
	mcpPatience   = 305 * time.Second
	mcpRevision   = "2026-07-28" // the first one without sessions
	mcpVersionKey = "io.modelcontextprotocol/protocolVersion"
)

// BridgeMCP carries MCP between a host that speaks over pipes, one message a line, and the node's endpoint at path,
// until in ends or ctx does. Messages pass as they are, whatever their revision; the bridge adds what HTTP wants:
// the session, the revision, and the names that routers read. Errors that MCP cannot express go to note, one call at
// a time.
func (c *Client) BridgeMCP(ctx context.Context, path string, in io.Reader, out io.Writer, note func(error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	b := &mcpBridge{client: c, path: path, ctx: ctx, out: out, gone: make(chan struct{}), note: note, running: map[string]context.CancelFunc{}, slots: make(chan struct{}, maxMCPAtOnce)}
	// Reading a pipe cannot be interrupted, so that the end of the context does not wait for it.
	ended := make(chan error, 1)
	go func() { ended <- b.read(ctx, in) }()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = ctx.Err()
	}
	b.finish(ctx)
	cancel()
	b.tasks.Wait()
	b.goodbye()
	return errors.Join(err, b.broken())
}

// finish waits a while for the answers to what the host asked before it closed its end.
func (b *mcpBridge) finish(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		b.calls.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
	case <-b.gone:
	case <-time.After(mcpPatience):
	}
}

// mcpBridge is one host.
type mcpBridge struct {
	client *Client
	path   string
	ctx    context.Context // of the bridge: a session outlives the request that opened it
	tasks  sync.WaitGroup  // calls included
	calls  sync.WaitGroup
	slots  chan struct{}

	writing sync.Mutex
	out     io.Writer
	failure error         // of a write: the host is gone
	gone    chan struct{} // closed then

	reopening sync.Mutex  // one after the other
	note      func(error) // under reopening

	mu       sync.Mutex
	session  string
	revision string   // that was agreed on; empty without a session
	hello    []byte   // the host's initialize
	followed []string // URIs of the resources that the host subscribed to in it
	running  map[string]context.CancelFunc
}

// mcpMessage is what the bridge reads of a message.
type mcpMessage struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params struct {
		Name      string                     `json:"name"`
		URI       string                     `json:"uri"`
		RequestID json.RawMessage            `json:"requestId"`
		Meta      map[string]json.RawMessage `json:"_meta"`
	} `json:"params"`
	Result *struct {
		Revision string `json:"protocolVersion"`
	} `json:"result"` // nil: an error, or no answer
	Error struct {
		Message string `json:"message"`
	} `json:"error"`
}

func (m *mcpMessage) isCall() bool { return m.Method != "" && len(m.ID) > 0 }

// ends reports whether a call ends before its host leaves.
func (m *mcpMessage) ends() bool { return m.Method != "subscriptions/listen" }

// modern is the revision of a message that needs no session; empty for others.
func (m *mcpMessage) modern() string {
	var revision string
	if json.Unmarshal(m.Params.Meta[mcpVersionKey], &revision) != nil || revision < mcpRevision {
		return ""
	}
	return revision
}

func (b *mcpBridge) read(ctx context.Context, in io.Reader) error {
	lines := bufio.NewReader(in)
	for ctx.Err() == nil && b.broken() == nil {
		line, whole, err := readLine(lines)
		if err != nil && ctx.Err() == nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("read the host's messages: %w", err)
		}
		if line = bytes.TrimSpace(line); len(line) == 0 && err != nil {
			return nil
		}
		if len(line) == 0 {
			continue
		}
		if !whole {
			b.write(fmt.Appendf(nil, `{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"a message may have %d bytes"}}`, maxMCPLine))
			continue
		}
		var m mcpMessage
		// What is not a message of this shape is for the node to refuse.
		if err := json.Unmarshal(line, &m); err != nil && !json.Valid(line) {
			b.write([]byte(`{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"this line is no JSON"}}`))
			continue
		}
		switch {
		case m.Method == "notifications/cancelled" && b.cancel(m.Params.RequestID):
			// Without a session, a request is cancelled by leaving its answer.
		case m.isCall() && m.Method != "initialize":
			select {
			case b.slots <- struct{}{}:
			default: // waiting would delay answers and cancellations of the host
				b.fail(m.ID, fmt.Errorf("%d requests are in progress already", cap(b.slots)))
				continue
			}
			if m.ends() {
				b.calls.Add(1)
			}
			b.tasks.Go(func() {
				if m.ends() {
					defer b.calls.Done()
				}
				defer func() { <-b.slots }()
				b.send(ctx, line, &m)
			})
		default: // in their order
			b.send(ctx, line, &m)
		}
	}
	return nil
}

// readLine reads to the end of a line; of one that is too long it keeps the
// beginning, and whole is false.
func readLine(r *bufio.Reader) (line []byte, whole bool, err error) {
	whole = true
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > maxMCPLine {
			whole, part = false, nil
		}
		line = append(line, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, whole, err
		}
	}
}

// send carries one message to the node and its answer back.
func (b *mcpBridge) send(bridge context.Context, line []byte, m *mcpMessage) {
	ctx, cancel := context.WithCancel(bridge)
	defer cancel()
	if m.isCall() && m.modern() != "" {
		key := string(m.ID)
		b.mu.Lock()
		b.running[key] = cancel
		b.mu.Unlock()
		defer func() {
			b.mu.Lock()
			delete(b.running, key)
			b.mu.Unlock()
		}()
	}
	if m.Method == "resources/unsubscribe" { // whatever comes of it, nobody is to subscribe again
		b.unfollow(m.Params.URI)
	}
	b.mu.Lock()
	session := b.session
	b.mu.Unlock()
	err := b.post(ctx, line, m)
	if lost, ok := errors.AsType[*Problem](err); ok && lost.Status == http.StatusNotFound && m.Method != "initialize" && b.reopen(ctx, session) {
		err = b.post(ctx, line, m)
	}
	switch {
	case err == nil || !m.isCall():
	case ctx.Err() == nil:
		b.fail(m.ID, err)
	case bridge.Err() != nil && m.ends(): // else the host has cancelled it
		b.fail(m.ID, errEnded)
	}
}

// cancel leaves a request without a session; false if there is none of that id.
func (b *mcpBridge) cancel(id json.RawMessage) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	cancel := b.running[string(id)]
	if cancel == nil {
		return false
	}
	cancel()
	return true
}

func (b *mcpBridge) header(m *mcpMessage) http.Header {
	h := http.Header{"Accept": {"application/json, text/event-stream"}, "Content-Type": {"application/json"}}
	if revision := m.modern(); revision != "" {
		h.Set("Mcp-Protocol-Version", revision)
		h.Set("Mcp-Method", m.Method)
		switch m.Method {
		case "tools/call", "prompts/get":
			h.Set("Mcp-Name", m.Params.Name)
		case "resources/read":
			h.Set("Mcp-Name", m.Params.URI)
		}
		return h
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	inSession(h, b.session, b.revision)
	return h
}

func inSession(h http.Header, session, revision string) {
	if session != "" {
		h.Set("Mcp-Session-Id", session)
		h.Set("Mcp-Protocol-Version", revision)
	}
}

func (b *mcpBridge) post(ctx context.Context, line []byte, m *mcpMessage) error {
	return b.postWith(ctx, line, m, b.header(m))
}

func (b *mcpBridge) postWith(ctx context.Context, line []byte, m *mcpMessage, header http.Header) error {
	answered := false
	err := b.carry(ctx, line, header, func(message []byte, session string) {
		var a mcpMessage
		isAnswer := json.Unmarshal(message, &a) == nil && a.Method == ""
		answered = answered || isAnswer
		// Before the host has the answer, so that its next message comes after it.
		switch {
		case !isAnswer || a.Result == nil:
		case m.Method == "initialize":
			b.opened(line, a.Result.Revision, session)
		case m.Method == "resources/subscribe":
			b.follow(m.Params.URI)
		}
		b.write(message)
	})
	switch {
	case answered: // what breaks off after it is not a second answer
		return nil
	case err == nil && m.isCall():
		return errNoAnswer
	}
	return err
}

var errEnded = errors.New("fleetd mcp ended before the answer came; a call may have had its effect on the device")

var errNoAnswer = errors.New("the node ended the request without an answer")

// carry posts a message, and calls f for every message of the answer and with the session that it names.
func (b *mcpBridge) carry(ctx context.Context, line []byte, header http.Header, f func(message []byte, session string)) error {
	resp, err := b.client.raw(ctx, http.MethodPost, b.path, line, header)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch {
	case resp.StatusCode >= 300 && kind == "application/json": // a JSON-RPC error with a status of its own
	case resp.StatusCode >= 300:
		return b.client.readProblem(resp)
	}
	return b.answers(resp.Body, kind, func(message []byte) { f(message, resp.Header.Get("Mcp-Session-Id")) })
}

// answers calls f for every message of an answer.
func (b *mcpBridge) answers(body io.Reader, kind string, f func([]byte)) error {
	if kind != "text/event-stream" {
		content, err := io.ReadAll(io.LimitReader(body, maxMCPEvent))
		if err != nil {
			return fmt.Errorf("the answer broke off: %w", err)
		}
		if content = bytes.TrimSpace(content); len(content) > 0 {
			f(content)
		}
		return nil
	}
	for events := newEventReader(body, "", maxMCPEvent); ; {
		event, err := events.next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("the answer broke off: %w", err)
		}
		if data := bytes.TrimSpace(event.Data); len(data) > 0 {
			f(data)
		}
	}
}

// fail answers a request that the node did not.
func (b *mcpBridge) fail(id json.RawMessage, err error) {
	type fault struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}
	answer, encoded := json.Marshal(struct {
		Version string          `json:"jsonrpc"`
		ID      json.RawMessage `json:"id"`
		Error   fault           `json:"error"`
	}{"2.0", id, fault{-32000, err.Error()}})
	if encoded == nil { // a string and an id that was JSON encode
		b.write(answer)
	}
}

// write passes one message to the host.
func (b *mcpBridge) write(message []byte) {
	var line bytes.Buffer
	if json.Compact(&line, message) != nil { // a line break inside would end the message
		return
	}
	line.WriteByte('\n')
	b.writing.Lock()
	defer b.writing.Unlock()
	if b.failure == nil {
		if _, b.failure = b.out.Write(line.Bytes()); b.failure != nil {
			close(b.gone)
		}
	}
}

func (b *mcpBridge) broken() error {
	b.writing.Lock()
	defer b.writing.Unlock()
	return b.failure
}

// raw sends a request and returns any answer.
func (c *Client) raw(ctx context.Context, method, path string, body []byte, header http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	req.Header = header
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	return resp, nil
}

// MCPPath is the path of the fleet's MCP endpoint, or of one device's if that is not empty.
func MCPPath(device string) string {
	if device == "" {
		return "/mcp"
	}
	return "/mcp/devices/" + url.PathEscape(device)
}
