package wsdevice

import (
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

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
	"fleetd/internal/hello"
	"fleetd/internal/lobby"
	"fleetd/internal/outbox"
	"fleetd/internal/tasks"
)

// conn is one upgraded connection. It is the fleet.Conn of its session.
type conn struct {
	front   *Front
	ws      *websocket.Conn
	framing envelope.Framing
	session atomic.Pointer[session.Session]

	lastSent atomic.Int64 // unix nanoseconds of the last data frame written
	// writing is since when a data frame has been written, in unix nanoseconds; 0: none
	// is. The sweeper ends one that takes too long: a deadline for each would be a timer,
	// and each timer wakes the process once more, long after the write.
	writing    atomic.Int64
	lastPing   atomic.Int64
	lastHeard  atomic.Int64 // unix nanoseconds of the last data frame read
	unanswered atomic.Int32 // pings
	slow       atomic.Bool  // it took nothing for WriteTimeout

	meter lobby.Meter
	empty int // bytes read since the last that had something in them

	out outbox.Box
}

// How long a connection stays open behind our Close frame.
const (
	closeLinger = time.Second
	drainLinger = 300 * time.Millisecond // Ctrl-C shall not take a second
)

// closeCodes are the WebSocket close codes of our own reasons.
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

// refusals are the close reasons of what Accept refuses.
var refusals = map[devices.Code]devices.CloseReason{
	devices.CodeUnavailable:  devices.CloseDraining,
	devices.CodeUnauthorized: devices.CloseRevoked,
	devices.CodeForbidden:    devices.CloseContested,
	devices.CodeDeviceBusy:   devices.CloseCrowded,
	devices.CodeSuperseded:   devices.CloseSuperseded,
}

// run opens the session on the goroutine that the upgrade started, and leaves
// the rest of the connection's life to a fresh one: opening needs a stack of
// 8 KB, which a goroutine parked in a read would keep for ever.
func (c *conn) run(who devices.Identity, begun time.Time) {
	defer tasks.Contain(c.front.opt.Log, c.fault)
	c.lastSent.Store(begun.UnixNano())
	// Devices that connect together shall not be pinged together for ever.
	c.lastPing.Store(begun.Add(-rand.N(PingEvery / 2)).UnixNano())
	session, reason := c.open(who, begun)
	if session != nil {
		go c.serve(session)
		return
	}
	if c.session.Load() == nil { // a session counts its own end
		c.Close(reason)
		if reason != devices.CloseSuperseded { // so does one that was overtaken at once
			c.front.opt.Service.Stats().Closed.Add(reason, 1)
		}
	}
	c.end()
}

// fault ends what a fault of ours has left behind.
func (c *conn) fault() {
	if session := c.session.Load(); session != nil {
		session.Close(devices.CloseInternal)
	}
	c.end()
}

// end gives up the place that Front.conns took.
func (c *conn) end() {
	_ = c.ws.Close() // the peer may have closed it
	c.front.conns.Remove(c)
}

// open waits for the hello and answers it, once, from local state.
func (c *conn) open(who devices.Identity, begun time.Time) (*session.Session, devices.CloseReason) {
	log := c.front.opt.Log
	c.ws.SetReadLimit(HelloLimit)
	_ = c.ws.SetReadDeadline(time.Now().Add(HelloTimeout)) // an error shows at the read
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
	lobby.Vouch(c.ws.NetConn()) // without credentials it has proven itself only now
	reply, err := session.OpenAudio(h, hello.TransportWebSocket, func(*speech.Conversation) (speech.AudioPath, error) {
		return (*audioPath)(c), nil
	})
	answer, appendErr := reply.Append(nil)
	if err = errors.Join(err, appendErr); err != nil { // only a fault of ours can make an unusable hello
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
	c.out.IfOpen(func() { // whoever closed has set a deadline that must stay
		_ = c.ws.SetReadDeadline(time.Time{}) // pings find the dead from here on
	})
	c.ws.SetPongHandler(c.pong)
	session.BeginConversation()
	session.StartMCP(devices.FeaturesOf(h.MCP))
	return session, ""
}

func (c *conn) pong(string) error {
	c.unanswered.Store(0)
	c.empty = 0
	return c.note(lobby.CostControl)
}

// serve feeds the session until the connection ends. Its frame stays small
// for the same reason: it is there, parked, for every idle device.
func (c *conn) serve(session *session.Session) {
	defer tasks.Contain(c.front.opt.Log, c.fault)
	bad := 0
	for {
		kind, r, err := c.ws.NextReader()
		if err == nil {
			err = c.handle(session, kind, r, &bad)
		}
		if err != nil {
			c.finish(session, err)
			return
		}
	}
}

// finish ends the session for the reason that the error of its reader tells.
func (c *conn) finish(session *session.Session, err error) {
	closed := (*websocket.CloseError)(nil)
	switch {
	case c.slow.Load():
		session.Close(devices.CloseSlow)
	case errors.Is(err, lobby.ErrFlood):
		c.flooded()
	case errors.Is(err, websocket.ErrReadLimit):
		session.Close(devices.CloseTooLarge)
	case errors.As(err, &closed), errors.Is(err, io.EOF), isNetwork(err):
		session.Close(devices.CloseGone)
	default:
		session.Close(devices.CloseProtocol)
	}
	c.end()
}

var errTooBad = fmt.Errorf("%d unusable messages on one connection", MaxBad)

// handle passes one message on. An error ends the connection; an unusable
// message does not, until there have been MaxBad.
//
//go:noinline
func (c *conn) handle(session *session.Session, kind int, r io.Reader, bad *int) error {
	buf, err := c.readAll(r)
	if err != nil {
		return err
	}
	c.unanswered.Store(0)
	c.lastHeard.Store(time.Now().UnixNano())
	cost := float32(0)
	if kind == websocket.TextMessage {
		asked := session.Answered()
		if err = session.HandleControl(*buf); session.Answered() == asked {
			cost = lobby.CostMessage
		}
	} else {
		cost = lobby.CostAudio
		var frame envelope.Frame
		if frame, err = c.framing.ParseFrame(*buf); err == nil {
			session.HandleAudio(frame)
		}
	}
	putBuffer(buf)
	releaseInput(c.ws.NetConn())
	if flood := c.note(cost); flood != nil {
		return flood
	}
	if err == nil {
		return nil
	}
	if *bad++; *bad == 1 || *bad == MaxBad {
		c.front.opt.Log.Debug("unusable message", "session", session.ID(), "count", *bad, "error", err)
	}
	if *bad >= MaxBad {
		return errTooBad
	}
	return nil
}

func isNetwork(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, net.ErrClosed)
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 1024); return &b }}

// putBuffer keeps no buffer that one large message has grown.
func putBuffer(b *[]byte) {
	if cap(*b) <= 64<<10 {
		buffers.Put(b)
	}
}

// readAll reads a message into a pooled buffer, which is the caller's to put
// back. It is taken only when bytes have come: an idle connection holds none.
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
			c.empty = 0
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

// SendControl writes msg on the caller's goroutine if nobody else is writing,
// else queues it. See fleet.Conn.
func (c *conn) SendControl(msg []byte) error { return c.send(websocket.TextMessage, msg) }

// audioPath is the connection as its conversation sees it.
type audioPath conn

// SendAudio frames one packet as the device was told. See speech.AudioPath.
func (p *audioPath) SendAudio(f envelope.Frame) error {
	c := (*conn)(p)
	buf := buffers.Get().(*[]byte)
	defer putBuffer(buf)
	msg, err := c.framing.AppendFrame((*buf)[:0], f)
	*buf = msg
	if err != nil {
		return err
	}
	return c.send(websocket.BinaryMessage, msg)
}

// Close does nothing: the connection goes on, or ends with its session.
func (p *audioPath) Close() {}

// send maps a full outbox to what the core knows.
func (c *conn) send(kind int, msg []byte) error {
	err := c.out.Send(c, kind, msg, QueueLimit)
	if errors.Is(err, outbox.ErrFull) {
		return devices.ErrOverloaded
	}
	return err
}

// Go implements outbox.Writer.
func (c *conn) Go(task func()) { c.front.conns.Go(task) }

// Write implements outbox.Writer: one message in one frame, since fragments
// deafen firmware up to v2.1.0.
func (c *conn) Write(kind int, msg []byte) error {
	now := time.Now()
	c.writing.Store(now.UnixNano())
	err := c.ws.WriteMessage(kind, msg)
	c.writing.Store(0)
	if err != nil {
		c.slow.Store(errors.Is(err, os.ErrDeadlineExceeded))
		c.expire() // wakes the reader, which closes the connection
		return err
	}
	c.lastSent.Store(now.UnixNano())
	return nil
}

// expire ends what the connection's goroutines wait for: also the reader's own write,
// which the sweeper does not end any more once the front end closes.
func (c *conn) expire() { _ = c.ws.NetConn().SetDeadline(time.Now()) }

// Close ends the connection. A reason of ours is told in a Close frame; the
// firmware neither answers that nor closes TCP (web_socket.cc:383-388), so the
// reader waits for it a short while at most.
func (c *conn) Close(reason devices.CloseReason) {
	if !c.out.Close() {
		return
	}
	code, ours := closeCodes[reason]
	if !ours {
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
	_ = c.ws.SetReadDeadline(time.Now().Add(linger)) // an error shows at the read
}

var noop = []byte(`{"type":"noop"}`)

// sweep does what is due on this connection.
func (c *conn) sweep(now time.Time) {
	if begun := c.writing.Load(); begun != 0 && now.UnixNano()-begun > int64(WriteTimeout) {
		_ = c.ws.NetConn().SetWriteDeadline(now) // an error shows at the write
	}
	session := c.session.Load()
	if session == nil {
		return // the hello's deadline is running
	}
	if now.Sub(time.Unix(0, c.lastPing.Load())) >= PingEvery {
		c.lastPing.Store(now.UnixNano())
		if c.unanswered.Add(1) > MaxUnanswered {
			c.front.conns.Go(func() { session.Close(devices.CloseDead) })
			return
		}
		c.front.conns.Go(func() { // who never takes it ends as dead, and the ping with the connection
			_ = c.ws.WriteControl(websocket.PingMessage, nil, time.Time{})
		})
	}
	idle := now.Sub(time.Unix(0, c.lastSent.Load()))
	talks := now.Sub(time.Unix(0, c.lastHeard.Load())) < KeepAfter
	switch {
	case c.front.opt.CloseIdle && !talks && idle >= IdleAfter:
		c.front.conns.Go(func() { session.Close(devices.CloseIdle) })
	case (talks || !c.front.opt.CloseIdle) && idle >= KeepAfter:
		c.front.conns.Go(func() {
			if errors.Is(c.SendControl(noop), devices.ErrOverloaded) {
				session.Close(devices.CloseSlow)
			}
		})
	}
}
