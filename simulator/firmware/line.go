package firmware

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"
)

// Login is how a device reaches its server and what it presents there. With a URL it speaks WebSocket, else MQTT.
type Login struct {
	Device, Client string // Device-Id and Client-Id

	URL     string // of the WebSocket
	Token   string // of the WebSocket, without "Bearer"
	Version int32  // of the binary frames: 1, 2 or 3

	Endpoint                     string // of MQTT, host:port; TLS is spoken on port 8883
	ClientID, Username, Password string
	PublishTopic, SubscribeTopic string
	Keepalive                    uint16 // seconds; 0: none
}

// parse takes the address apart as the firmware does.
func (l Login) parse() (deviceURL, error) {
	if l.URL != "" {
		return parseWSURL(l.URL)
	}
	return parseEndpoint(l.Endpoint)
}

// Address is the host:port that the device dials. A text on which the firmware aborts is an error.
func (l Login) Address() (string, error) {
	u, err := l.parse()
	return net.JoinHostPort(u.host, strconv.Itoa(u.port)), err
}

// Connect is the CONNECT packet of the login, as esp-mqtt writes it.
func (l Login) Connect() []byte { return appendConnect(nil, &l) }

// Line is a device's connection without the device: what the server sends waits to be read, and what the caller writes is
// sent as the firmware frames it. Pings and acknowledgements are answered while somebody reads. One goroutine reads; Send,
// SendAudio, Publish and Close may be called by any number of them.
type Line struct {
	ws      *wsConn
	mqtt    *mqttConn
	version int32
	next    Message
}

// Message is what a server sent.
type Message struct {
	Audio bool   // an Opus packet, else the text of a message
	Data  []byte // valid until the next read
	ready bool
}

// Dial connects and logs in. The firmware's own limits apply: 10 s for the answer of a WebSocket, 10 s in all for MQTT. A
// certificate is checked as o specifies; only o.CA and o.Insecure count.
func (l Login) Dial(ctx context.Context, o Options) (*Line, error) {
	tcp, err := l.DialRaw(ctx, o)
	if err != nil {
		return nil, err
	}
	return l.Open(ctx, tcp)
}

// DialRaw is Dial without the login: nothing is sent.
func (l Login) DialRaw(ctx context.Context, o Options) (net.Conn, error) {
	u, err := l.parse()
	if err != nil {
		return nil, err
	}
	d, err := newDialer(o.CA, o.Insecure)
	if err != nil {
		return nil, err
	}
	return d.dial(ctx, 0, u)
}

// Open logs in over a connection that the caller has made; it is closed if that fails.
func (l Login) Open(ctx context.Context, tcp net.Conn) (*Line, error) {
	u, err := l.parse()
	if err != nil {
		return nil, errors.Join(err, tcp.Close())
	}
	line := &Line{version: l.Version}
	if l.URL != "" {
		line.ws, err = openWS(ctx, tcp, u, &l, uint32(len(l.Device)))
	} else {
		ctx, cancel := context.WithTimeout(ctx, mqttWait)
		defer cancel()
		line.mqtt, err = openMQTT(ctx, tcp, &l)
	}
	if err != nil {
		return nil, err
	}
	return line, nil
}

// KeepAlive sends PINGREQ packets as esp-mqtt does, until the connection ends: when nothing was sent for half of the
// keepalive. It does nothing on a WebSocket, and must be called at most once.
func (l *Line) KeepAlive() {
	if l.mqtt == nil || l.mqtt.half == 0 {
		return
	}
	var again func()
	again = func() {
		if next, _ := l.mqtt.ping(time.Now()); next > 0 {
			time.AfterFunc(next, again)
		}
	}
	time.AfterFunc(l.mqtt.half, again)
}

// Receive waits for the next message. At the end of the connection, which a Close frame is too, it returns an error.
func (l *Line) Receive() (Message, error) {
	for l.next = (Message{}); !l.next.ready; {
		if l.mqtt != nil {
			text, err := l.mqtt.step()
			if err != nil {
				return Message{}, err
			}
			l.next = Message{Data: text, ready: text != nil}
			continue
		}
		if err := l.ws.step((*lineEvents)(l)); err != nil {
			return Message{}, err
		}
		if l.ws.closed.Load() {
			return Message{}, errNotOpen
		}
	}
	if l.next.Audio {
		opus, _, err := unpackAudio(l.version, l.next.Data)
		return Message{Audio: true, Data: opus}, err
	}
	return l.next, nil
}

// lineEvents are the events of a Line.
type lineEvents Line

func (l *lineEvents) onMessage(binary bool, data []byte) { l.next = Message{binary, data, true} }
func (l *lineEvents) onPing()                            {}
func (l *lineEvents) onClose()                           {}

// Send sends one JSON message, without looking at it.
func (l *Line) Send(text []byte) error {
	room := getBuffer()
	defer putBuffer(room)
	*room = append(appendFrameRoom(*room), text...)
	return l.link().write(opText, room)
}

// SendAudio sends one Opus packet over a WebSocket.
func (l *Line) SendAudio(opus []byte) error {
	if l.ws == nil {
		return errors.New("audio of an MQTT device goes over UDP")
	}
	room := getBuffer()
	defer putBuffer(room)
	*room = packAudio(appendFrameRoom(*room), l.version, 0, opus)
	return l.ws.write(opBinary, room)
}

// Publish publishes to any topic over MQTT, where a device has only one.
func (l *Line) Publish(topic string, payload []byte) error {
	if l.mqtt == nil {
		return errors.New("a WebSocket has no topics")
	}
	return l.mqtt.send(func(b []byte) []byte { return appendPublish(b, topic, payload) })
}

// Close ends TCP without a Close frame or DISCONNECT, as a lost network does.
func (l *Line) Close() { l.link().drop() }

func (l *Line) link() link {
	if l.mqtt != nil {
		return l.mqtt
	}
	return l.ws
}

// Packet is one MQTT 3.1.1 packet.
type Packet struct {
	Type byte   // section 2.2.1
	Body []byte // after the fixed header; valid until the next read
}

// Types of packets.
const (
	PacketConnect = mqttConnect
	PacketConnack = mqttConnAck
	PacketPublish = mqttPublish
)

// ReadPackets calls f with every packet of a server, until the connection ends or f returns false, and returns why it
// ended. It answers nothing.
func ReadPackets(c net.Conn, f func(Packet) bool) error {
	r := mqttReader{byteReader{src: c, buf: make([]byte, idleBuffer)}}
	for {
		p, err := r.next()
		if err != nil {
			return err
		}
		if !f(Packet{p.kind, p.body}) {
			return nil
		}
	}
}

// AppendPublish appends a PUBLISH of quality of service 0, whatever the topic is.
func AppendPublish(b []byte, topic string, payload []byte) []byte {
	return appendPublish(b, topic, payload)
}

// AppendSubscribe appends a SUBSCRIBE to one topic, which no firmware sends.
func AppendSubscribe(b []byte, id uint16, topic string) []byte { return appendSubscribe(b, id, topic) }

// AudioHeader is the length of a packet's header, in bytes: type, flags, length of the payload, number of the channel,
// timestamp and sequence (main/protocols/mqtt_protocol.cc:180-212).
const AudioHeader = udpHeader

// Audio is the audio channel of one conversation over UDP. Not safe for concurrent use: seal with one value, open with
// another.
type Audio struct {
	Session string // session_id of the server's hello
	Server  netip.AddrPort
	keys    udpKeys
}

// ReadAudio reads the server's hello as firmware v2.4 does. It fails where that refuses it, or where the server is not an
// IPv4 address.
func ReadAudio(hello []byte) (*Audio, error) {
	var doc jsonDoc
	root, err := doc.parse(hello)
	if err != nil {
		return nil, err
	}
	offer, err := readOffer(root.get("udp"), false)
	if err != nil {
		return nil, err
	}
	keys, err := newUDPKeys(offer.key, offer.nonce, false)
	if err != nil {
		return nil, err
	}
	server, err := netip.ParseAddr(offer.server)
	if err != nil || !bytes.Equal(root.get("transport").bytes(), []byte("udp")) {
		return nil, fmt.Errorf("%w: %.300s", errOffer, hello)
	}
	return &Audio{Session: root.get("session_id").string(), Server: netip.AddrPortFrom(server, uint16(offer.port)), keys: keys}, nil
}

// SSRC is the number of the channel, from its nonce.
func (a *Audio) SSRC() [4]byte { return [4]byte(a.keys.nonce[4:8]) }

// Seal appends the next packet. Nothing is appended for an empty one, though it takes a sequence number.
func (a *Audio) Seal(b, opus []byte, timestamp uint32) []byte { return a.keys.seal(b, opus, timestamp) }

// SealAs is Seal with a sequence number of the caller's choice, from 1.
func (a *Audio) SealAs(sequence uint32, opus []byte) []byte {
	a.keys.local = sequence - 1
	return a.keys.seal(nil, opus, 0)
}

// Open decrypts a packet of the server in place, and reports what the device does with it.
func (a *Audio) Open(packet []byte) (opus []byte, verdict Verdict) {
	opus, _, verdict = a.keys.open(packet)
	return opus, verdict
}
