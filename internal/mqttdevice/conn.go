package mqttdevice

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/devices"
	"fleetd/internal/lobby"
	"fleetd/internal/outbox"
	"fleetd/internal/tasks"
)

// conn is one device's connection. It is the fleet.Conn of its session.
type conn struct {
	link
	front *Front
	net   net.Conn
	level byte          // of the protocol, 3 or 4
	keep  time.Duration // the device must be heard within this; 0 is for ever
	slow  atomic.Bool   // it took nothing for WriteTimeout
	heard atomic.Int64  // unix nanoseconds of the last bytes received
	// writing is since when a write has been running, in unix nanoseconds; 0: none is.
	// The sweeper ends one that takes too long: a deadline for each would be a timer,
	// and each timer wakes the process once more, long after the write.
	writing atomic.Int64
	topic   string // down

	lastID uint16 // of the last QoS 1 message

	// in is what was read and not used yet: in[start:end]. It is all an idle
	// connection holds; longer packets are read past it.
	start, end int
	in         [readSize]byte

	out outbox.Box
}

const readSize = 256

var errTooBad = fmt.Errorf("%d unusable messages on one connection", MaxBad)

// run lets the device in on the goroutine that the listener started, and
// leaves the rest of the connection's life to a fresh one, whose stack has not
// grown yet.
func (c *conn) run() {
	defer tasks.Contain(c.front.opt.Log, c.fault)
	begun := time.Now()
	c.heard.Store(begun.UnixNano())
	reason := c.enter(begun)
	if reason == "" {
		go c.serve()
		return
	}
	if c.session.Load() == nil && reason != devices.CloseSuperseded { // a session counts its own end
		c.front.opt.Service.Stats().Closed.Add(reason, 1)
	}
	c.leave()
}

// fault ends what a fault of ours has left behind.
func (c *conn) fault() {
	if session := c.session.Load(); session != nil {
		session.Close(devices.CloseInternal)
	}
	c.leave()
}

// enter is open, behind which the connection is no unknown any more.
func (c *conn) enter(begun time.Time) devices.CloseReason {
	defer c.front.unknown.Add(-1)
	return c.open(begun)
}

// leave gives up the place that Front.conns took.
func (c *conn) leave() {
	_ = c.net.Close() // the peer may have closed it
	c.front.conns.Remove(c)
}

// open waits for CONNECT, checks it, and answers; the session is there when it
// returns "".
func (c *conn) open(begun time.Time) devices.CloseReason {
	log, remote := c.front.opt.Log, c.net.RemoteAddr().String()
	_ = c.net.SetReadDeadline(begun.Add(ConnectTimeout)) // an error shows at the read
	place := c.front.silent.Add(c.net)
	p, err := c.readConnect()
	c.front.silent.Remove(place)
	if err != nil {
		log.Debug("no usable CONNECT", "remote", remote, "error", err)
		c.front.count("no_connect")
		if errors.Is(err, errTooLarge) {
			return devices.CloseTooLarge
		}
		return devices.CloseProtocol
	}
	who, code, err := c.front.identify(p, remote)
	if err != nil {
		if code == packets.ErrRefusedBadUsernameOrPassword && c.tooMany() {
			code, err = packets.ErrRefusedNotAuthorised, errTooMany
		}
		return c.refuse(p.ClientIdentifier, refusal{code, closeReasons[code]}, err)
	}
	lobby.Vouch(c.net)
	if c.front.opt.Floods.Barred(string(who.Device), begun) > 0 {
		return c.refuse(p.ClientIdentifier, refusal{packets.ErrRefusedServerUnavailable, devices.CloseFlooding}, errFlooded)
	}
	if err := c.front.room.Enter(c.front.ctx); err != nil {
		return c.refuse(p.ClientIdentifier, refusal{packets.ErrRefusedServerUnavailable, devices.CloseCrowded}, err)
	}
	c.level, c.topic = p.ProtocolVersion, devices.TopicDown(who.Device)
	c.keep = time.Duration(p.Keepalive) * time.Second * 3 / 2
	c.link.prepare(c.front.voice, who.Device, remote)
	c.out.Hold() // nothing overtakes CONNACK
	session, err := c.front.opt.Service.Accept(who, c)
	if err != nil {
		r, known := refusals[devices.AsError(err).Code]
		if !known {
			r = refusal{packets.ErrRefusedServerUnavailable, devices.CloseInternal}
		}
		return c.refuse(p.ClientIdentifier, r, err)
	}
	c.session.Store(session)
	if err := c.Write(0, connack(packets.Accepted)); err != nil {
		session.Close(devices.CloseGone)
		return devices.CloseGone
	}
	c.front.count("0")
	c.out.Flush(c)
	c.out.IfOpen(func() { _ = c.net.SetReadDeadline(time.Time{}) }) // keepalive finds the dead from here on
	c.front.connectTime.Observe(time.Since(begun))
	session.StartMCP(devices.FeaturesUnknown)
	return ""
}

var errFlooded = errors.New("the device was closed for sending too much, and is back too soon")

var errTooMany = errors.New("too many wrong passwords from this address; try again later")

// tooMany notes a wrong password, and waits with the answer to the one that is
// too many.
func (c *conn) tooMany() bool {
	peer, err := netip.ParseAddrPort(c.net.RemoteAddr().String())
	return err == nil && c.front.opt.Failures.Failed(c.front.ctx, peer.Addr())
}

// refuse answers CONNECT with a code and its reason in the log.
func (c *conn) refuse(clientID string, r refusal, err error) devices.CloseReason {
	c.front.count(fmt.Sprint(r.code))
	c.front.opt.Log.Debug("device refused", "remote", c.net.RemoteAddr(), "client_id", fmt.Sprintf("%.80q", clientID), "connack", r.code, "error", err)
	_ = c.net.SetWriteDeadline(time.Now().Add(WriteTimeout)) // the connection ends whether it is written or not
	_, _ = c.net.Write(connack(r.code))
	return r.reason
}

// refusal is how a connection is refused, and what that counts as.
type refusal struct {
	code   byte
	reason devices.CloseReason
}

// closeReasons are what refused credentials count as.
var closeReasons = map[byte]devices.CloseReason{
	packets.ErrRefusedBadProtocolVersion:    devices.CloseProtocol,
	packets.ErrRefusedIDRejected:            devices.CloseProtocol,
	packets.ErrRefusedServerUnavailable:     devices.CloseInternal,
	packets.ErrRefusedBadUsernameOrPassword: devices.CloseRevoked,
	packets.ErrRefusedNotAuthorised:         devices.CloseRevoked,
}

// refusals are what Accept refuses.
var refusals = map[devices.Code]refusal{
	devices.CodeUnavailable:  {packets.ErrRefusedServerUnavailable, devices.CloseDraining},
	devices.CodeUnauthorized: {packets.ErrRefusedNotAuthorised, devices.CloseRevoked},
	devices.CodeForbidden:    {packets.ErrRefusedNotAuthorised, devices.CloseContested},
	devices.CodeDeviceBusy:   {packets.ErrRefusedServerUnavailable, devices.CloseCrowded},
	devices.CodeSuperseded:   {packets.ErrRefusedServerUnavailable, devices.CloseSuperseded},
}

// readConnect reads the first packet, which must be CONNECT.
func (c *conn) readConnect() (*packets.ConnectPacket, error) {
	h, err := c.header(ConnectLimit)
	if err != nil {
		return nil, err
	}
	if h.kind() != packets.Connect {
		return nil, errors.New("the first packet must be CONNECT")
	}
	body, buf, err := c.body(h)
	if err != nil {
		return nil, err
	}
	defer putBuffer(buf)
	return parseConnect(h, body)
}

// fill waits for bytes; only they keep the connection alive.
func (c *conn) fill() error {
	if c.start == c.end {
		c.start, c.end = 0, 0
	} else if c.end == len(c.in) {
		c.end = copy(c.in[:], c.in[c.start:c.end])
		c.start = 0
	}
	n, err := c.net.Read(c.in[c.end:])
	c.end += n
	if n > 0 {
		c.heard.Store(time.Now().UnixNano())
		return nil
	}
	if err == nil {
		return io.ErrNoProgress
	}
	return err
}

// header waits for a fixed header.
func (c *conn) header(limit int) (header, error) {
	for {
		h, ok, err := parseHeader(c.in[c.start:c.end], limit)
		if err != nil {
			return h, err
		}
		if ok {
			c.start += h.size
			return h, nil
		}
		if err := c.fill(); err != nil {
			return h, err
		}
	}
}

// body returns the packet's body. It lies in the read buffer, or, if it does
// not fit, in buf, which is the caller's to put back; buf grows with what
// arrives and not with what was announced.
func (c *conn) body(h header) (body []byte, buf *[]byte, err error) {
	have := c.end - c.start
	if h.length <= have {
		body = c.in[c.start : c.start+h.length]
		c.start += h.length
		return body, nil, nil
	}
	open := c.session.Load() != nil // else CONNECT's own deadline counts
	if open {
		_ = c.net.SetReadDeadline(time.Now().Add(PacketTimeout)) // an error shows at the read
	}
	buf = buffers.Get().(*[]byte)
	b := append((*buf)[:0], c.in[c.start:c.end]...)
	c.start, c.end = 0, 0
	for len(b) < h.length {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, readErr := c.net.Read(b[len(b):min(cap(b), h.length)])
		b = b[:len(b)+n]
		if *buf = b; n == 0 && readErr != nil {
			putBuffer(buf)
			return nil, nil, readErr
		}
		c.heard.Store(time.Now().UnixNano())
	}
	if open {
		c.out.IfOpen(func() { _ = c.net.SetReadDeadline(time.Time{}) })
	}
	return b, buf, nil
}

// serve feeds the session until the connection ends. After each packet it
// leaves the wait for the next one to a fresh goroutine: a stack that has grown
// to handle a packet stays grown, a fresh one of 2 KB is enough to wait, and
// waiting is what an idle device's does for ever. So the frames from here to
// the read must stay small. A PINGREQ, which is all that an idle device sends, grows
// no stack, and a fresh goroutine for each would wake another thread.
func (c *conn) serve() {
	defer tasks.Contain(c.front.opt.Log, c.fault)
	for {
		h, err := c.header(PacketLimit)
		switch {
		case err != nil:
		case h.kind() == packets.Pingreq && h.length == 0:
			if err = c.note(lobby.CostControl); err == nil {
				err = c.answer(pingresp)
			}
			if err == nil {
				continue
			}
		default:
			asked := c.session.Load().Answered()
			if err = c.take(h); err == nil && c.session.Load().Answered() == asked {
				err = c.note(lobby.CostMessage)
			}
		}
		if err != nil {
			c.finish(err)
			return
		}
		if c.start == c.end { // nothing waits to be handled here
			go c.serve() // owned as before: leave is still to come
			return
		}
	}
}

// note counts what was not asked for, and waits while the device sends too much.
//
//go:noinline
func (c *conn) note(cost float32) error {
	pause, err := c.meter.Note(c.front.opt.Floods, cost, time.Now())
	if pause > 0 {
		time.Sleep(pause) // the device's own bytes wait, in its own buffers
	}
	return err
}

// finish ends the session for the reason that the error of its reader tells.
func (c *conn) finish(err error) {
	session := c.session.Load()
	var network net.Error
	switch {
	case c.slow.Load():
		session.Close(devices.CloseSlow)
	case errors.Is(err, lobby.ErrFlood):
		c.front.opt.Floods.Bar(string(c.device), time.Now())
		session.Close(devices.CloseFlooding)
	case errors.Is(err, errTooLarge):
		session.Close(devices.CloseTooLarge)
	case errors.Is(err, os.ErrDeadlineExceeded): // half a packet, and then silence
		session.Close(devices.CloseDead)
	case errors.Is(err, io.EOF), errors.As(err, &network), errors.Is(err, net.ErrClosed), errors.Is(err, errDisconnect):
		session.Close(devices.CloseGone)
	default:
		c.front.opt.Log.Debug("device broke the protocol", "session", session.ID(), "error", err)
		session.Close(devices.CloseProtocol)
	}
	c.leave()
}

var errDisconnect = errors.New("DISCONNECT")

// take does what one packet asks for. An error ends the connection.
//
//go:noinline
func (c *conn) take(h header) error {
	body, buf, err := c.body(h)
	if err != nil {
		return err
	}
	if buf != nil {
		defer putBuffer(buf)
	}
	if h.kind() == packets.Publish {
		return c.published(h, body)
	}
	p, err := decode(h, body)
	if err != nil {
		return err
	}
	switch p := p.(type) {
	case *packets.SubscribePacket:
		if len(p.Topics) == 0 || len(p.Topics) > maxTopics {
			return fmt.Errorf("SUBSCRIBE with %d topics; 1 to %d are taken", len(p.Topics), maxTopics)
		}
		return c.answer(suback(p, c.topic, c.level))
	case *packets.UnsubscribePacket:
		return c.answer(acknowledge(packets.Unsuback, p.MessageID))
	case *packets.PubackPacket:
		return nil // of nothing we sent: our QoS is 0
	case *packets.DisconnectPacket:
		return errDisconnect
	}
	return errors.New("a second CONNECT")
}

// published passes a message of the device on, if its topic is one it may
// publish to.
func (c *conn) published(h header, body []byte) error {
	p, err := parsePublish(h, body)
	if err != nil {
		return err
	}
	if p.qos > 1 {
		return errors.New("QoS 2 is not offered")
	}
	if err := checkTopic(p.topic); err != nil {
		return err
	}
	repeated := p.qos == 1 && p.dup && p.id == c.lastID
	switch {
	case repeated: // acknowledged again, below
	case !c.mayPublish(p.topic):
		c.front.stats.ForeignTopics.Add(1)
		err = c.unusable(fmt.Errorf("message for topic %.80q, which is not this device's", p.topic))
	default:
		err = c.receive(p.payload)
	}
	if err != nil {
		return err
	}
	if p.qos == 1 {
		c.lastID = p.id
		return c.answer(acknowledge(packets.Puback, p.id))
	}
	return nil
}

// mayPublish allows the device's own topic, and that of xiaozhi-mqtt-gateway,
// whose devices keep it until their next boot.
func (c *conn) mayPublish(topic []byte) bool {
	return string(topic) == gatewayTopic || isTopicUp(topic, c.device)
}

// answer writes a packet of the protocol's own.
func (c *conn) answer(packet []byte) error {
	err := c.out.Send(c, 0, packet, QueueLimit)
	if errors.Is(err, outbox.ErrFull) {
		c.session.Load().Close(devices.CloseSlow)
	}
	return err
}

// SendControl publishes msg to the device. See fleet.Conn.
func (c *conn) SendControl(msg []byte) error {
	buf := buffers.Get().(*[]byte)
	defer putBuffer(buf)
	*buf = appendPublish((*buf)[:0], c.topic, msg)
	err := c.out.Send(c, 0, *buf, QueueLimit)
	if errors.Is(err, outbox.ErrFull) {
		return devices.ErrOverloaded
	}
	return err
}

// Write implements outbox.Writer.
func (c *conn) Write(_ int, packet []byte) error {
	c.writing.Store(time.Now().UnixNano())
	_, err := c.net.Write(packet)
	c.writing.Store(0)
	if err != nil {
		c.slow.Store(errors.Is(err, os.ErrDeadlineExceeded))
		_ = c.net.Close() // the device may have got half a packet; wakes the reader, which ends the session
	}
	return err
}

// Go implements outbox.Writer.
func (c *conn) Go(task func()) { c.front.conns.Go(task) }

// Close ends the connection; MQTT 3.1.1 has no way to say why.
func (c *conn) Close(devices.CloseReason) {
	if c.out.Close() {
		_ = c.net.Close() // unblocks the reader
	}
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 1024); return &b }}

// putBuffer keeps no buffer that one large message has grown.
func putBuffer(b *[]byte) {
	if b != nil && cap(*b) <= 64<<10 {
		buffers.Put(b)
	}
}
