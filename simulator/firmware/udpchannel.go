package firmware

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	// lossPercent and reorderPercent are the shares of own packets the faults udp-loss and udp-reorder touch.
	lossPercent    = 5
	reorderPercent = 10
)

// udpChannel is the socket of one conversation. It is safe for concurrent use.
type udpChannel struct {
	server string
	port   int

	mu   sync.Mutex
	conn *net.UDPConn // nil when connecting failed, which firmware up to v2.3.0 ignores
	held []byte       // a packet the fault udp-reorder keeps back
	// dead is set by an empty datagram: the network component's receive task has ended, and with it all audio.
	dead   bool
	closed bool
}

// swap replaces the socket and closes the old one, in a channel that is closed already the new one.
func (c *udpChannel) swap(conn *net.UDPConn) {
	c.mu.Lock()
	old := c.conn
	if c.closed {
		old = conn
	} else {
		c.conn = conn
	}
	c.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
}

func (c *udpChannel) close() {
	c.mu.Lock()
	old := c.conn
	c.conn, c.closed = nil, true
	c.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
}

func (c *udpChannel) kill() {
	c.mu.Lock()
	c.dead = true
	c.mu.Unlock()
}

// send writes one datagram and, after it, the one that was kept back. With hold the packet itself is kept back.
func (c *udpChannel) send(packet []byte, hold bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil || c.dead {
		return false
	}
	if hold && c.held == nil {
		c.held = slices.Clone(packet)
		return true
	}
	// What the kernel or the network refuses is lost; nobody on the chip looks at it either.
	_, err := c.conn.Write(packet)
	if c.held != nil {
		_, _ = c.conn.Write(c.held)
		c.held = nil
	}
	return err == nil
}

// openUDPChannel is MqttProtocol::OpenAudioChannel (main/protocols/mqtt_protocol.cc:239-349): hello, answer, socket. It
// sends no goodbye to a session it replaces.
func (d *Device) openUDPChannel(ctx context.Context) error {
	d.mu.Lock()
	m := d.mqtt
	up := m != nil && m.conn != nil
	d.mu.Unlock()
	if m == nil {
		return errSuperseded
	}
	if !up {
		if err := d.connectMQTT(ctx); err != nil {
			return err
		}
	}
	started := time.Now()
	wait := make(chan struct{})
	d.mu.Lock()
	old := m.channel
	m.channel = nil
	d.errored, d.sessionID, d.helloWait = false, "", wait
	d.mu.Unlock()
	if old != nil {
		old.close()
	}
	d.sendHelloUDP()
	if d.faults.has(faultDupHello) {
		d.sendHelloUDP()
	}
	d.mu.Lock()
	failed := d.errored
	d.mu.Unlock()
	if failed {
		return errors.New("hello: the publish failed")
	}
	if !d.awaitHello(ctx, wait) {
		d.mu.Lock()
		d.errored, d.helloWait = true, nil
		d.mu.Unlock()
		return errors.New("hello_timeout: no usable server hello in 10 s")
	}
	d.mu.Lock()
	session := d.sessionID
	c := &udpChannel{server: m.offer.server, port: m.offer.port}
	ssrc := hex.EncodeToString(m.keys.nonce[4:8])
	d.mu.Unlock()
	conn, err := d.fleet.dialer.dialUDP(ctx, d.index, c.server, c.port)
	if err != nil && !d.profile.laxUDP {
		return fmt.Errorf("udp: %w", err)
	}
	c.conn = conn
	d.mu.Lock()
	if d.mqtt != m || d.stopped || ctx.Err() != nil {
		d.mu.Unlock()
		c.close()
		return context.Canceled
	}
	m.channel = c
	d.lastData = time.Now()
	d.stats.conversations++
	d.problem = ""
	d.mu.Unlock()
	d.log("conversation", "session", session, "ssrc", ssrc, "udp", fmt.Sprintf("%s:%d", c.server, c.port))
	d.fleet.hello(time.Since(started))
	if conn != nil {
		d.fleet.spawn(func(context.Context) { d.readUDP(m, c, conn) })
	}
	d.afterOpenUDP(m, c)
	return nil
}

func (d *Device) sendHelloUDP() {
	d.sendText(d.profile.helloUDP())
	d.mu.Lock()
	d.stats.hellos++
	d.mu.Unlock()
}

// onUDPHello is MqttProtocol::ParseServerHello (mqtt_protocol.cc:377-467). Session id and audio parameters are taken
// over before the rest is looked at. Outside the wait it re-keys the running session and leaves the socket alone.
func (d *Device) onUDPHello(root value) {
	transport := root.get("transport")
	if !transport.is(jsonString) {
		if d.profile.laxUDP {
			d.fail(fmt.Errorf("%w: server hello without a string transport is a null dereference before v2.4.0", errCrash))
			return
		}
		d.countMessage("hello (invalid)")
		return
	}
	if string(transport.bytes()) != "udp" {
		d.countMessage("hello (other transport)")
		return
	}
	d.mu.Lock()
	if id := root.get("session_id"); id.is(jsonString) {
		d.sessionID = id.string()
	}
	d.takeAudioParamsLocked(root.get("audio_params"))
	d.mu.Unlock()
	offer, err := readOffer(root.get("udp"), d.profile.laxUDP)
	if errors.Is(err, errCrash) {
		d.fail(err)
		return
	}
	var keys udpKeys
	if err == nil {
		keys, err = newUDPKeys(offer.key, offer.nonce, d.profile.laxUDP)
	}
	if err != nil {
		d.countMessage("hello (invalid)")
		d.note(err.Error())
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mqtt == nil {
		return
	}
	d.mqtt.offer, d.mqtt.keys = offer, keys
	d.stats.mqttLocked().ssrc = hex.EncodeToString(offer.nonce[4:8])
	d.acceptHelloLocked()
}

// onGoodbye is the server's end of a channel. Before v2.3.0 a missing id is taken for the right one.
func (d *Device) onGoodbye(root value) {
	d.countMessage("goodbye")
	id := root.get("session_id")
	if d.profile.laxGoodbye && id.ok() && !id.is(jsonString) {
		d.fail(fmt.Errorf("%w: goodbye with a session_id that is not a string is a null dereference before v2.3.0", errCrash))
		return
	}
	d.mu.Lock()
	obeyed := (id.is(jsonString) && id.string() == d.sessionID) || (d.profile.laxGoodbye && !id.ok())
	if obeyed {
		d.stats.goodbyesObeyed++
	}
	d.mu.Unlock()
	if obeyed {
		d.post(job{kind: jobDo, do: func() { d.closeUDPChannel(d.profile.echoGoodbye) }})
	}
}

// closeUDPChannel is MqttProtocol::CloseAudioChannel: the socket goes, id and key stay. Nothing is sent about a
// channel that has timed out.
func (d *Device) closeUDPChannel(goodbye bool) {
	d.mu.Lock()
	m := d.mqtt
	if m == nil {
		d.mu.Unlock()
		return
	}
	c := m.channel
	m.channel = nil
	goodbye = goodbye && (d.profile.echoGoodbye || (c != nil && time.Since(d.lastData) <= channelTimeout))
	text := `{"session_id":"` + d.sessionID + `","type":"goodbye"}`
	if goodbye {
		d.stats.goodbyesSent++
	}
	d.mu.Unlock()
	if c != nil {
		c.close()
	}
	if goodbye {
		d.sendText(text)
	}
	d.goIdle()
}

// readUDP owns reading one socket until it is closed or an empty datagram ends the receive task.
func (d *Device) readUDP(m *mqttState, c *udpChannel, conn *net.UDPConn) {
	room := getBuffer()
	defer putBuffer(room)
	buf := (*room)[:udpRoom]
	for {
		n, err := conn.Read(buf)
		switch {
		case errors.Is(err, syscall.ECONNREFUSED):
			// lwIP shows the application no ICMP answers.
			continue
		case err != nil:
			return
		case n == 0:
			c.kill()
			d.mu.Lock()
			d.stats.udpLocked().killed++
			d.mu.Unlock()
			d.note("an empty datagram ended the UDP receive task: no audio until the next hello")
			return
		}
		d.onDatagram(m, c, buf[:n])
	}
}

func (d *Device) onDatagram(m *mqttState, c *udpChannel, packet []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mqtt != m || m.channel != c {
		return
	}
	s := d.stats.udpLocked()
	s.received++
	opus, missing, verdict := m.keys.open(packet)
	s.verdicts[verdict]++
	if verdict != Accepted {
		return
	}
	s.missing += uint64(missing)
	d.lastData = time.Now()
	d.takeAudioLocked(opus)
}

// sendUDP encrypts one Opus packet and sends it, if there is a channel.
func (d *Device) sendUDP(opus []byte) {
	room := getBuffer()
	defer putBuffer(room)
	d.mu.Lock()
	m := d.mqtt
	if m == nil || m.channel == nil {
		d.mu.Unlock()
		return
	}
	c := m.channel
	*room = m.keys.seal((*room)[:0], opus, 0)
	s := d.stats.udpLocked()
	lose := d.faults.has(faultUDPLoss) && d.rng.IntN(100) < lossPercent
	hold := d.faults.has(faultUDPReorder) && d.rng.IntN(100) < reorderPercent
	if lose {
		s.lostOnPurpose++
	}
	if hold {
		s.heldBack++
	}
	d.mu.Unlock()
	if lose || !c.send(*room, hold) {
		return
	}
	d.mu.Lock()
	s.sent++
	d.mu.Unlock()
}

// afterOpenUDP starts the faults that belong to an open channel.
func (d *Device) afterOpenUDP(m *mqttState, c *udpChannel) {
	if d.faults.has(faultBadFrame) {
		d.sendBadDatagrams(m, c)
	}
	if d.faults.has(faultFlap) {
		d.mu.Lock()
		conn := m.conn
		d.mu.Unlock()
		if conn != nil {
			d.fleet.after(d.fleet.scaled(d.random(flapPause)), conn.drop)
		}
	}
	if d.faults.has(faultNAT) {
		pause := d.random(func(r *rand.Rand) time.Duration {
			return time.Second + time.Duration(r.Int64N(int64(time.Second)))
		})
		d.fleet.after(d.fleet.scaled(pause), func() { d.rebind(m, c) })
	}
}

// rebind is what a NAT router does when it forgets the device: the same session from another port.
func (d *Device) rebind(m *mqttState, c *udpChannel) {
	conn, err := d.fleet.dialer.dialUDP(d.fleet.ctx, d.index, c.server, c.port)
	if err != nil {
		d.note("fault nat: " + err.Error())
		return
	}
	d.mu.Lock()
	mine := d.mqtt == m && m.channel == c
	if mine {
		d.stats.udpLocked().rebinds++
	}
	d.mu.Unlock()
	if !mine {
		_ = conn.Close()
		return
	}
	c.swap(conn)
	d.fleet.spawn(func(context.Context) { d.readUDP(m, c, conn) })
}

// sendBadDatagrams is the fault bad-frame on UDP: what no firmware sends.
func (d *Device) sendBadDatagrams(m *mqttState, c *udpChannel) {
	d.mu.Lock()
	good := m.keys.seal(nil, []byte("not an Opus packet, and after no voice"), 0)
	d.mu.Unlock()
	change := func(at int, to byte) []byte {
		b := slices.Clone(good)
		b[at] = to
		return b
	}
	for _, packet := range [][]byte{
		{}, {1}, good[:15], good[:16], good[:len(good)-1], append(slices.Clone(good), 0),
		change(0, 0), change(0, 2), change(1, 0x80), change(3, 255), change(4, good[4]^0xFF),
		make([]byte, udpRoom), make([]byte, 9000),
	} {
		c.send(packet, false)
	}
}
