package mcpclient

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"fleetd/internal/jsonspan"
)

// Handle handles one payload from the device: valid JSON, as envelope.Parse
// returns it. Call it from one goroutine at a time; it does not keep payload. It blocks no longer than Peer.SendMCP, and
// only to respond to a request of the device. An error means that the
// payload was unusable; the connection remains usable.
func (c *Client) Handle(payload []byte) error {
	var m message
	if err := m.parse(payload); err != nil {
		c.peer.DeviateMCP(DeviationMalformed)
		return err
	}
	if !m.version {
		c.peer.DeviateMCP(DeviationNoVersion)
	}
	switch {
	case m.method != nil && m.hasID():
		return c.answerRequest(m)
	case m.method != nil:
		c.peer.NotifyMCP(Notification{Method: string(m.method), Params: m.params})
		return nil
	case m.hasID():
		c.deliver(m)
		return nil
	}
	c.peer.DeviateMCP(DeviationMalformed)
	return fmt.Errorf("%w: neither method nor id with result or error: %.80s", ErrMalformed, payload)
}

// message is one JSON-RPC message; all slices point into the payload.
type message struct {
	version bool   // jsonrpc is "2.0"
	method  []byte // nil if absent
	id      []byte // raw
	params  []byte // raw
	result  []byte // raw
	err     []byte // raw
}

func (m *message) hasID() bool {
	return m.id != nil && jsonspan.KindOf(m.id) != jsonspan.KindNull
}

func (m *message) parse(payload []byte) error {
	walk := jsonspan.CheckedObject(payload)
	for walk.Next() {
		value := walk.Value()
		switch string(walk.Key()) {
		case "jsonrpc":
			text, _ := jsonspan.StringBytes(value)
			m.version = string(text) == "2.0"
		case "method":
			text, ok := jsonspan.StringBytes(value)
			if !ok {
				return fmt.Errorf("%w: \"method\" is %.40s", ErrMalformed, value)
			}
			keepFirst(&m.method, text)
		case "id":
			keepFirst(&m.id, value)
		case "params":
			keepFirst(&m.params, value)
		case "result":
			keepFirst(&m.result, value)
		case "error":
			if jsonspan.KindOf(value) != jsonspan.KindNull {
				keepFirst(&m.err, value)
			}
		}
	}
	if err := walk.Err(); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return nil
}

func keepFirst(to *[]byte, value []byte) {
	if *to == nil {
		*to = value
	}
}

// deliver hands an answer to the request that waits for it.
func (c *Client) deliver(m message) {
	id, ok := c.answerID(m.id)
	if !ok {
		return
	}
	w, ok := c.takeAnswered(int32(id))
	if !ok {
		return
	}
	if m.err != nil {
		w.hand(answer{err: c.rpcError(m.err)})
		return
	}
	if m.result == nil {
		c.peer.DeviateMCP(DeviationMalformed)
		w.hand(answer{err: fmt.Errorf("%w: neither result nor error", ErrMalformed)})
		return
	}
	w.hand(answer{result: copyResult(m.result)})
}

// takeAnswered is take for an answer that came, and counts one that is late or that
// nobody asked for.
func (c *Client) takeAnswered(id int32) (w waiter, ok bool) {
	w, ok = c.take(id)
	switch {
	case !ok:
		c.countStray(int64(id))
		return w, false
	case w.late != nil:
		c.peer.DeviateMCP(DeviationLateReply)
	}
	c.answered.Add(1)
	return w, ok
}

// pages holds the buffers of large results. Only listPage gives them back;
// others' results are their callers' to keep.
var pages = sync.Pool{New: func() any { return new([pageSize]byte) }}

// pageSize is a little over the firmware's page of tools, and no size that
// bytes.Clone makes.
const pageSize = 9 << 10

func copyResult(result []byte) []byte {
	if len(result) < pageSize/4 || len(result) > pageSize {
		return bytes.Clone(result)
	}
	return append(pages.Get().(*[pageSize]byte)[:0], result...)
}

func releasePage(result []byte) {
	if cap(result) == pageSize {
		pages.Put((*[pageSize]byte)(result[:pageSize]))
	}
}

// answerID reads the id of an answer. Devices that are not stock firmware
// return it as a string or a fraction.
func (c *Client) answerID(raw []byte) (int64, bool) {
	id, ok := jsonspan.Int(raw)
	if text, isString := jsonspan.StringBytes(raw); isString {
		n, err := strconv.ParseInt(string(text), 10, 32)
		id, ok = n, err == nil
		c.peer.DeviateMCP(DeviationIDType)
	} else if ok && bytes.ContainsAny(raw, ".eE") {
		c.peer.DeviateMCP(DeviationIDType)
	}
	if !ok || id < 1 || id > maxID {
		c.peer.DeviateMCP(DeviationForeignReply)
		return 0, false
	}
	return id, true
}

func (c *Client) countStray(id int64) {
	if c.used(id) {
		c.peer.DeviateMCP(DeviationLateReply)
	} else {
		c.peer.DeviateMCP(DeviationForeignReply)
	}
}

func (c *Client) rpcError(raw []byte) *RPCError {
	e := &RPCError{Code: DefaultErrorCode, Raw: bytes.Clone(raw)}
	if text, ok := jsonspan.String(raw); ok {
		e.Message = text
		c.peer.DeviateMCP(DeviationErrorNoCode)
		return e
	}
	coded := false
	walk := jsonspan.Object(raw)
	for walk.Next() {
		switch string(walk.Key()) {
		case "code":
			if n, ok := jsonspan.Int(walk.Value()); ok && !coded {
				e.Code, coded = n, true
			}
		case "message":
			if text, ok := jsonspan.String(walk.Value()); ok && e.Message == "" {
				e.Message = text
			}
		}
	}
	if !coded {
		c.peer.DeviateMCP(DeviationErrorNoCode)
	}
	return e
}

// HandleBroken takes a whole envelope that is not valid JSON. The firmware
// does not escape error messages (mcp_server.cc:443-450), so a quote or
// newline in one breaks the envelope; the request it answers is then found by
// the id in front of it. Other broken text that names a pending request fails
// that request as malformed. It returns false if no request was found.
func (c *Client) HandleBroken(envelope []byte) bool {
	id, message, ok := salvage(envelope)
	if !ok {
		c.peer.DeviateMCP(DeviationUnparsable)
		return false
	}
	w, ok := c.take(int32(id))
	if !ok {
		c.countStray(id)
		return false
	}
	if message == nil {
		c.peer.DeviateMCP(DeviationMalformed)
		w.hand(answer{err: fmt.Errorf("%w: invalid JSON", ErrMalformed)})
		return true
	}
	c.peer.DeviateMCP(DeviationErrorUnescaped)
	text := string(bytes.ToValidUTF8(message, []byte("\uFFFD")))
	w.hand(answer{err: &RPCError{Code: DefaultErrorCode, Message: text}})
	return true
}

var (
	mcpMark   = []byte(`"type":"mcp"`)
	idMark    = []byte(`"jsonrpc":"2.0","id":`)
	errorMark = []byte(`,"error":{"message":"`)
	errorEnd  = []byte(`"}}}`)
)

// salvage relies on the fixed member order of the firmware's concatenated
// text. message is nil if the broken response is not an error.
func salvage(envelope []byte) (id int64, message []byte, ok bool) {
	if !bytes.Contains(envelope, mcpMark) {
		return 0, nil, false
	}
	_, rest, found := bytes.Cut(envelope, idMark)
	if !found {
		return 0, nil, false
	}
	n := 0
	for n < len(rest) && (rest[n] >= '0' && rest[n] <= '9') {
		n++
	}
	id, err := strconv.ParseInt(string(rest[:n]), 10, 32)
	if err != nil || id < 1 {
		return 0, nil, false
	}
	rest = rest[n:]
	if !bytes.HasPrefix(rest, errorMark) {
		return id, nil, true
	}
	rest = rest[len(errorMark):]
	if end := bytes.LastIndex(rest, errorEnd); end >= 0 {
		rest = rest[:end]
	}
	if rest == nil {
		rest = []byte{}
	}
	return id, rest, true
}

// answerRequest answers a request of the device's: stock firmware has none,
// but MCP allows a server to ping and to ask for roots.
func (c *Client) answerRequest(m message) error {
	out := append([]byte(`{"jsonrpc":"2.0","id":`), m.id...)
	switch string(m.method) {
	case "ping":
		out = append(out, `,"result":{}}`...)
	case "roots/list":
		out = append(out, `,"result":{"roots":[]}}`...)
	default:
		c.peer.DeviateMCP(DeviationUnknownRequest)
		out = append(out, `,"error":{"code":-32601,"message":`...)
		out = jsonspan.AppendString(out, "Method not found: "+string(m.method[:min(len(m.method), 128)]))
		out = append(out, "}}"...)
	}
	if kind := jsonspan.KindOf(m.id); kind != jsonspan.KindNumber && kind != jsonspan.KindString {
		c.peer.DeviateMCP(DeviationMalformed)
		return fmt.Errorf("%w: request id is %.40s", ErrMalformed, m.id)
	}
	if err := c.peer.SendMCP(out); err != nil {
		return errors.Join(ErrNotSent, err)
	}
	return nil
}
