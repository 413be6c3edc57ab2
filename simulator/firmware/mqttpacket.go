package firmware

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// MQTT 3.1.1 control packet types (section 2.2.1).
const (
	mqttConnect   = 1
	mqttConnAck   = 2
	mqttPublish   = 3
	mqttPubAck    = 4
	mqttPubRel    = 6
	mqttPubComp   = 7
	mqttSubscribe = 8
	mqttPingReq   = 12
	mqttPingResp  = 13
)

var errMQTT = errors.New("malformed MQTT packet")

func appendRemaining(b []byte, n int) []byte {
	for n >= 128 {
		b = append(b, byte(n)|0x80)
		n >>= 7
	}
	return append(b, byte(n))
}

func appendMQTTString(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
}

// appendConnect writes CONNECT as esp-mqtt does: level 4, clean session, no will, empty credentials left out.
func appendConnect(b []byte, l *Login) []byte {
	flags, n := byte(0x02), 10+2+len(l.ClientID)
	if l.Username != "" {
		flags |= 0x80
		n += 2 + len(l.Username)
	}
	if l.Password != "" {
		flags |= 0x40
		n += 2 + len(l.Password)
	}
	b = appendRemaining(append(b, mqttConnect<<4), n)
	b = append(appendMQTTString(b, "MQTT"), 4, flags)
	b = binary.BigEndian.AppendUint16(b, l.Keepalive)
	b = appendMQTTString(b, l.ClientID)
	if l.Username != "" {
		b = appendMQTTString(b, l.Username)
	}
	if l.Password != "" {
		b = appendMQTTString(b, l.Password)
	}
	return b
}

// appendPublish writes a PUBLISH of quality of service 0, not retained.
func appendPublish(b []byte, topic string, payload []byte) []byte {
	b = appendRemaining(append(b, mqttPublish<<4), 2+len(topic)+len(payload))
	return append(appendMQTTString(b, topic), payload...)
}

// appendSubscribe requests one topic at quality of service 0.
func appendSubscribe(b []byte, id uint16, topic string) []byte {
	b = appendRemaining(append(b, mqttSubscribe<<4|2), 2+2+len(topic)+1)
	b = binary.BigEndian.AppendUint16(b, id)
	return append(appendMQTTString(b, topic), 0)
}

// appendAck writes PUBACK, PUBREC (one above PUBACK) or PUBCOMP.
func appendAck(b []byte, kind byte, id uint16) []byte {
	return binary.BigEndian.AppendUint16(append(b, kind<<4, 2), id)
}

// mqttPacket is one packet as received; body is valid until the next read.
type mqttPacket struct {
	kind, flags byte
	body        []byte
}

// mqttReader splits a byte stream into packets.
type mqttReader struct{ byteReader }

// next returns the next packet: errMemory for one larger than the chip's heap, errMQTT for a length of five bytes.
func (r *mqttReader) next() (mqttPacket, error) {
	r.release()
	if err := r.need(2); err != nil {
		return mqttPacket{}, err
	}
	out := mqttPacket{kind: r.buf[r.r] >> 4, flags: r.buf[r.r] & 0x0F}
	size, head := 0, 1
	for {
		if head > 4 {
			return mqttPacket{}, fmt.Errorf("%w: remaining length of more than four bytes", errMQTT)
		}
		if err := r.need(head + 1); err != nil {
			return mqttPacket{}, err
		}
		c := r.buf[r.r+head]
		size |= int(c&0x7F) << (7 * (head - 1))
		head++
		if c&0x80 == 0 {
			break
		}
	}
	if size > maxIncoming {
		return mqttPacket{}, errMemory
	}
	r.r += head
	body, err := r.take(size)
	out.body = body
	return out, err
}

// publish takes a PUBLISH apart. The device ignores the topic.
func (p mqttPacket) publish() (payload []byte, qos byte, id uint16, err error) {
	if len(p.body) < 2 {
		return nil, 0, 0, fmt.Errorf("%w: PUBLISH without topic", errMQTT)
	}
	rest := p.body[2:]
	topic := int(binary.BigEndian.Uint16(p.body))
	if topic > len(rest) {
		return nil, 0, 0, fmt.Errorf("%w: PUBLISH with a topic of %d bytes in %d", errMQTT, topic, len(rest))
	}
	rest = rest[topic:]
	if qos = p.flags >> 1 & 3; qos > 0 {
		if len(rest) < 2 {
			return nil, 0, 0, fmt.Errorf("%w: PUBLISH without packet id", errMQTT)
		}
		id, rest = binary.BigEndian.Uint16(rest), rest[2:]
	}
	return rest, qos, id, nil
}
