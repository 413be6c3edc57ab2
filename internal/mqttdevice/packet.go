package mqttdevice

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/eclipse/paho.mqtt.golang/packets"
)

// Errors of a fixed header (MQTT 3.1.1, section 2.2).
var (
	errLength   = errors.New("remaining length has more than four bytes")
	errType     = errors.New("packet type is unknown or only for clients")
	errFlags    = errors.New("the flags of the fixed header are invalid")
	errTooLarge = errors.New("the packet is larger than the limit")
)

// header is a fixed header: the first byte and the length of the body.
type header struct {
	first  byte
	length int
	size   int // of the header, in bytes
}

func (h header) kind() byte { return h.first >> 4 }

// parseHeader parses the fixed header at the beginning of b. ok is false while bytes are
// missing. The length is checked before any of the body is read or allocated; paho's
// ReadPacket would allocate it first, and would accept a fourth length byte that
// announces a fifth.
func parseHeader(b []byte, limit int) (h header, ok bool, err error) {
	if len(b) == 0 {
		return h, false, nil
	}
	h.first = b[0]
	if err := checkFirst(h.first); err != nil {
		return h, false, err
	}
	for i := 0; ; i++ {
		if i == 4 {
			return h, false, errLength
		}
		if len(b) < i+2 {
			return h, false, nil
		}
		h.length |= int(b[i+1]&0x7f) << (7 * i)
		if b[i+1]&0x80 == 0 {
			h.size = i + 2
			break
		}
	}
	if h.length > limit {
		return h, false, fmt.Errorf("%w: it announces %d bytes, the limit is %d", errTooLarge, h.length, limit)
	}
	return h, true, nil
}

// checkFirst allows the packets that a client may send, with valid flags (table 2.2).
// Some 3.1 clients send SUBSCRIBE and UNSUBSCRIBE with 0.
func checkFirst(first byte) error {
	flags := first & 0x0f
	switch first >> 4 {
	case packets.Publish:
		if flags&0x06 == 0x06 {
			return errFlags
		}
	case packets.Subscribe, packets.Unsubscribe:
		if flags != 2 && flags != 0 && flags != 0x0a {
			return errFlags
		}
	case packets.Connect, packets.Puback, packets.Pingreq, packets.Disconnect:
		if flags != 0 {
			return errFlags
		}
	default:
		return errType
	}
	return nil
}

// decode parses a body with paho. The packet keeps no reference to it.
func decode(h header, body []byte) (packets.ControlPacket, error) {
	p, err := packets.NewControlPacketWithHeader(packets.FixedHeader{MessageType: h.kind(), Dup: h.first&8 != 0,
		Qos: h.first >> 1 & 3, Retain: h.first&1 != 0, RemainingLength: h.length})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errType, err)
	}
	// A Buffer, because paho takes the end of a Reader for a missing field if the last
	// field is empty.
	if err := p.Unpack(bytes.NewBuffer(body)); err != nil {
		return nil, fmt.Errorf("a field of the packet is missing: %w", err)
	}
	if size := sizeOf(p); size != h.length { // paho fills missing bytes with zeros
		return nil, fmt.Errorf("%s has %d bytes where its fields need %d", packets.PacketNames[h.kind()], h.length, size)
	}
	return p, nil
}

// sizeOf returns the length of the body of a packet with these fields (section 3).
func sizeOf(p packets.ControlPacket) int {
	switch p := p.(type) {
	case *packets.ConnectPacket:
		size := 2 + len(p.ProtocolName) + 4 + 2 + len(p.ClientIdentifier)
		if p.WillFlag {
			size += 4 + len(p.WillTopic) + len(p.WillMessage)
		}
		if p.UsernameFlag {
			size += 2 + len(p.Username)
		}
		if p.PasswordFlag {
			size += 2 + len(p.Password)
		}
		return size
	case *packets.SubscribePacket:
		size := 2
		for _, topic := range p.Topics {
			size += 3 + len(topic)
		}
		return size
	case *packets.UnsubscribePacket:
		size := 2
		for _, topic := range p.Topics {
			size += 2 + len(topic)
		}
		return size
	case *packets.PubackPacket:
		return 2
	}
	return 0
}

// publish contains the fields of a PUBLISH. It points into the packet.
type publish struct {
	topic, payload []byte
	qos            byte
	dup            bool
	id             uint16
}

var errPublish = errors.New("the PUBLISH ends within its topic or packet id")

// parsePublish parses a PUBLISH without copying (section 3.3): other packets are rare
// after CONNECT.
func parsePublish(h header, body []byte) (p publish, err error) {
	p.qos, p.dup = h.first>>1&3, h.first&8 != 0
	if len(body) < 2 {
		return p, errPublish
	}
	n := int(binary.BigEndian.Uint16(body))
	if body = body[2:]; len(body) < n {
		return p, errPublish
	}
	p.topic, body = body[:n], body[n:]
	if p.qos > 0 {
		if len(body) < 2 {
			return p, errPublish
		}
		p.id, body = binary.BigEndian.Uint16(body), body[2:]
		if p.id == 0 {
			return p, errors.New("PUBLISH with packet id 0")
		}
	}
	p.payload = body
	return p, nil
}

// appendPublish appends a PUBLISH of QoS 0. The device ignores its topic
// (mqtt_protocol.cc:113), and QoS 1 could repeat a hello, which would reset its sequence
// numbers.
func appendPublish(dst, topic, payload []byte) []byte {
	dst = append(dst, packets.Publish<<4)
	n := 2 + len(topic) + len(payload)
	for {
		b := byte(n & 0x7f)
		if n >>= 7; n > 0 {
			dst = append(dst, b|0x80)
			continue
		}
		dst = append(dst, b)
		break
	}
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(topic)))
	dst = append(dst, topic...)
	return append(dst, payload...)
}

func connack(code byte) []byte { return []byte{packets.Connack << 4, 2, 0, code} }

func acknowledge(kind byte, id uint16) []byte {
	return []byte{kind << 4, 2, byte(id >> 8), byte(id)}
}

var pingresp = []byte{packets.Pingresp << 4, 0}

// suback answers a SUBSCRIBE: QoS 0 for the topic that fleetd publishes to, 0x80 (failure)
// for all others. MQTT 3.1 has no failure code; there they get QoS 0 and no messages.
func suback(p *packets.SubscribePacket, topic string, level byte) []byte {
	out := []byte{packets.Suback << 4, byte(2 + len(p.Topics)), byte(p.MessageID >> 8), byte(p.MessageID)}
	for _, asked := range p.Topics {
		code := byte(0)
		if asked != topic && level >= 4 {
			code = 0x80
		}
		out = append(out, code)
	}
	return out
}

// maxTopics limits one SUBSCRIBE; the length of the answer then fits in one byte.
const maxTopics = 100
