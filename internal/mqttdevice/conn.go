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

	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
	"fleetd/internal/tasks"
	"fleetd/internal/writequeue"
)

// conn is one device's connection. It is the fleet.Conn of its session.
type conn struct {
	link
	front        *Front
	net          net.Conn
	keep         time.Duration // longest time without bytes from the device; 0: no limit
	lastReceived atomic.Int64  // the last bytes received, as clock.Reading
	// writing is the start of the write in progress as clock.Reading; 0: none. The
	// sweeper ends a write that takes too long: a deadline for each write would be a
	// timer, and each timer wakes the process once more, long after the write.
	writing atomic.Int64

	// Small ones together: there is a conn for every device, and it takes 384 bytes.
	level  byte        // of the protocol, 3 or 4
	lastID uint16      // of the last QoS 1 message
	slow   atomic.Bool // a write took longer than WriteTimeout

	// in[start:end] was read and not used yet. It is the only buffer of an idle
	// connection; longer packets are read into others.
	start, end int32
	in         [readSize]byte

	out writequeue.Queue
}

// readSize is enough for the answer to a usual call.
const readSize = 192

var errTooManyUnusable = fmt.Errorf("%d unusable messages on one connection", MaxBad)

// run admits the device on the goroutine that the listener started. A new goroutine
// serves the rest of the connection, because its stack has not grown yet. silent is its entry among
// the connections without a CONNECT.
func (c *conn) run(silent *connlimit.SilentEntry) {
	defer tasks.Contain(c.front.opt.Log, c.onPanic)
	begun := time.Now()
	c.lastReceived.Store(clock.Reading(begun))
	if c.enter(begun, silent) == "" {
		go c.serve()
		return
	}
	c.remove() // a refused CONNECT counts by its code, and is no disconnect
}

// onPanic closes the connection after an internal error (bug).
func (c *conn) onPanic() {
	if session := c.session.Load(); session != nil {
		session.Close(devices.CloseInternal)
	}
	c.remove()
}

// enter calls open, after which the connection no longer counts as unknown.
func (c *conn) enter(begun time.Time, silent *connlimit.SilentEntry) devices.CloseReason {
	defer c.front.unknown.Add(-1)
	return c.open(begun, silent)
}

// remove removes the connection from Front.conns.
func (c *conn) remove() {
	_ = c.net.Close() // the peer may have closed it
	c.front.conns.Remove(c)
}

// open waits for CONNECT, checks it and answers. If it returns "", the session is open.
func (c *conn) open(begun time.Time, silent *connlimit.SilentEntry) devices.CloseReason {
	log, remote := c.front.opt.Log, c.net.RemoteAddr().String()
	_ = c.net.SetReadDeadline(begun.Add(ConnectTimeout)) // an error shows in the read
	p, err := c.readConnect()
	c.front.silent.Remove(silent)
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
		c.noteLogin(who, code, string(p.Password))
		if code == packets.ErrRefusedBadUsernameOrPassword && c.tooManyFailures() {
			code, err = packets.ErrRefusedNotAuthorised, errTooManyFailures
		}
		return c.refuse(p.ClientIdentifier, refusal{code, closeReasons[code]}, err)
	}
	connlimit.MarkAuthenticated(c.net)
	if c.front.opt.Floods.Blocked(string(who.Device), begun) > 0 {
		c.noteRefusal(who, devices.StepCause(devices.CloseFlooding))
		return c.refuse(p.ClientIdentifier, refusal{packets.ErrRefusedServerUnavailable, devices.CloseFlooding}, errBlocked)
	}
	if err := c.front.admission.Enter(c.front.ctx); err != nil {
		c.noteRefusal(who, devices.StepCause(devices.CloseCrowded))
		return c.refuse(p.ClientIdentifier, refusal{packets.ErrRefusedServerUnavailable, devices.CloseCrowded}, err)
	}
	c.voice, c.device, c.level = c.front.voice, who.Device, p.ProtocolVersion
	c.keep = time.Duration(p.Keepalive) * time.Second * 3 / 2
	c.out.Hold() // CONNACK must be the first packet
	session, err := c.front.opt.Service.Accept(who, c)
	if err != nil {
		r, known := refusals[devices.AsError(err).Code]
		if !known {
			r = refusal{packets.ErrRefusedServerUnavailable, devices.CloseInternal}
		}
		c.noteRefusal(who, devices.StepCause(r.reason))
		return c.refuse(p.ClientIdentifier, r, err)
	}
	c.session.Store(session)
	if err := c.Write(0, connack(packets.Accepted)); err != nil {
		session.Close(devices.CloseGone)
		return devices.CloseGone
	}
	c.front.count("0")
	c.out.Flush(c)
	c.out.IfOpen(func() { _ = c.net.SetReadDeadline(time.Time{}) }) // from now on the keepalive detects dead connections
	c.front.connectTime.Observe(time.Since(begun))
	session.StartMCP(devices.FeaturesUnknown)
	return ""
}

// noteLogin records why a login was refused.
func (c *conn) noteLogin(who devices.Identity, code byte, password string) {
	cause := devices.StepCause(closeReasons[code])
	if code == packets.ErrRefusedBadUsernameOrPassword && who.Device != "" {
		cause = c.front.opt.Service.LoginCause(who.Device, func(g int64) bool { return c.front.opt.Mint.IsDevice(password, string(who.Device), who.ClientID, g) })
	}
	c.noteRefusal(who, cause)
}

func (c *conn) noteRefusal(who devices.Identity, cause devices.StepCause) {
	c.front.opt.Service.NoteStep(devices.Step{Kind: devices.StepRefused, Device: who.Device, Cause: cause, Proven: who.Verified, Remote: fleet.RemoteOf(who.Remote), Transport: devices.TransportMQTT})
}

var errBlocked = errors.New("the device was closed for flooding and reconnected too early")

var errTooManyFailures = errors.New("too many wrong passwords from this address; try again later")

// tooManyFailures notes a wrong password, and waits with the answer to the one that is
// tooManyFailures counts a wrong password, and delays the answer above the limit.
func (c *conn) tooManyFailures() bool {
	peer, err := netip.ParseAddrPort(c.net.RemoteAddr().String())
	return err == nil && c.front.opt.Failures.Failed(c.front.ctx, peer.Addr())
}

// refuse answers CONNECT with a code and logs the error.
func (c *conn) refuse(clientID string, r refusal, err error) devices.CloseReason {
	c.front.count(fmt.Sprint(r.code))
	c.front.opt.Log.Debug("device refused", "remote", c.net.RemoteAddr(), "name", fmt.Sprintf("%.80q", credential.LoginName(clientID)), "connack", r.code, "error", err)
	_ = c.net.SetWriteDeadline(time.Now().Add(WriteTimeout)) // the connection ends even if this fails
	_, _ = c.net.Write(connack(r.code))
	return r.reason
}

// refusal is a CONNACK code and the close reason that it counts as.
type refusal struct {
	code   byte
	reason devices.CloseReason
}

// closeReasons maps the codes of refused credentials to close reasons.
var closeReasons = map[byte]devices.CloseReason{
	packets.ErrRefusedBadProtocolVersion:    devices.CloseProtocol,
	packets.ErrRefusedIDRejected:            devices.CloseProtocol,
	packets.ErrRefusedServerUnavailable:     devices.CloseInternal,
	packets.ErrRefusedBadUsernameOrPassword: devices.CloseRevoked,
	packets.ErrRefusedNotAuthorised:         devices.CloseRevoked,
}

// refusals maps the errors of Service.Accept.
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

// fill reads bytes; only they keep the connection alive.
func (c *conn) fill() error {
	if c.start == c.end {
		c.start, c.end = 0, 0
	} else if int(c.end) == len(c.in) {
		c.end = int32(copy(c.in[:], c.in[c.start:c.end]))
		c.start = 0
	}
	n, err := c.net.Read(c.in[c.end:])
	c.end += int32(n)
	if n > 0 {
		c.lastReceived.Store(clock.Reading(time.Now()))
		return nil
	}
	if err == nil {
		return io.ErrNoProgress
	}
	return err
}

// header reads a fixed header.
func (c *conn) header(limit int) (header, error) {
	for {
		h, ok, err := parseHeader(c.in[c.start:c.end], limit)
		if err != nil {
			return h, err
		}
		if ok {
			c.start += int32(h.size)
			return h, nil
		}
		if err := c.fill(); err != nil {
			return h, err
		}
	}
}

// body returns the body of a packet. It is in the read buffer, or, if it does not fit,
// in buf, which the caller must put back. buf grows with the received bytes, not with
// the announced length.
func (c *conn) body(h header) (body []byte, buf *[]byte, err error) {
	have := int(c.end - c.start)
	if h.length <= have {
		body = c.in[c.start : int(c.start)+h.length]
		c.start += int32(h.length)
		return body, nil, nil
	}
	open := c.session.Load() != nil // before, the deadline of CONNECT applies
	if open {
		_ = c.net.SetReadDeadline(time.Now().Add(PacketTimeout)) // an error shows in the read
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
		c.lastReceived.Store(clock.Reading(time.Now()))
	}
	if open {
		c.out.IfOpen(func() { _ = c.net.SetReadDeadline(time.Time{}) })
	}
	return b, buf, nil
}

// serve handles packets until the connection ends. After each packet except PINGREQ it
// continues on a new goroutine: a stack that has grown to handle a packet stays grown,
// and 2 KB are enough to wait, which is what an idle connection does. The frames from
// here to the read must therefore stay small. A PINGREQ, the only packet of an idle
// device, does not grow the stack, and a new goroutine would wake another thread.
func (c *conn) serve() {
	defer tasks.Contain(c.front.opt.Log, c.onPanic)
	for {
		h, err := c.header(PacketLimit)
		switch {
		case err != nil:
		case h.kind() == packets.Pingreq && h.length == 0:
			if err = c.meter.Spend(c.front.opt.Floods, connlimit.CostControl); err == nil {
				err = c.answer(pingresp)
			}
			if err == nil {
				continue
			}
		default:
			asked := c.session.Load().AnswerCount()
			if err = c.handle(h); err == nil && c.session.Load().AnswerCount() == asked {
				err = c.meter.Spend(c.front.opt.Floods, connlimit.CostMessage)
			}
		}
		if err != nil {
			c.finish(err)
			return
		}
		if c.start == c.end { // no complete packet is buffered
			go c.serve() // as before, remove is still to be called
			return
		}
	}
}

// finish closes the session with the reason that the read error indicates.
func (c *conn) finish(err error) {
	session := c.session.Load()
	var network net.Error
	switch {
	case c.slow.Load():
		session.Close(devices.CloseSlow)
	case errors.Is(err, connlimit.ErrFlood):
		c.front.opt.Floods.Block(string(c.device), time.Now())
		session.Close(devices.CloseFlooding)
	case errors.Is(err, errTooLarge):
		session.Close(devices.CloseTooLarge)
	case errors.Is(err, os.ErrDeadlineExceeded): // silence after a part of a packet
		session.Close(devices.CloseDead)
	case errors.Is(err, io.EOF), errors.As(err, &network), errors.Is(err, net.ErrClosed), errors.Is(err, errDisconnect):
		session.Close(devices.CloseGone)
	default:
		c.front.opt.Log.Debug("device broke the protocol", "session", session.ID(), "error", err)
		session.Close(devices.CloseProtocol)
	}
	c.remove()
}

var errDisconnect = errors.New("DISCONNECT")

// handle handles one packet. An error ends the connection.
//
//go:noinline
func (c *conn) handle(h header) error {
	body, buf, err := c.body(h)
	if err != nil {
		return err
	}
	if buf != nil {
		defer putBuffer(buf)
	}
	if h.kind() == packets.Publish {
		return c.handlePublish(h, body)
	}
	p, err := decode(h, body)
	if err != nil {
		return err
	}
	switch p := p.(type) {
	case *packets.SubscribePacket:
		if len(p.Topics) == 0 || len(p.Topics) > maxTopics {
			return fmt.Errorf("SUBSCRIBE has %d topics; it must have 1 to %d", len(p.Topics), maxTopics)
		}
		return c.answer(suback(p, devices.TopicDown(c.device), c.level))
	case *packets.UnsubscribePacket:
		return c.answer(acknowledge(packets.Unsuback, p.MessageID))
	case *packets.PubackPacket:
		return nil // unexpected: fleetd publishes with QoS 0
	case *packets.DisconnectPacket:
		return errDisconnect
	}
	return errors.New("a second CONNECT")
}

// handlePublish handles a message of the device, if the device may publish to its topic.
func (c *conn) handlePublish(h header, body []byte) error {
	p, err := parsePublish(h, body)
	if err != nil {
		return err
	}
	if p.qos > 1 {
		return errors.New("QoS 2 is not supported")
	}
	if err := checkTopic(p.topic); err != nil {
		return err
	}
	repeated := p.qos == 1 && p.dup && p.id == c.lastID
	switch {
	case repeated: // acknowledged again, below
	case !c.mayPublish(p.topic):
		c.front.stats.ForeignTopics.Add(1)
		err = c.unusable(fmt.Errorf("the device may not publish to topic %.80q", p.topic))
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

// mayPublish allows the device's own topic and that of xiaozhi-mqtt-gateway, which its
// devices use until they restart.
func (c *conn) mayPublish(topic []byte) bool {
	return string(topic) == gatewayTopic || isTopicUp(topic, c.device)
}

// answer writes a control packet.
func (c *conn) answer(packet []byte) error {
	err := c.out.Send(c, 0, packet, QueueLimit)
	if errors.Is(err, devices.ErrOverloaded) {
		c.session.Load().Close(devices.CloseSlow)
	}
	return err
}

// SendControl publishes msg to the device. See fleet.Conn.
func (c *conn) SendControl(msg []byte) error {
	buf := buffers.Get().(*[]byte)
	defer putBuffer(buf)
	var topic [topicSize]byte
	*buf = appendPublish((*buf)[:0], appendTopic(topic[:0], c.device, topicDown), msg)
	return c.out.Send(c, 0, *buf, QueueLimit)
}

// Write implements writequeue.Writer.
func (c *conn) Write(_ int, packet []byte) error {
	c.writing.Store(clock.Reading(time.Now()))
	_, err := c.net.Write(packet)
	c.writing.Store(0)
	if err != nil {
		c.slow.Store(errors.Is(err, os.ErrDeadlineExceeded))
		_ = c.net.Close() // half a packet may have been sent; the reader ends the session
	}
	return err
}

// Go implements writequeue.Writer.
func (c *conn) Go(task func()) { c.front.conns.Go(task) }

// Close closes the connection; MQTT 3.1.1 has no packet for the reason.
func (c *conn) Close(devices.CloseReason) {
	if c.out.Close() {
		_ = c.net.Close() // unblocks the reader
	}
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 1024); return &b }}

// putBuffer drops buffers that one large message has grown.
func putBuffer(b *[]byte) {
	if b != nil && cap(*b) <= 64<<10 {
		buffers.Put(b)
	}
}
