// Package mcpclient speaks MCP to one device, in the dialect of the
// xiaozhi-esp32 firmware (main/mcp_server.cc, v1.7.0 to v2.4.2) and of the
// devices built after it.
//
// The dialect in short: request ids are int32 numbers and come back unchanged;
// anything malformed is dropped without an answer; `params` must be absent
// rather than null; errors have no code, and their message is not escaped, so
// that a quote in it makes the whole envelope invalid JSON; answers overtake
// each other; protocolVersion is always 2024-11-05; there is no ping, no
// cancellation and, in stock firmware, no notification.
//
// A Client starts no goroutine. Its owner feeds every payload that arrives
// into Handle from one goroutine; requests may come from any number of others.
package mcpclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/jsonspan"
)

// StepTimeout bounds `initialize` and each page of `tools/list`.
const StepTimeout = 10 * time.Second

// NoAnswer is the cause of a context that ends because the device has not answered for this long. It is a
// context.DeadlineExceeded in words that a person reads.
type NoAnswer time.Duration

func (n NoAnswer) Error() string {
	return fmt.Sprintf("no answer within %.0f s", time.Duration(n).Seconds())
}

// Is reports whether target is context.DeadlineExceeded.
func (NoAnswer) Is(target error) bool { return target == context.DeadlineExceeded }

// ProtocolVersion is what the firmware answers whatever it is asked
// (mcp_server.cc:388).
const ProtocolVersion = "2024-11-05"

// maxID is the highest request id: the firmware's ids are C ints
// (mcp_server.cc:377-382).
const maxID = 1<<31 - 1

// Errors of requests.
var (
	// ErrClosed is wrapped by the error of every request that was pending when
	// the client was closed; the close's own error is wrapped beside it.
	ErrClosed = errors.New("connection to the device ended")
	// ErrMalformed means that an answer came for this request and could not be
	// used.
	ErrMalformed = errors.New("device sent a malformed answer")
	// ErrNotSent wraps the sender's error: no byte of the request left.
	ErrNotSent = errors.New("request was not sent")
)

// RPCError is a JSON-RPC error answer. The firmware sends no code; Code is
// then -32000.
type RPCError struct {
	Code    int64
	Message string
	Raw     json.RawMessage // the error object as received; nil if it was salvaged from invalid JSON
}

// Error is the message with its code.
func (e *RPCError) Error() string {
	return fmt.Sprintf("device answers error %d: %s", e.Code, e.Message)
}

// DefaultErrorCode replaces the error code, which the firmware never sends.
const DefaultErrorCode = -32000

// Notification is an MCP notification from the device. Params is nil if it had
// none; both point into the handled payload.
type Notification struct {
	Method string
	Params json.RawMessage
}

// Deviation names a way in which a peer departs from JSON-RPC or MCP. The list
// is closed.
type Deviation string

// Deviations.
const (
	DeviationErrorNoCode    Deviation = "error_no_code"   // every firmware
	DeviationErrorUnescaped Deviation = "error_unescaped" // salvaged by its id
	DeviationUnparsable     Deviation = "unparsable"      // invalid JSON that names no pending request
	DeviationLateReply      Deviation = "late_reply"      // an id of this connection that nobody waits for any more
	DeviationForeignReply   Deviation = "foreign_reply"   // an id never used on this connection (robots' local port 8080)
	DeviationIDType         Deviation = "id_type"         // the id came back as a string or fraction
	DeviationMalformed      Deviation = "malformed"       // neither request, notification nor answer
	DeviationNoVersion      Deviation = "no_version"      // jsonrpc is not "2.0"
	DeviationImageEncoding  Deviation = "image_encoding"  // image content as JSON text inside a string
	DeviationBadTool        Deviation = "bad_tool"        // an element of a tool list that is not a tool
	DeviationCursorLoop     Deviation = "cursor_loop"     // a cursor came twice
	DeviationCursorRefused  Deviation = "cursor_refused"  // the device refuses a cursor it gave
	DeviationOversizeTool   Deviation = "oversize_tool"   // one tool does not fit the device's page
	DeviationListTooLong    Deviation = "list_too_long"   // a list over MaxListBytes or MaxPages
	DeviationUnknownRequest Deviation = "unknown_request" // the device asked for a method that does not exist
)

// Peer is the device's connection as a client needs it. Its methods are called
// from whichever goroutine uses the client.
type Peer interface {
	// SendMCP sends one payload within a bounded time and does not keep it. An
	// error means that nothing left.
	SendMCP(payload []byte) error
	// NotifyMCP takes a notification; it must not block or keep its slices.
	NotifyMCP(n Notification)
	// DeviateMCP counts a deviation.
	DeviateMCP(d Deviation)
}

// Client is the MCP client of one connection. Create it with New.
type Client struct {
	peer     Peer
	answered atomic.Uint32 // answers that a request waited for

	mu      sync.Mutex
	firstID int32
	nextID  int32
	pending []waiter // few: calls are serialised per device, so a slice beats a map
	closed  error
}

type waiter struct {
	id   int32
	ch   chan answer
	late Late // set once the caller has left
}

// Late takes the answer of a request whose caller has left: what Request would have
// returned, or an error that wraps ErrClosed if the connection ends before, or
// ErrDropped. It is called once, must not block, and may keep the result.
type Late func(result json.RawMessage, err error)

// maxLate limits the responses of one connection that are awaited after their callers
// have returned.
const maxLate = 32

// ErrDropped means that too many later requests wait for late responses.
var ErrDropped = errors.New("too many late responses are awaited")

type answer struct {
	result json.RawMessage
	page   *knownPage // whose result it is, if it is one's
	err    error
}

// own is the result for a caller who may keep and change it.
func (a answer) own() json.RawMessage {
	if a.page != nil {
		return bytes.Clone(a.result)
	}
	return a.result
}

// New returns the client of a fresh connection. Ids start at a random point
// below 2^30, so that an answer meant for an earlier connection of the same
// device matches nothing.
func New(peer Peer) *Client {
	start := rand.Int32N(1<<30-1) + 1
	return &Client{peer: peer, firstID: start, nextID: start}
}

// Close fails every pending and future request with an error that wraps
// ErrClosed and cause. Further calls change nothing.
func (c *Client) Close(cause error) {
	c.mu.Lock()
	if c.closed != nil {
		c.mu.Unlock()
		return
	}
	c.closed = fmt.Errorf("%w: %w", ErrClosed, cause)
	pending, err := c.pending, c.closed
	c.pending = nil
	c.mu.Unlock()
	for _, w := range pending {
		w.hand(answer{err: err})
	}
}

// hand passes the response to the caller, or to its late handler.
func (w waiter) hand(a answer) {
	if w.late != nil {
		w.late(a.own(), a.err)
		return
	}
	w.ch <- a
}

// register makes room for an answer before the request is written, so that no
// answer can be too fast.
func (c *Client) register() (int32, chan answer, error) {
	ch := make(chan answer, 1) // only the entry in pending entitles anyone to send
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed != nil {
		return 0, nil, fmt.Errorf("%w: %w", ErrNotSent, c.closed)
	}
	id := c.nextID
	if c.nextID == maxID {
		c.nextID = 0
	}
	c.nextID++
	c.pending = append(c.pending, waiter{id: id, ch: ch})
	return id, ch, nil
}

// take removes the waiter of id; ok is false if there is none.
func (c *Client) take(id int32) (w waiter, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, w := range c.pending {
		if w.id == id {
			last := len(c.pending) - 1
			c.pending[i] = c.pending[last]
			c.pending[last] = waiter{}
			c.pending = c.pending[:last]
			return w, true
		}
	}
	return waiter{}, false
}

// Answered is how many answers have come that a request waited for.
func (c *Client) Answered() uint32 { return c.answered.Load() }

// used reports whether this connection has sent a request with this id.
func (c *Client) used(id int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.nextID >= c.firstID {
		return id >= int64(c.firstID) && id < int64(c.nextID)
	}
	return id >= int64(c.firstID) && id <= maxID || id >= 1 && id < int64(c.nextID)
}

// Request sends one request and waits for its answer until ctx ends. params is
// a JSON object or nil for none. The result is the caller's to keep.
//
// Errors: *RPCError if the device answers one; ErrMalformed; ErrNotSent;
// ErrClosed; the context's error on timeout, after which a late answer is
// counted and dropped.
func (c *Client) Request(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	return c.RequestLate(ctx, method, params, nil)
}

// RequestLate is Request for a caller who wants the answer also after ctx has
// ended: late takes it then.
func (c *Client) RequestLate(ctx context.Context, method string, params json.RawMessage, late Late) (json.RawMessage, error) {
	a, err := c.request(ctx, method, params, late)
	return a.own(), err
}

// request is RequestLate, for a result that may be everybody's.
func (c *Client) request(ctx context.Context, method string, params json.RawMessage, late Late) (answer, error) {
	id, ch, err := c.register()
	if err != nil {
		return answer{}, err
	}
	buf := buffers.Get().(*[]byte)
	*buf = appendRequest((*buf)[:0], method, params, id)
	err = c.peer.SendMCP(*buf)
	putBuffer(buf)
	if err != nil {
		c.abandon(id, ch, nil)
		return answer{}, fmt.Errorf("%w: %w", ErrNotSent, err)
	}
	select {
	case a := <-ch:
		return a, a.err
	case <-ctx.Done():
		if a, answered := c.abandon(id, ch, late); answered {
			return a, a.err
		}
		return answer{}, context.Cause(ctx)
	}
}

// abandon gives up on an answer, and leaves it to late if that is not nil. If one
// is on its way already it is returned.
func (c *Client) abandon(id int32, ch chan answer, late Late) (answer, bool) {
	if late == nil {
		if _, waited := c.take(id); waited {
			return answer{}, false
		}
		return <-ch, true // the goroutine that took the waiter has sent or is about to send
	}
	c.mu.Lock()
	at, first, waiting := -1, -1, 0
	for i := range c.pending {
		switch w := &c.pending[i]; {
		case w.id == id:
			at = i
		case w.late != nil:
			if waiting++; first < 0 || w.id < c.pending[first].id {
				first = i
			}
		}
	}
	if at < 0 {
		c.mu.Unlock()
		return <-ch, true
	}
	c.pending[at].late = late
	var dropped Late
	if waiting >= maxLate {
		dropped = c.pending[first].late
		c.pending = slices.Delete(c.pending, first, first+1)
	}
	c.mu.Unlock()
	if dropped != nil {
		dropped(nil, ErrDropped)
	}
	return answer{}, false
}

// Notify sends a notification; stock firmware ignores all of them.
func (c *Client) Notify(method string) error {
	msg := append([]byte(`{"jsonrpc":"2.0","method":`), jsonspan.AppendString(nil, method)...)
	if err := c.peer.SendMCP(append(msg, '}')); err != nil {
		return fmt.Errorf("%w: %w", ErrNotSent, err)
	}
	return nil
}

// Probe requests a method that no firmware has (`ping`): any response, including the
// error, proves that the device is connected, and costs it 90 bytes.
func (c *Client) Probe(ctx context.Context) error {
	_, err := c.Request(ctx, "ping", nil)
	if rpc := (*RPCError)(nil); errors.As(err, &rpc) || errors.Is(err, ErrMalformed) {
		return nil
	}
	return err
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 1024); return &b }}

// putBuffer gives a buffer back unless it grew so much that keeping it would
// hold memory for nothing.
func putBuffer(b *[]byte) {
	if cap(*b) <= 64<<10 {
		buffers.Put(b)
	}
}

// appendRequest writes the members in the order of the golden vectors; params
// is left out rather than null, which the firmware drops silently
// (mcp_server.cc:369-375).
func appendRequest(dst []byte, method string, params json.RawMessage, id int32) []byte {
	dst = append(dst, `{"jsonrpc":"2.0","method":`...)
	dst = jsonspan.AppendString(dst, method)
	if len(params) > 0 {
		dst = append(dst, `,"params":`...)
		dst = append(dst, params...)
	}
	dst = append(dst, `,"id":`...)
	dst = strconv.AppendInt(dst, int64(id), 10)
	return append(dst, '}')
}
