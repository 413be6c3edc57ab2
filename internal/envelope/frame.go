package envelope

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Framing is the layout of binary WebSocket messages, which the device receives in
// the OTA reply (websocket_protocol.cc:29-52, protocol.h:17-31). One message
// holds one Opus packet. All integers are big-endian.
//
//	1  the bare packet
//	2  u16 version=2, u16 type=0, u32 reserved, u32 timestamp (ms), u32 size, packet
//	3  u8 type=0, u8 reserved, u16 size, packet
type Framing uint8

// Framings.
const (
	Framing1 Framing = 1
	Framing2 Framing = 2
	Framing3 Framing = 3
)

const (
	header2 = 16
	header3 = 4
)

// Errors of ParseFrame.
var (
	ErrFrameShort   = errors.New("binary frame is shorter than its header")
	ErrFrameLength  = errors.New("binary frame's length field does not match its bytes")
	ErrFrameVersion = errors.New("binary frame announces another version")
	ErrFrameType    = errors.New("binary frame is not of type 0 (audio)")
	ErrFrameEmpty   = errors.New("binary frame holds no audio")
)

// FramingOf maps a Protocol-Version to its framing: the firmware frames every
// version but 2 and 3 like 1 (websocket_protocol.cc:29-52).
func FramingOf(version int) Framing {
	if version == 2 || version == 3 {
		return Framing(version)
	}
	return Framing1
}

// Frame is one Opus packet. Timestamp is in milliseconds and 0 unless the
// device is a server-AEC build with framing 2.
type Frame struct {
	Timestamp uint32
	Opus      []byte
}

// ParseFrame parses one binary message. The firmware checks nothing here; the server
// checks everything. Opus points into msg.
func (f Framing) ParseFrame(msg []byte) (Frame, error) {
	var frame Frame
	switch f {
	case Framing2:
		if len(msg) < header2 {
			return Frame{}, fmt.Errorf("%w: %d of %d bytes", ErrFrameShort, len(msg), header2)
		}
		if v := binary.BigEndian.Uint16(msg); v != 2 {
			return Frame{}, fmt.Errorf("%w: %d instead of 2", ErrFrameVersion, v)
		}
		if t := binary.BigEndian.Uint16(msg[2:]); t != 0 {
			return Frame{}, fmt.Errorf("%w but %d", ErrFrameType, t)
		}
		frame.Timestamp = binary.BigEndian.Uint32(msg[8:])
		frame.Opus = msg[header2:]
		if n := binary.BigEndian.Uint32(msg[12:]); uint64(n) != uint64(len(frame.Opus)) {
			return Frame{}, fmt.Errorf("%w: %d announced, %d present", ErrFrameLength, n, len(frame.Opus))
		}
	case Framing3:
		if len(msg) < header3 {
			return Frame{}, fmt.Errorf("%w: %d of %d bytes", ErrFrameShort, len(msg), header3)
		}
		if msg[0] != 0 {
			return Frame{}, fmt.Errorf("%w but %d", ErrFrameType, msg[0])
		}
		frame.Opus = msg[header3:]
		if n := binary.BigEndian.Uint16(msg[2:]); int(n) != len(frame.Opus) {
			return Frame{}, fmt.Errorf("%w: %d announced, %d present", ErrFrameLength, n, len(frame.Opus))
		}
	default:
		frame.Opus = msg
	}
	if len(frame.Opus) == 0 {
		return Frame{}, ErrFrameEmpty
	}
	return frame, nil
}

// AppendFrame appends the binary message of one Opus packet. Framings 1 and 3
// have no timestamp. A packet over 65,535 bytes does not fit framing 3 and is
// refused with ErrFrameLength, an empty one with ErrFrameEmpty.
func (f Framing) AppendFrame(dst []byte, frame Frame) ([]byte, error) {
	if len(frame.Opus) == 0 {
		return dst, ErrFrameEmpty
	}
	if len(frame.Opus) > MaxDeviceMessage {
		return dst, fmt.Errorf("%w: %d bytes of audio in one packet", ErrFrameLength, len(frame.Opus))
	}
	switch f {
	case Framing2:
		dst = append(dst, 0, 2, 0, 0, 0, 0, 0, 0)
		dst = binary.BigEndian.AppendUint32(dst, frame.Timestamp)
		dst = binary.BigEndian.AppendUint32(dst, uint32(len(frame.Opus)))
	case Framing3:
		dst = append(dst, 0, 0)
		dst = binary.BigEndian.AppendUint16(dst, uint16(len(frame.Opus)))
	}
	return append(dst, frame.Opus...), nil
}
