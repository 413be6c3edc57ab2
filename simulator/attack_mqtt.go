package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"fleetd/simulator/firmware"
)

const (
	dripEvery     = time.Second
	probeLogin    = 5 * time.Second
	hugePayload   = 1 << 20
	garbageLength = 4096
)

// probe is one kind of bad input on a connection of its own.
type probe struct {
	name string
	// login means that the probe first logs in with the device's credentials.
	login bool
	// alone means that no other such probe runs meanwhile: a CONNECT with the same client id would end its connection.
	alone bool
	send  func(*probeRun) error
}

// probeRun is the state of a running probe.
type probeRun struct {
	conn   net.Conn
	target firmware.Login
	ended  chan struct{} // closed when nothing more is read
	acked  chan struct{} // closed when CONNACK has arrived

	mu     sync.Mutex // guards result
	result probeResult
}

// probeResult is what the server did.
type probeResult struct {
	Name    string `json:"name"`
	CONNACK *int   `json:"connack"`
	Closed  bool   `json:"closed"`
	// AfterMS is the time from the bad input to the end of the connection or of the attack.
	AfterMS  float64 `json:"after_ms"`
	Received []int   `json:"packet_types_received"`
	Error    string  `json:"error,omitempty"`
}

// mqttAttack is the report of --attack mqtt.
type mqttAttack struct {
	Attack string        `json:"attack"`
	Target string        `json:"target"`
	Login  bool          `json:"login"` // the OTA answer gave credentials
	Probes []probeResult `json:"probes"`
}

func (m *mqttAttack) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d bad inputs against %s, credentials from the OTA answer: %v\n", len(m.Probes), m.Target, m.Login)
	for _, p := range m.Probes {
		ack, end := "no CONNACK", "still open"
		if p.CONNACK != nil {
			ack = "CONNACK " + strconv.Itoa(*p.CONNACK)
		}
		if p.Closed {
			end = "closed"
		}
		fmt.Fprintf(&b, "  %-24s %-11s %-10s after %9.1f ms  %s\n", p.Name, ack, end, p.AfterMS, p.Error)
	}
	return b.String()
}

func probes() []probe {
	raw := func(name string, bytes ...byte) probe {
		return probe{name: name, send: func(p *probeRun) error { return p.write(bytes) }}
	}
	publish := func(name, topic string, payload func() []byte) probe {
		return probe{name: name, login: true, alone: true, send: func(p *probeRun) error {
			to := topic
			if to == "" {
				to = p.target.PublishTopic
			}
			return p.write(firmware.AppendPublish(nil, to, payload()))
		}}
	}
	word := func() []byte { return []byte(`{"type":"hello","version":3,"transport":"udp"}`) }
	return []probe{
		raw("five-byte-length", firmware.PacketConnect<<4, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F),
		raw("largest-length", firmware.PacketConnect<<4, 0xFF, 0xFF, 0xFF, 0x7F),
		{name: "one-byte-drip", send: func(p *probeRun) error { return p.drip(p.target.Connect()) }},
		raw("never-connect"),
		{name: "publish-before-connect", send: func(p *probeRun) error { return p.write(firmware.AppendPublish(nil, p.target.PublishTopic, word())) }},
		{name: "subscribe-before-connect", send: func(p *probeRun) error { return p.write(firmware.AppendSubscribe(nil, 1, "#")) }},
		{name: "wrong-password", alone: true, send: func(p *probeRun) error {
			l := p.target
			l.Password = "not the password"
			return p.write(l.Connect())
		}},
		{name: "no-credentials", alone: true, send: func(p *probeRun) error {
			return p.write(firmware.Login{ClientID: p.target.ClientID, Keepalive: 60}.Connect())
		}},
		{name: "unknown-level", send: func(p *probeRun) error {
			b := p.target.Connect()
			b[len(b)-remaining(b)+6] = 9
			return p.write(b)
		}},
		{name: "garbage", send: func(p *probeRun) error {
			r, b := rand.New(rand.NewPCG(1, 1)), make([]byte, garbageLength)
			for i := range b {
				b[i] = byte(r.Uint32())
			}
			return p.write(b)
		}},
		raw("reserved-type", 0x00, 0x00),
		publish("wildcard-topic", "fleetd/+/up", word),
		publish("foreign-topic", "fleetd/000000000000/up", word),
		publish("system-topic", "$SYS/broker", word),
		publish("one-megabyte", "", func() []byte { return make([]byte, hugePayload) }),
		publish("not-utf8-topic", "fleetd/\xff\xfe/up", word),
		{name: "second-connect", login: true, alone: true, send: func(p *probeRun) error { return p.write(p.target.Connect()) }},
		{name: "subscribe-all", login: true, alone: true, send: func(p *probeRun) error { return p.write(firmware.AppendSubscribe(nil, 1, "#")) }},
	}
}

// remaining returns how many bytes follow the fixed header of a valid packet.
func remaining(packet []byte) int {
	n := 0
	for i, c := range packet[1:5] {
		n |= int(c&0x7F) << (7 * i)
		if c&0x80 == 0 {
			break
		}
	}
	return n
}

// attackMQTT runs every probe on a connection of its own. The probes marked alone run one after the other and share the
// duration; the others run at once.
func attackMQTT(ctx context.Context, o *options, duration time.Duration) (*mqttAttack, error) {
	target, login, err := attackTarget(ctx, o)
	if err != nil {
		return nil, err
	}
	address, err := target.Address()
	if err != nil {
		return nil, fmt.Errorf("--attack mqtt: %w", err)
	}
	list := probes()
	r := &mqttAttack{Attack: "mqtt", Target: address, Login: login, Probes: make([]probeResult, len(list))}
	var wg sync.WaitGroup
	alone := 0
	for _, p := range list {
		if p.alone {
			alone++
		}
	}
	turn := make(chan struct{}, 1)
	for i, p := range list {
		wg.Go(func() {
			watch := duration
			if p.alone {
				turn <- struct{}{}
				defer func() { <-turn }()
				watch = duration / time.Duration(alone)
			}
			r.Probes[i] = p.run(ctx, o, target, watch)
		})
	}
	wg.Wait()
	return r, nil
}

// attackTarget requests credentials from the OTA URL, as a device does. If it gets none, it invents some, and the attack
// needs --target.
func attackTarget(ctx context.Context, o *options) (t firmware.Login, login bool, err error) {
	f, err := firmware.New(o.Options)
	if err != nil {
		return t, false, err
	}
	defer f.Close()
	answer, err := f.CheckIn(ctx)
	t = answer.Login
	if login = err == nil && t.Endpoint != ""; !login {
		id := strings.ReplaceAll(t.Device, ":", "")
		t = firmware.Login{PublishTopic: "fleetd/" + id + "/up", ClientID: id, Username: "client:" + t.Client, Password: "guess", Keepalive: 60}
	}
	switch {
	case o.attack.target != "":
		t.Endpoint = o.attack.target
	case !login:
		return t, false, errors.Join(errors.New("--attack mqtt needs --target host:port, or an OTA answer with an mqtt section"), err)
	}
	return t, login, nil
}

func (p probe) run(ctx context.Context, o *options, t firmware.Login, watch time.Duration) probeResult {
	ctx, cancel := context.WithTimeout(ctx, watch)
	defer cancel()
	tcp, err := t.DialRaw(ctx, o.Options)
	if err != nil {
		return probeResult{Name: p.name, Error: err.Error()}
	}
	r := &probeRun{conn: tcp, target: t, ended: make(chan struct{}), acked: make(chan struct{}), result: probeResult{Name: p.name, Received: []int{}}}
	defer func() { _ = tcp.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = tcp.SetDeadline(time.Now()) })
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.read(ctx)
	}()
	started := time.Now()
	if p.login {
		err = r.write(t.Connect())
		select {
		case <-r.acked:
		case <-r.ended:
			err = errors.Join(errors.New("the server closed the connection during the login"), err)
		case <-time.After(probeLogin):
			err = errors.Join(errors.New("the server did not answer the login with CONNACK"), err)
		case <-ctx.Done():
		}
		started = time.Now()
	}
	if err == nil {
		err = p.send(r)
	}
	<-done
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result.AfterMS = float64(time.Since(started).Microseconds()) / 1000
	if err != nil && !r.result.Closed {
		r.result.Error = err.Error()
	}
	return r.result
}

func (r *probeRun) write(b []byte) error {
	_, err := r.conn.Write(b)
	return err
}

// drip sends one byte a second until the server closes the connection or all bytes are sent.
func (r *probeRun) drip(b []byte) error {
	for i := range b {
		if err := r.write(b[i : i+1]); err != nil {
			return err
		}
		select {
		case <-r.ended:
			return nil
		case <-time.After(dripEvery):
		}
	}
	return nil
}

// read collects the packets of the server until the connection or ctx ends.
func (r *probeRun) read(ctx context.Context) {
	err := firmware.ReadPackets(r.conn, func(p firmware.Packet) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.result.Received) < 100 {
			r.result.Received = append(r.result.Received, int(p.Type))
		}
		if p.Type == firmware.PacketConnack && len(p.Body) == 2 && r.result.CONNACK == nil {
			code := int(p.Body[1])
			r.result.CONNACK = &code
			close(r.acked)
		}
		return true
	})
	r.mu.Lock()
	if ctx.Err() == nil {
		r.result.Closed = true
		if err != io.EOF && !strings.Contains(err.Error(), "reset") {
			r.result.Error = err.Error()
		}
	}
	r.mu.Unlock()
	close(r.ended)
}
