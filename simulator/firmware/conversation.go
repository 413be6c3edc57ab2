package firmware

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
)

const (
	// helloTimeout holds however far --time-scale shortens the firmware's pauses: it waits for a server, which may be busy.
	helloTimeout = 10 * time.Second
	// channelTimeout is Protocol::IsTimeout (main/protocols/protocol.cc:100-109): data frames count, pings do not.
	channelTimeout = 120 * time.Second
	// keepSessions is how many session ids the report lists per device.
	keepSessions = 5
)

func (d *Device) wakeAgain() {
	d.mu.Lock()
	stopped, booting := d.stopped, d.away || d.life == StateBooting || d.life == StateWaiting
	d.mu.Unlock()
	if stopped {
		return
	}
	if !booting {
		d.wake()
	}
	d.fleet.after(d.jittered(d.fleet.options.Wake), d.wakeAgain)
}

// wake is the wake word or the button: it opens the audio channel if there is none and starts to listen.
func (d *Device) wake() {
	d.post(job{kind: jobDo, do: d.converse})
	d.pump(false)
}

// channelOpenLocked is IsAudioChannelOpened of either protocol.
func (d *Device) channelOpenLocked() bool {
	if d.mqtt != nil {
		return d.mqtt.channel != nil && !d.errored && time.Since(d.lastData) <= channelTimeout
	}
	return d.conn != nil && !d.conn.closed.Load() && !d.errored && time.Since(d.lastData) <= channelTimeout
}

// converse runs in the main loop and blocks it while it connects, as on the device.
func (d *Device) converse() {
	d.mu.Lock()
	open, talking, udp := d.channelOpenLocked(), d.app != appIdle, d.mqtt != nil
	stopped := d.stopped || d.away || d.upgrading
	d.mu.Unlock()
	if talking || stopped {
		return
	}
	stale := false
	if !open {
		var err error
		if udp {
			err = d.openUDPChannel(d.fleet.ctx)
		} else {
			stale, err = d.openChannel(d.fleet.ctx)
		}
		if err != nil {
			if errors.Is(err, errStoi) {
				d.fail(fmt.Errorf("%w: %w", errCrash, err))
				return
			}
			d.note(err.Error())
			return
		}
	}
	if d.fleet.options.Talk {
		d.startTalking(stale)
	}
}

// openChannel is WebsocketProtocol::OpenAudioChannel (main/protocols/websocket_protocol.cc:79-196). stale reports that a
// socket thought alive was thrown away on the way, which idles the device right after it started to listen.
func (d *Device) openChannel(ctx context.Context) (stale bool, err error) {
	d.mu.Lock()
	old := d.conn
	stale = old != nil && !old.closed.Load()
	d.conn, d.out, d.opened, d.errored = nil, nil, false, false
	url, token := d.settings.text("websocket", "url"), d.settings.text("websocket", "token")
	if v := d.settings.number("websocket", "version"); v != 0 {
		d.wsVersion = v
	}
	version := d.wsVersion
	seed := d.rng.Uint32()
	d.mu.Unlock()
	if old != nil {
		old.drop()
	}
	target, err := parseWSURL(url)
	if err != nil {
		return stale, err
	}
	d.setLife(StateConnecting, "")
	started := time.Now()
	conn, err := dialWS(ctx, d.fleet.dialer, d.index, target,
		&Login{Token: token, Client: d.clientID, Device: d.id, Version: version}, seed)
	if err != nil {
		d.mu.Lock()
		d.stats.connectFailures++
		d.mu.Unlock()
		d.setLife(StateIdle, "connect: "+err.Error())
		return stale, fmt.Errorf("connect: %w", err)
	}
	d.mu.Lock()
	if d.stopped || d.away || ctx.Err() != nil {
		d.mu.Unlock()
		conn.drop()
		return stale, context.Canceled
	}
	d.conn, d.out = conn, conn
	d.lastData = started
	d.stats.connects++
	d.mu.Unlock()
	d.fleet.spawn(func(context.Context) { d.readAll(conn) })

	wait := d.sendHello(conn, version)
	if wait != nil && !d.awaitHello(ctx, wait) {
		d.mu.Lock()
		d.errored = true
		d.helloWait = nil
		d.mu.Unlock()
		d.setLife(StateIdle, "hello_timeout: no server hello in 10 s")
		return stale, errors.New("hello_timeout: no server hello in 10 s")
	}
	d.mu.Lock()
	alive := d.conn == conn && !conn.closed.Load()
	if alive {
		d.opened = true
		d.problem = ""
		d.setLifeLocked(StateConnected, "")
	}
	d.mu.Unlock()
	if !alive {
		return stale, errors.New("the server closed the connection during the hello exchange")
	}
	d.fleet.hello(time.Since(started))
	d.afterOpen(conn)
	return stale, nil
}

// sendHello sends the hello and returns what to wait on; nil when the "hello seen" flag of an earlier second or late
// hello is still set, in which case the device waits for nothing (quirk of websocket_protocol.cc:182-184).
func (d *Device) sendHello(conn *wsConn, version int32) chan struct{} {
	if d.faults.has(faultBadFrame) {
		d.sendGarbage(conn, true)
	}
	hello := d.profile.helloText(version)
	wait := make(chan struct{})
	d.mu.Lock()
	if d.helloSeen {
		d.helloSeen = false
		wait = nil
	} else {
		d.helloWait = wait
	}
	d.mu.Unlock()
	d.sendText(hello)
	d.mu.Lock()
	d.stats.hellos++
	d.mu.Unlock()
	if d.faults.has(faultDupHello) {
		d.sendText(hello)
		d.mu.Lock()
		d.stats.hellos++
		d.mu.Unlock()
	}
	return wait
}

func (d *Device) awaitHello(ctx context.Context, wait chan struct{}) bool {
	timer := time.NewTimer(helloTimeout)
	defer timer.Stop()
	select {
	case <-wait:
		return true
	case <-timer.C:
		return false
	case <-ctx.Done():
		return false
	}
}

// afterOpen starts the faults that belong to an open channel.
func (d *Device) afterOpen(conn *wsConn) {
	if d.faults.has(faultBadFrame) {
		d.sendGarbage(conn, false)
	}
	if !d.faults.has(faultFlap) {
		return
	}
	pause := func() time.Duration { return d.fleet.scaled(d.random(flapPause)) }
	d.fleet.after(pause(), func() {
		d.closeChannel()
		d.fleet.after(pause(), d.wake)
	})
}

// closeChannel destroys the socket: TCP ends without a Close frame. With MQTT only the audio channel ends.
func (d *Device) closeChannel() {
	d.mu.Lock()
	if d.mqtt != nil {
		d.mu.Unlock()
		d.closeUDPChannel(true)
		return
	}
	conn := d.conn
	d.conn, d.out, d.opened = nil, nil, false
	d.mu.Unlock()
	if conn != nil {
		conn.drop()
		d.goIdle()
	}
}

// goIdle is what the "closed" callback schedules.
func (d *Device) goIdle() {
	d.mu.Lock()
	d.app = appIdle
	d.hushLocked()
	if d.mqtt == nil && (d.life == StateConnected || d.life == StateConnecting) {
		d.setLifeLocked(StateIdle, "")
	}
	d.mu.Unlock()
}

// readAll owns reading a socket until it ends.
func (d *Device) readAll(conn *wsConn) {
	s := &session{device: d, conn: conn}
	err := conn.read(s)
	conn.drop()
	d.mu.Lock()
	d.stats.disconnects++
	mine := d.conn == conn
	if mine {
		d.conn, d.out, d.opened = nil, nil, false
	}
	stopped := d.stopped
	d.mu.Unlock()
	if !mine || stopped {
		return
	}
	if errors.Is(err, errMemory) {
		d.fail(fmt.Errorf("%w: %w", errCrash, err))
		return
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		d.note("connection lost: " + strings.TrimPrefix(err.Error(), "read "))
	}
	d.goIdle()
}

// session ties a socket to its device: what arrives on a socket the device has given up is dropped.
type session struct {
	device *Device
	conn   *wsConn
}

func (s *session) onPing() {
	s.device.mu.Lock()
	s.device.stats.pings++
	s.device.mu.Unlock()
}

func (s *session) onClose() {
	d := s.device
	d.mu.Lock()
	mine := d.conn == s.conn
	if mine {
		d.opened = false
		d.stats.closeFrames++
	}
	d.mu.Unlock()
	if mine {
		d.goIdle()
	}
}

func (s *session) onMessage(binary bool, data []byte) {
	d := s.device
	d.mu.Lock()
	mine := d.conn == s.conn
	if mine {
		d.lastData = time.Now()
	}
	d.mu.Unlock()
	if !mine {
		return
	}
	if binary {
		d.onAudio(data)
		return
	}
	s.text(data)
}

func (s *session) text(data []byte) {
	doc := documents.Get().(*jsonDoc)
	s.device.onText(doc, data)
	doc.reset()
	documents.Put(doc)
	// Only now that the whole message is digested may the main loop answer it.
	s.device.pump(true)
}
