package load

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
)

// First bytes of the MQTT 3.1.1 packets that devices send and take (sections 2.2 and 3).
const (
	MQTTConnect = 0x10
	MQTTConnack = 0x20
	MQTTPublish = 0x30
)

// Framing is how messages travel on a connection: in WebSocket frames, or, with a topic, in PUBLISH packets for it.
type Framing struct{ Topic string }

// Append appends a message.
func (f Framing) Append(dst, message []byte) []byte {
	if f.Topic == "" {
		return AppendFrame(dst, OpText, message)
	}
	dst = append(dst, MQTTPublish)
	dst = binary.AppendUvarint(dst, uint64(2+len(f.Topic)+len(message))) // remaining lengths are varints (section 2.2.3)
	return append(AppendString(dst, f.Topic), message...)
}

// Read reads what comes next. A PUBLISH is reported as the WebSocket text that it would be, other packets as 0.
func (f Framing) Read(br *bufio.Reader, buf []byte) (op byte, message []byte, err error) {
	if f.Topic == "" {
		return ReadFrame(br, buf)
	}
	first, body, err := ReadPacket(br, buf)
	if err != nil || first&0xf0 != MQTTPublish {
		return 0, nil, err
	}
	if len(body) < 2 || len(body) < 2+int(binary.BigEndian.Uint16(body)) {
		return 0, nil, errors.New("PUBLISH without its topic")
	}
	return OpText, body[2+binary.BigEndian.Uint16(body):], nil
}

// AppendString appends an MQTT string.
func AppendString(dst []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(dst, uint16(len(s))), s...)
}

// ReadPacket reads one MQTT packet into buf, or a larger buffer if it does not fit.
func ReadPacket(br *bufio.Reader, buf []byte) (first byte, body []byte, err error) {
	if first, err = br.ReadByte(); err != nil {
		return 0, nil, err
	}
	n, err := binary.ReadUvarint(br)
	if err != nil {
		return 0, nil, err
	}
	if n > 64<<10 {
		return 0, nil, errors.New("MQTT packet over 64 KiB")
	}
	if uint64(cap(buf)) < n {
		buf = make([]byte, n)
	}
	_, err = io.ReadFull(br, buf[:n])
	return first, buf[:n], err
}
