package firmware

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// mqttWait is how long the firmware waits for a connection, from the name lookup to CONNACK (esp-ml307 src/esp/esp_mqtt.h:13).
	mqttWait = 10 * time.Second
	// mqttWriteWait is esp-mqtt's network timeout.
	mqttWriteWait = 10 * time.Second
	// mqttTLSPort is the default port, and the only one that the firmware connects to with TLS (src/esp/esp_mqtt.cc:27-32).
	mqttTLSPort = 8883
	subscribeID = 1
)

var errTopic = errors.New("the OTA answer gave no publish_topic: nothing can be published")

// connackError is a refused CONNECT (MQTT 3.1.1, section 3.2.2.3).
type connackError byte

func (e connackError) Error() string {
	names := [...]string{1: "unacceptable protocol version", 2: "identifier rejected", 3: "server unavailable",
		4: "bad user name or password", 5: "not authorized"}
	if int(e) < len(names) && names[e] != "" {
		return fmt.Sprintf("CONNACK code %d (%s)", byte(e), names[e])
	}
	return fmt.Sprintf("CONNACK code %d", byte(e))
}

// mqttConn is one client connection that behaves like esp-mqtt. One goroutine reads; any goroutine may write and drop.
type mqttConn struct {
	tcp    net.Conn
	reader mqttReader
	topic  string
	// half is half the keepalive: esp-mqtt pings when it has sent nothing for that long. If it is 0, nothing pings.
	half time.Duration

	wmu     sync.Mutex
	closed  atomic.Bool
	written atomic.Int64 // nanoseconds since the epoch
	pinged  atomic.Bool  // a PINGREQ is unanswered
}

// dialMQTT connects and waits for CONNACK, 10 s in all. A refusal is a connackError.
func dialMQTT(ctx context.Context, d *dialer, index int, l *Login) (*mqttConn, error) {
	ctx, cancel := context.WithTimeout(ctx, mqttWait)
	defer cancel()
	to, err := parseEndpoint(l.Endpoint)
	if err != nil {
		return nil, err
	}
	tcp, err := d.dial(ctx, index, to)
	if err != nil {
		return nil, err
	}
	return openMQTT(ctx, tcp, l)
}

// openMQTT does what dialMQTT does, on an open TCP connection.
func openMQTT(ctx context.Context, tcp net.Conn, l *Login) (*mqttConn, error) {
	c := &mqttConn{tcp: tcp, topic: l.PublishTopic, half: time.Duration(l.Keepalive) * time.Second / 2}
	c.reader = mqttReader{byteReader{src: tcp, buf: make([]byte, idleBuffer)}}
	stop := context.AfterFunc(ctx, c.drop)
	defer stop()
	if err := c.connect(l); err != nil {
		c.drop()
		return nil, err
	}
	return c, nil
}

func (c *mqttConn) connect(l *Login) error {
	if err := c.send(func(b []byte) []byte { return appendConnect(b, l) }); err != nil {
		return fmt.Errorf("CONNECT: %w", err)
	}
	p, err := c.reader.next()
	switch {
	case err != nil:
		return fmt.Errorf("no CONNACK: %w", err)
	case p.kind != mqttConnAck || len(p.body) != 2:
		return fmt.Errorf("%w: packet type %d where CONNACK is due", errMQTT, p.kind)
	case p.body[1] != 0:
		return connackError(p.body[1])
	case l.SubscribeTopic == "":
		return nil
	}
	return c.send(func(b []byte) []byte { return appendSubscribe(b, subscribeID, l.SubscribeTopic) })
}

// send writes what fill appends, in one piece.
func (c *mqttConn) send(fill func([]byte) []byte) error {
	if c.closed.Load() {
		return errNotOpen
	}
	room := getBuffer()
	defer putBuffer(room)
	*room = fill((*room)[:0])
	now := time.Now()
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if err := c.tcp.SetWriteDeadline(now.Add(mqttWriteWait)); err != nil {
		return err
	}
	c.written.Store(now.UnixNano())
	_, err := c.tcp.Write(*room)
	return err
}

// write publishes the message after the space that appendFrameRoom left.
func (c *mqttConn) write(_ byte, room *[]byte) error {
	if c.topic == "" {
		return errTopic
	}
	return c.send(func(b []byte) []byte { return appendPublish(b, c.topic, (*room)[frameRoom:]) })
}

// drop ends the TCP connection without DISCONNECT, as a lost network does.
func (c *mqttConn) drop() {
	c.closed.Store(true)
	_ = c.tcp.Close()
}

// ping sends a PINGREQ if one is due, and returns whether it did, and after how long to call ping again: 0 means never.
// Like esp-mqtt it drops the connection if the previous PINGREQ is still unanswered when the next one is due.
func (c *mqttConn) ping(now time.Time) (next time.Duration, sent bool) {
	if c.closed.Load() {
		return 0, false
	}
	if idle := now.Sub(time.Unix(0, c.written.Load())); idle < c.half {
		return c.half - idle, false
	}
	if c.pinged.Swap(true) || c.send(func(b []byte) []byte { return append(b, mqttPingReq<<4, 0) }) != nil {
		c.drop()
		return 0, false
	}
	return c.half, true
}

// read delivers the payload of every PUBLISH, whatever its topic, until TCP ends, and returns why.
func (c *mqttConn) read(onMessage func([]byte)) error {
	for {
		payload, err := c.step()
		if err != nil {
			return err
		}
		if payload != nil {
			onMessage(payload)
		}
	}
}

// step reads one packet, and returns the payload if it is a PUBLISH.
func (c *mqttConn) step() (payload []byte, err error) {
	p, err := c.reader.next()
	if err != nil {
		return nil, err
	}
	switch p.kind {
	case mqttPublish:
		payload, qos, id, err := p.publish()
		if err != nil {
			return nil, err
		}
		if qos > 0 {
			// A failed acknowledgement shows as the end of the stream in the next read.
			_ = c.send(func(b []byte) []byte { return appendAck(b, mqttPubAck+qos-1, id) })
		}
		return payload, nil
	case mqttPubRel:
		if len(p.body) == 2 {
			_ = c.send(func(b []byte) []byte { return appendAck(b, mqttPubComp, binary.BigEndian.Uint16(p.body)) })
		}
	case mqttPingResp:
		c.pinged.Store(false)
	}
	return nil, nil
}
