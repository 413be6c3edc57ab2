package firmware

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// fakeBroker is an MQTT server and a UDP peer on real sockets; its OTA answers come from a fakeServer.
type fakeBroker struct {
	t     *testing.T
	http  *fakeServer
	ln    net.Listener
	udp   *net.UDPConn
	conns chan *fakeMQTT

	mu      sync.Mutex
	connack byte
	keep    int
}

type fakeMQTT struct {
	net.Conn
	broker  *fakeBroker
	in      mqttReader
	connect string // the body of CONNECT
}

func newFakeBroker(t *testing.T) *fakeBroker {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	b := &fakeBroker{t: t, http: newFakeServer(t), ln: ln, udp: udp, conns: make(chan *fakeMQTT, 64), keep: 120}
	b.http.ota = func(int, []byte) (int, string) {
		b.mu.Lock()
		defer b.mu.Unlock()
		return 200, fmt.Sprintf(`{"mqtt":{"endpoint":%q,"client_id":"02f1ee000000","username":"client:u","password":"pw","publish_topic":"fleetd/02f1ee000000/up","subscribe_topic":"fleetd/02f1ee000000/down","keepalive":%d}}`,
			ln.Addr(), b.keep)
	}
	t.Cleanup(func() {
		_ = ln.Close()
		_ = udp.Close()
	})
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go b.serve(conn)
		}
	}()
	return b
}

func (b *fakeBroker) serve(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	c := &fakeMQTT{Conn: conn, broker: b, in: mqttReader{byteReader{src: conn, buf: make([]byte, idleBuffer)}}}
	p, err := c.in.next()
	if err != nil || p.kind != mqttConnect {
		_ = conn.Close()
		return
	}
	c.connect = string(p.body)
	b.mu.Lock()
	code := b.connack
	b.mu.Unlock()
	_, _ = conn.Write([]byte{mqttConnAck << 4, 2, 0, code})
	if code != 0 {
		_ = conn.Close()
		return
	}
	b.conns <- c
}

func (b *fakeBroker) accept() *fakeMQTT {
	b.t.Helper()
	select {
	case c := <-b.conns:
		b.t.Cleanup(func() { _ = c.Close() })
		return c
	case <-time.After(10 * time.Second):
		b.t.Fatal("no MQTT connection within 10 s")
		return nil
	}
}

func (c *fakeMQTT) send(text string) { c.publish(0, text) }

// publish writes to a topic the device has not subscribed to.
func (c *fakeMQTT) publish(qos byte, text string) {
	c.broker.t.Helper()
	body := appendMQTTString(nil, "any/topic")
	if qos > 0 {
		body = append(body, 0, 7)
	}
	body = append(body, text...)
	if _, err := c.Write(append(appendRemaining([]byte{mqttPublish<<4 | qos<<1}, len(body)), body...)); err != nil {
		c.broker.t.Fatal(err)
	}
}

// next returns the next packet; a PUBLISH must be of quality 0, not retained, on the device's topic.
func (c *fakeMQTT) next() (byte, string) {
	c.broker.t.Helper()
	p, err := c.in.next()
	if err != nil {
		c.broker.t.Fatal(err)
	}
	if p.kind != mqttPublish {
		return p.kind, string(p.body)
	}
	topic := p.body[2 : 2+binary.BigEndian.Uint16(p.body)]
	if string(topic) != "fleetd/02f1ee000000/up" || p.flags != 0 {
		c.broker.t.Fatalf("PUBLISH to %s with flags %x", topic, p.flags)
	}
	return p.kind, string(p.body[2+len(topic):])
}

// text returns the next message, past PINGREQ.
func (c *fakeMQTT) text() string {
	c.broker.t.Helper()
	for {
		kind, text := c.next()
		if kind == mqttPublish {
			return text
		}
		if kind == mqttPingReq {
			_, _ = c.Write([]byte{mqttPingResp << 4, 0})
		}
	}
}

func (c *fakeMQTT) call(id int, method string) rpc {
	c.broker.t.Helper()
	c.send(fmt.Sprintf(`{"type":"mcp","payload":{"jsonrpc":"2.0","method":%q,"id":%d}}`, method, id))
	text := c.text()
	var r rpc
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		c.broker.t.Fatalf("%v in %s", err, text)
	}
	if r.Payload.ID != id {
		c.broker.t.Fatalf("reply to %d: %s", id, text)
	}
	return r
}

// fakeSession is the server's half of one audio channel.
type fakeSession struct {
	broker *fakeBroker
	keys   udpKeys // of the uplink
	down   udpKeys
	from   *net.UDPAddr
}

const fakeKey = "6b6579206d75737420626520313662ff"

// answerHello gives the device a session; ssrc is 8 hex digits.
func (c *fakeMQTT) answerHello(id, ssrc string) *fakeSession {
	c.broker.t.Helper()
	if text := c.text(); !strings.Contains(text, `"type":"hello"`) {
		c.broker.t.Fatalf("no hello: %s", text)
	}
	port := c.broker.udp.LocalAddr().(*net.UDPAddr).Port
	c.send(fmt.Sprintf(`{"type":"hello","transport":"udp","session_id":%q,"audio_params":{"sample_rate":16000,"frame_duration":60},"udp":{"server":"127.0.0.1","port":%d,"key":%q,"nonce":"01000000%s0000000000000000"}}`,
		id, port, fakeKey, ssrc))
	s := &fakeSession{broker: c.broker}
	s.keys, _ = newUDPKeys(laxHex(fakeKey), laxHex("01000000"+ssrc+"0000000000000000"), false)
	s.down, _ = newUDPKeys(laxHex(fakeKey), laxHex("01800000"+ssrc+"0000000000000000"), false)
	return s
}

// datagram returns the next packet of the device as it is.
func (s *fakeSession) datagram() []byte {
	s.broker.t.Helper()
	buf := make([]byte, 64<<10)
	_ = s.broker.udp.SetReadDeadline(time.Now().Add(10 * time.Second))
	n, from, err := s.broker.udp.ReadFromUDP(buf)
	if err != nil {
		s.broker.t.Fatal(err)
	}
	s.from = from
	return buf[:n]
}

// hear returns the next Opus packet and its sequence.
func (s *fakeSession) hear() ([]byte, uint32) {
	s.broker.t.Helper()
	p := s.datagram()
	opus, _, verdict := s.keys.open(p)
	if verdict != Accepted {
		s.broker.t.Fatalf("packet %x: %s", p, verdictNames()[verdict])
	}
	return opus, s.keys.remote
}

func (s *fakeSession) say(opus []byte) { s.raw(s.down.seal(nil, opus, s.down.local*60)) }

func (s *fakeSession) raw(packet []byte) {
	s.broker.t.Helper()
	if _, err := s.broker.udp.WriteToUDP(packet, s.from); err != nil {
		s.broker.t.Fatal(err)
	}
}
