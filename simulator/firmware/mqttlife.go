package firmware

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"time"
)

const (
	// defaultKeepalive is used when NVS holds none, in seconds (main/protocols/mqtt_protocol.cc:82).
	defaultKeepalive = 240
	// idleReconnect is the firmware's own one-shot timer beside esp-mqtt's (mqtt_protocol.cc:13-35).
	idleReconnect = 60 * time.Second
)

// errSuperseded ends an attempt that a newer one or the end of the device overtook.
var errSuperseded = errors.New("superseded")

// mqttState is the MqttProtocol object of a device that uses MQTT; guarded by the device's mutex.
type mqttState struct {
	conn *mqttConn // nil without an accepted CONNECT
	// epoch numbers the clients the firmware has made: an attempt whose number has passed is dropped.
	epoch int
	// since is when the device began to be without a session.
	since time.Time
	retry *time.Timer // esp-mqtt's reconnect
	idle  *time.Timer // the one-shot timer of the firmware
	ever  bool        // a CONNECT was accepted before

	keys    udpKeys
	offer   udpOffer
	channel *udpChannel
}

// stopTimers ends both reconnect timers.
func (m *mqttState) stopTimers() {
	for _, t := range []*time.Timer{m.retry, m.idle} {
		if t != nil {
			t.Stop()
		}
	}
	m.retry, m.idle = nil, nil
}

// parseEndpoint takes the endpoint apart: the first colon starts the port (mqtt_protocol.cc:148-157). TLS is spoken on
// port 8883 only.
func parseEndpoint(endpoint string) (deviceURL, error) {
	u := deviceURL{scheme: "mqtt", host: endpoint, port: mqttTLSPort}
	if host, port, ok := strings.Cut(endpoint, ":"); ok {
		n, err := stoi(port)
		if err != nil {
			return u, fmt.Errorf("MQTT endpoint %q: %w", endpoint, err)
		}
		u.host, u.port = host, n
	}
	u.secure = u.port == mqttTLSPort
	return u, nil
}

// startMQTT is MqttProtocol::Start: connect once and keep trying.
func (d *Device) startMQTT(ctx context.Context) {
	d.mu.Lock()
	d.mqtt = &mqttState{since: d.bootedAt}
	d.mu.Unlock()
	// The failure is noted and tried again by the timers.
	_ = d.connectMQTT(ctx)
}

// connectMQTT is StartMqttClient: a new client replaces whatever the device has, connected or not.
func (d *Device) connectMQTT(ctx context.Context) error {
	d.mu.Lock()
	m := d.mqtt
	if m == nil || d.stopped {
		d.mu.Unlock()
		return errSuperseded
	}
	m.epoch++
	epoch, old := m.epoch, m.conn
	m.conn = nil
	m.stopTimers()
	login := d.settings.mqttLogin(d.fleet.options.Subscribe)
	if d.life != StateConnecting {
		d.setLifeLocked(StateConnecting, "")
	}
	d.mu.Unlock()
	if old != nil {
		old.drop()
	}
	conn, err := dialMQTT(ctx, d.fleet.dialer, d.index, &login)
	d.mu.Lock()
	if d.mqtt != m || m.epoch != epoch || d.stopped || ctx.Err() != nil {
		d.mu.Unlock()
		if conn != nil {
			conn.drop()
		}
		return errSuperseded
	}
	var refused connackError
	if err != nil {
		d.stats.connectFailures++
		if errors.As(err, &refused) {
			d.stats.mqttLocked().connack.add(byte(refused))
		}
		d.setLifeLocked(StateIdle, "connect: "+err.Error())
		d.retryLocked(m)
		d.mu.Unlock()
		d.log("mqtt refused", "error", err)
		return fmt.Errorf("connect: %w", err)
	}
	waited := time.Since(m.since)
	again := m.ever
	m.conn, m.ever = conn, true
	d.out, d.opened = conn, true
	d.stats.connects++
	s := d.stats.mqttLocked()
	s.connack.add(0)
	if again {
		s.reconnects++
	}
	d.problem = ""
	d.setLifeLocked(StateConnected, "")
	d.mu.Unlock()
	d.fleet.waited(again, waited)
	d.log("mqtt connected", "broker", login.Endpoint, "waited", waited)
	d.fleet.spawn(func(context.Context) { d.readMQTT(m, conn) })
	if conn.half > 0 {
		d.fleet.after(conn.half, func() { d.keepAlive(conn) })
	}
	d.afterConnect(conn)
	return nil
}

// retryLocked arms esp-mqtt's reconnect and the firmware's own timer.
func (d *Device) retryLocked(m *mqttState) {
	m.stopTimers()
	o := d.fleet.options
	pause := o.Reconnect
	if o.ReconnectJitter > 0 {
		pause += time.Duration(d.rng.Int64N(int64(o.ReconnectJitter)))
	}
	if d.faults.has(faultFlap) {
		pause = flapPause(d.rng)
	}
	again := func() { _ = d.connectMQTT(d.fleet.ctx) }
	m.retry = d.fleet.after(d.fleet.scaled(pause), again)
	m.idle = d.fleet.after(d.fleet.scaled(idleReconnect), func() {
		d.mu.Lock()
		fires := d.mqtt == m && m.conn == nil && d.app == appIdle && !d.stopped
		d.mu.Unlock()
		if fires {
			again()
		}
	})
}

// afterConnect starts the faults that belong to a connection.
func (d *Device) afterConnect(conn *mqttConn) {
	if d.faults.has(faultBadFrame) {
		d.sendGarbageText()
	}
	if d.faults.has(faultFlap) {
		d.fleet.after(d.fleet.scaled(d.random(flapPause)), conn.drop)
	}
}

// flapPause is 1 to 5 seconds.
func flapPause(r *rand.Rand) time.Duration {
	return time.Second + time.Duration(r.Int64N(int64(4*time.Second)))
}

func (d *Device) keepAlive(conn *mqttConn) {
	next, sent := conn.ping(time.Now())
	if sent {
		d.mu.Lock()
		d.stats.mqttLocked().pings++
		d.mu.Unlock()
	}
	if next > 0 {
		d.fleet.after(next, func() { d.keepAlive(conn) })
	}
}

// readMQTT owns reading a connection until it ends. Its loss does not end a conversation: nothing listens for it
// (main/application.cc:511-543), audio goes on and the first failed publish notices.
func (d *Device) readMQTT(m *mqttState, conn *mqttConn) {
	err := conn.read(func(payload []byte) { d.onPublish(m, conn, payload) })
	conn.drop()
	d.mu.Lock()
	d.stats.disconnects++
	mine := d.mqtt == m && m.conn == conn && !d.stopped
	if mine {
		m.conn, m.since = nil, time.Now()
		d.opened = false
		d.setLifeLocked(StateIdle, "")
		d.retryLocked(m)
	}
	d.mu.Unlock()
	if !mine {
		return
	}
	d.log("mqtt lost", "error", err)
	if errors.Is(err, errMemory) {
		d.fail(fmt.Errorf("%w: %w", errCrash, err))
		return
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		d.note("MQTT connection lost: " + strings.TrimPrefix(err.Error(), "read "))
	}
}

// onPublish handles one message; JSON with a type refreshes the 120 seconds of the channel.
func (d *Device) onPublish(m *mqttState, conn *mqttConn, payload []byte) {
	d.mu.Lock()
	mine := d.mqtt == m && m.conn == conn
	d.mu.Unlock()
	if !mine {
		return
	}
	doc := documents.Get().(*jsonDoc)
	valid := d.onText(doc, payload)
	doc.reset()
	documents.Put(doc)
	if valid {
		d.mu.Lock()
		d.lastData = time.Now()
		d.mu.Unlock()
	}
	d.pump(true)
}
