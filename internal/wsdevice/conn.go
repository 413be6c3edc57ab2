package wsdevice

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
	"fleetd/internal/hello"
	"fleetd/internal/tasks"
	"fleetd/internal/writequeue"
)

// conn is one upgraded connection. It is the fleet.Conn of its session.
type conn struct {
	front   *Front
	ws      *websocket.Conn
	framing envelope.Framing
	session atomic.Pointer[session.Session]

	lastSent atomic.Int64 // the last data frame written, as clock.Reading
	// writing is the start of the data frame being written, as clock.Reading; 0: none.
	// The sweeper ends a write that takes too long: a deadline for each write would be a
	// timer, and each timer wakes the process once more, long after the write.
	writing      atomic.Int64
	lastPing     atomic.Int64
	lastReceived atomic.Int64 // the last data frame read, as clock.Reading
	unanswered   atomic.Int32 // pings since the last pong or message
	slow         atomic.Bool  // a write took longer than WriteTimeout

	meter      connlimit.Meter
	emptyBytes int32 // bytes read since the last ones with content
	bad        int32 // unusable messages

	// in is the only buffer of an idle connection; longer messages are read into others. The upgrade takes a given one
	// from 257 bytes on.
	in *bufio.Reader

	// resume is serve with its session: a go statement without arguments allocates nothing.
	resume func()

	out writequeue.Queue
}

const readSize = 288

// How long a connection stays open after fleetd's Close frame.
const (
	closeLinger = time.Second
	drainLinger = 300 * time.Millisecond // keeps the shutdown short
)

// closeCodes are the WebSocket close codes of reasons that come from fleetd.
var closeCodes = map[devices.CloseReason]int{
	devices.CloseNoHello:    websocket.ClosePolicyViolation,
	devices.CloseProtocol:   websocket.CloseProtocolError,
	devices.CloseTooLarge:   websocket.CloseMessageTooBig,
	devices.CloseDraining:   websocket.CloseServiceRestart,
	devices.CloseContested:  websocket.ClosePolicyViolation,
	devices.CloseCrowded:    websocket.CloseTryAgainLater,
	devices.CloseFlooding:   websocket.ClosePolicyViolation,
	devices.CloseRevoked:    websocket.ClosePolicyViolation,
	devices.CloseSlow:       websocket.CloseTryAgainLater,
	devices.CloseIdle:       websocket.CloseNormalClosure,
	devices.CloseSuperseded: websocket.CloseNormalClosure,
}

// refusals maps the errors of Service.Accept to close reasons.
var refusals = map[devices.Code]devices.CloseReason{
	devices.CodeUnavailable:  devices.CloseDraining,
	devices.CodeUnauthorized: devices.CloseRevoked,
	devices.CodeForbidden:    devices.CloseContested,
	devices.CodeDeviceBusy:   devices.CloseCrowded,
	devices.CodeSuperseded:   devices.CloseSuperseded,
}

// run opens the session on the goroutine that the upgrade started. A new goroutine serves
// the rest of the connection: opening needs a stack of 8 KB, which would stay as long as
// the connection.
func (c *conn) run(who devices.Identity, begun time.Time) {
	defer tasks.Contain(c.front.opt.Log, c.onPanic)
	c.lastSent.Store(clock.Reading(begun))
	// Spread the pings of devices that connect at the same time.
	c.lastPing.Store(clock.Reading(begun.Add(-rand.N(PingEvery / 2))))
	session, reason := c.open(who, begun)
	if session != nil {
		c.resume = func() { c.serve(session) }
		go c.resume()
		return
	}
	if c.session.Load() == nil { // otherwise the session counts its end
		c.Close(reason)
		if reason != devices.CloseSuperseded { // the session that was replaced at once counts its own end
			c.front.opt.Service.Stats().Closed.Add(reason, 1)
			c.front.opt.Service.NoteStep(devices.Step{Kind: devices.StepRefused, Device: who.Device, Cause: devices.StepCause(reason), Proven: who.Verified, Remote: fleet.RemoteOf(who.Remote), Transport: devices.TransportWebSocket})
		}
	}
	c.remove()
}

// onPanic closes the connection after an internal error (bug).
func (c *conn) onPanic() {
	if session := c.session.Load(); session != nil {
		session.Close(devices.CloseInternal)
	}
	c.remove()
}

// remove removes the connection from Front.conns.
func (c *conn) remove() {
	_ = c.ws.Close() // the peer may have closed it
	c.front.conns.Remove(c)
}

// open waits for the hello and answers it from local state.
func (c *conn) open(who devices.Identity, begun time.Time) (*session.Session, devices.CloseReason) {
	log := c.front.opt.Log
	c.ws.SetReadLimit(HelloLimit)
	_ = c.ws.SetReadDeadline(time.Now().Add(HelloTimeout)) // an error shows in the read
	kind, r, err := c.ws.NextReader()
	var buf *[]byte
	if err == nil {
		buf, err = c.readAll(r)
	}
	if err != nil {
		log.Debug("no hello", "device", who.Device, "remote", who.Remote, "error", err)
		if errors.Is(err, websocket.ErrReadLimit) {
			return nil, devices.CloseTooLarge
		}
		return nil, devices.CloseNoHello
	}
	defer putBuffer(buf)
	if kind != websocket.TextMessage {
		log.Debug("binary frame before hello", "device", who.Device, "remote", who.Remote)
		return nil, devices.CloseProtocol
	}
	h, err := hello.ParseDevice(*buf)
	if err == nil && h.Transport == hello.TransportUDP {
		err = errors.New("hello for another transport on a WebSocket")
	}
	if err != nil {
		log.Debug("bad hello", "device", who.Device, "remote", who.Remote, "error", err)
		return nil, devices.CloseNoHello
	}
	session, err := c.front.opt.Service.Accept(who, c)
	if err != nil {
		log.Debug("not accepted", "device", who.Device, "remote", who.Remote, "error", err)
		return nil, refusals[devices.AsError(err).Code]
	}
	c.session.Store(session)
	connlimit.MarkAuthenticated(c.ws.NetConn()) // without credentials, the hello is what authenticates
	reply, err := session.OpenAudio(h, hello.TransportWebSocket, func(*speech.Conversation) (speech.AudioPath, error) {
		return (*audioPath)(c), nil
	})
	answer, appendErr := reply.Append(nil)
	if err = errors.Join(err, appendErr); err != nil { // only an internal error (bug) can cause this
		log.Error("server hello", "device", who.Device, "error", err)
		session.Close(devices.CloseInternal)
		return nil, devices.CloseInternal
	}
	if err := c.SendControl(answer); err != nil {
		session.Close(devices.CloseGone)
		return nil, devices.CloseGone
	}
	c.front.opt.Service.Stats().HelloTime.Observe(time.Since(begun))
	c.ws.SetReadLimit(MessageLimit)
	c.out.IfOpen(func() { // Close has set a deadline that must stay
		_ = c.ws.SetReadDeadline(time.Time{}) // from now on pings detect dead connections
	})
	c.ws.SetPongHandler(c.pong)
	session.BeginConversation()
	session.StartMCP(devices.FeaturesOf(h.MCP))
	return session, ""
}

func (c *conn) pong(string) error {
	c.unanswered.Store(0)
	c.emptyBytes = 0
	return c.meter.Spend(c.front.opt.Floods, connlimit.CostControl)
}

// serve handles frames until the connection ends. After each message it continues on a new goroutine: a stack that
// has grown to handle a message stays grown, and 2 KB are enough to wait, which is what an idle connection does. The
// frames from here to the read must therefore stay small.
func (c *conn) serve(session *session.Session) {
	defer tasks.Contain(c.front.opt.Log, c.onPanic)
	for {
		err := c.await()
		if err == nil {
			err = c.handle(session)
		}
		if err != nil {
			c.finish(session, err)
			return
		}
		if c.in.Buffered() == 0 { // no other frame has arrived
			go c.resume() // as before, remove is still to be called
			return
		}
	}
}

// The pong of a device, which answers the pings of sweep: final, masked, without content.
const (
	pongHead   = "\x8a\x80"
	pongLength = len(pongHead) + 4
)

// await waits for a frame. It handles pongs, the only frames of an idle device, since the WebSocket reader needs a
// larger stack to wait for the next frame itself.
func (c *conn) await() error {
	for {
		if _, err := c.in.Peek(1); err != nil {
			return err
		}
		frame, _ := c.in.Peek(min(c.in.Buffered(), pongLength))
		if len(frame) < pongLength || string(frame[:len(pongHead)]) != pongHead {
			return nil
		}
		_, _ = c.in.Discard(pongLength) // it is buffered
		if err := c.pong(""); err != nil {
			return err
		}
	}
}

// finish closes the session with the reason that the read error indicates.
func (c *conn) finish(session *session.Session, err error) {
	closed := (*websocket.CloseError)(nil)
	switch {
	case c.slow.Load():
		session.Close(devices.CloseSlow)
	case errors.Is(err, connlimit.ErrFlood):
		c.onFlood()
	case errors.Is(err, websocket.ErrReadLimit):
		session.Close(devices.CloseTooLarge)
	case errors.As(err, &closed), errors.Is(err, io.EOF), isNetwork(err):
		session.Close(devices.CloseGone)
	default:
		session.Close(devices.CloseProtocol)
	}
	c.remove()
}

var errTooManyUnusable = fmt.Errorf("%d unusable messages on one connection", MaxBad)

// handle reads and handles one message. An error ends the connection. Unusable messages return one
// only when there have been MaxBad of them.
//
//go:noinline
func (c *conn) handle(session *session.Session) error {
	kind, r, err := c.ws.NextReader()
	if err != nil {
		return err
	}
	buf, err := c.readAll(r)
	if err != nil {
		return err
	}
	c.unanswered.Store(0)
	c.lastReceived.Store(clock.Reading(time.Now()))
	cost := float32(0)
	if kind == websocket.TextMessage {
		asked := session.AnswerCount()
		if err = session.HandleControl(*buf); session.AnswerCount() == asked {
			cost = connlimit.CostMessage
		}
	} else {
		cost = connlimit.CostAudio
		var frame envelope.Frame
		if frame, err = c.framing.ParseFrame(*buf); err == nil {
			session.HandleAudio(frame)
		}
	}
	putBuffer(buf)
	if flood := c.meter.Spend(c.front.opt.Floods, cost); flood != nil {
		return flood
	}
	if err == nil {
		return nil
	}
	if c.bad++; c.bad == 1 || c.bad == MaxBad {
		c.front.opt.Log.Debug("unusable message", "session", session.ID(), "count", c.bad, "error", err)
	}
	if c.bad >= MaxBad {
		return errTooManyUnusable
	}
	return nil
}

func isNetwork(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, net.ErrClosed)
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 1024); return &b }}

// putBuffer drops buffers that one large message has grown.
func putBuffer(b *[]byte) {
	if cap(*b) <= 64<<10 {
		buffers.Put(b)
	}
}

// readAll reads a message into a pooled buffer, which the caller must put back. It takes
// the buffer when bytes have arrived, so that an idle connection holds none.
func (c *conn) readAll(r io.Reader) (*[]byte, error) {
	buf := buffers.Get().(*[]byte)
	b := (*buf)[:0]
	for {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		*buf = b
		if n > 0 {
			c.emptyBytes = 0
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			return buf, nil
		default:
			putBuffer(buf)
			return nil, err
		}
	}
}

// SendControl writes msg on the caller's goroutine if no other write is in progress, and
// queues it otherwise. See fleet.Conn.
func (c *conn) SendControl(msg []byte) error {
	return c.out.Send(c, websocket.TextMessage, msg, QueueLimit)
}

// audioPath is the connection as a speech.AudioPath.
type audioPath conn

// SendAudio sends one packet in the framing of the hello. See speech.AudioPath.
func (p *audioPath) SendAudio(f envelope.Frame) error {
	c := (*conn)(p)
	buf := buffers.Get().(*[]byte)
	defer putBuffer(buf)
	msg, err := c.framing.AppendFrame((*buf)[:0], f)
	*buf = msg
	if err != nil {
		return err
	}
	return c.out.Send(c, websocket.BinaryMessage, msg, QueueLimit)
}

// Close does nothing: the connection continues, or ends with its session.
func (p *audioPath) Close() {}

// Go implements writequeue.Writer.
func (c *conn) Go(task func()) { c.front.conns.Go(task) }

// Write implements writequeue.Writer. It writes one message in one frame, because
// firmware up to v2.1.0 receives nothing more after a fragmented message.
func (c *conn) Write(kind int, msg []byte) error {
	now := time.Now()
	c.writing.Store(clock.Reading(now))
	err := c.ws.WriteMessage(kind, msg)
	c.writing.Store(0)
	if err != nil {
		c.slow.Store(errors.Is(err, os.ErrDeadlineExceeded))
		c.expire() // the reader gets an error and closes the connection
		return err
	}
	c.lastSent.Store(clock.Reading(now))
	return nil
}

// expire makes all pending reads and writes fail. That includes the reader's own write,
// which the sweeper no longer ends when the front end is closing.
func (c *conn) expire() { _ = c.ws.NetConn().SetDeadline(time.Now()) }

// Close closes the connection, with a Close frame if the reason comes from fleetd. The
// firmware neither answers it nor closes TCP (web_socket.cc:383-388), so the reader waits
// only for a short time.
func (c *conn) Close(reason devices.CloseReason) {
	if !c.out.Close() {
		return
	}
	code, sendsClose := closeCodes[reason]
	if !sendsClose {
		c.expire()
		return
	}
	frame := websocket.FormatCloseMessage(code, string(reason))
	if c.ws.WriteControl(websocket.CloseMessage, frame, time.Now().Add(100*time.Millisecond)) != nil {
		c.expire()
		return
	}
	linger := closeLinger
	if reason == devices.CloseDraining {
		linger = drainLinger
	}
	_ = c.ws.SetReadDeadline(time.Now().Add(linger)) // an error shows in the read
}

var noop = []byte(`{"type":"noop"}`)

// sweep performs what is due on this connection.
func (c *conn) sweep(now time.Time) {
	at := clock.Reading(now)
	if begun := c.writing.Load(); begun != 0 && at-begun > int64(WriteTimeout) {
		_ = c.ws.NetConn().SetWriteDeadline(now) // an error shows in the write
	}
	session := c.session.Load()
	if session == nil {
		return // the deadline of the hello applies
	}
	if at-c.lastPing.Load() >= int64(PingEvery) {
		c.lastPing.Store(at)
		if c.unanswered.Add(1) > MaxUnanswered {
			c.front.conns.Go(func() { session.Close(devices.CloseDead) })
			return
		}
		c.front.conns.Go(func() { // a blocked ping ends with the connection
			_ = c.ws.WriteControl(websocket.PingMessage, nil, time.Time{})
		})
	}
	idle := time.Duration(at - c.lastSent.Load())
	active := at-c.lastReceived.Load() < int64(KeepAfter)
	switch {
	case c.front.opt.CloseIdle && !active && idle >= IdleAfter:
		c.front.conns.Go(func() { session.Close(devices.CloseIdle) })
	case (active || !c.front.opt.CloseIdle) && idle >= KeepAfter:
		c.front.conns.Go(func() {
			if errors.Is(c.SendControl(noop), devices.ErrOverloaded) {
				session.Close(devices.CloseSlow)
			}
		})
	}
}
