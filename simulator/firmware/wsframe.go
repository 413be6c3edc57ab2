package firmware

import (
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"sync"
)

// WebSocket opcodes (RFC 6455, section 11.8).
const (
	opContinuation = 0x0
	opText         = 0x1
	opBinary       = 0x2
	opClose        = 0x8
	opPing         = 0x9
	opPong         = 0xA
)

const (
	// maxOutgoing is the limit of WebSocket::Send (esp-ml307 src/web_socket.cc:205).
	maxOutgoing = 65535
	// maxControl is the limit of SendControlFrame.
	maxControl = 125
	// maxIncoming stands for the heap of the chip: a bigger message takes a real device down.
	maxIncoming = 1 << 20
	// idleBuffer is what a quiet connection keeps for reading; larger frames borrow from a pool.
	idleBuffer = 512
	// growStep is how much memory a long frame is given at a time.
	growStep = 32 << 10
	// frameRoom is the space in front of a payload for header (2 to 4 bytes) and mask.
	frameRoom = 8
)

var (
	errTooLong   = errors.New("message over 65535 bytes")
	errNotOpen   = errors.New("socket is not open")
	errMemory    = errors.New("incoming message is larger than the device's memory")
	errHandshake = errors.New("handshake refused")
)

// buffers lends byte slices for messages in either direction.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 2048); return &b }}

func getBuffer() *[]byte { return buffers.Get().(*[]byte) }

func putBuffer(b *[]byte) {
	if cap(*b) <= 70<<10 {
		*b = (*b)[:0]
		buffers.Put(b)
	}
}

// frame is one frame as received; payload is valid until the next read.
type frame struct {
	fin     bool
	opcode  byte
	payload []byte
}

// byteReader reads a stream through a small buffer and borrows from a pool what does not fit. One goroutine at a time.
type byteReader struct {
	src  io.Reader
	buf  []byte
	r, w int
	big  *[]byte
}

// frameReader splits a byte stream into frames the way WebSocket::OnTcpData does: reserved bits are ignored, a mask is
// tolerated, unknown opcodes are passed up.
type frameReader struct{ byteReader }

// need makes n bytes available at buf[r:], n at most len(buf).
func (f *byteReader) need(n int) error {
	if f.w-f.r >= n {
		return nil
	}
	if f.r > 0 {
		copy(f.buf, f.buf[f.r:f.w])
		f.w -= f.r
		f.r = 0
	}
	for f.w < n {
		k, err := f.src.Read(f.buf[f.w:])
		f.w += k
		if err != nil && f.w < n {
			return err
		}
	}
	return nil
}

// release gives back what the last take borrowed.
func (f *byteReader) release() {
	if f.big != nil {
		putBuffer(f.big)
		f.big = nil
	}
}

// next returns the next frame.
func (f *frameReader) next() (frame, error) {
	f.release()
	if err := f.need(2); err != nil {
		return frame{}, err
	}
	out := frame{fin: f.buf[f.r]&0x80 != 0, opcode: f.buf[f.r] & 0x0F}
	masked := f.buf[f.r+1]&0x80 != 0
	size, head := uint64(f.buf[f.r+1]&0x7F), 2
	switch size {
	case 126:
		head = 4
	case 127:
		head = 10
	}
	if masked {
		head += 4
	}
	if err := f.need(head); err != nil {
		return frame{}, err
	}
	h := f.buf[f.r : f.r+head]
	switch size {
	case 126:
		size = uint64(binary.BigEndian.Uint16(h[2:]))
	case 127:
		size = binary.BigEndian.Uint64(h[2:])
	}
	if size > maxIncoming {
		return frame{}, errMemory
	}
	var mask [4]byte
	if masked {
		copy(mask[:], h[head-4:])
	}
	f.r += head
	payload, err := f.take(int(size))
	if err != nil {
		return frame{}, err
	}
	if masked {
		applyMask(payload, mask)
	}
	out.payload = payload
	return out, nil
}

// take returns n payload bytes, from the small buffer when they fit there.
func (f *byteReader) take(n int) ([]byte, error) {
	if n <= len(f.buf) {
		if err := f.need(n); err != nil {
			return nil, err
		}
		p := f.buf[f.r : f.r+n]
		f.r += n
		return p, nil
	}
	f.big = getBuffer()
	b := append((*f.big)[:0], f.buf[f.r:f.w]...)
	f.r = f.w
	// Memory grows with what arrives, not with what the header announces.
	for len(b) < n {
		b = slices.Grow(b, min(n-len(b), growStep))
		k, err := f.src.Read(b[len(b):min(cap(b), n)])
		b = b[:len(b)+k]
		if err != nil && len(b) < n {
			return nil, err
		}
	}
	*f.big = b
	return b, nil
}

// appendFrameRoom starts a message buffer whose payload begins after the space for the header.
func appendFrameRoom(b []byte) []byte { return append(b[:0], make([]byte, frameRoom)...) }

// sealFrame turns a buffer begun with appendFrameRoom into one masked, final frame, in place, and returns the bytes to
// write. Lengths use 7 or 16 bits, never 64: the firmware has no third form.
func sealFrame(b []byte, opcode byte, mask [4]byte) []byte {
	n := len(b) - frameRoom
	applyMask(b[frameRoom:], mask)
	copy(b[frameRoom-4:], mask[:])
	if n < 126 {
		b[2], b[3] = 0x80|opcode, 0x80|byte(n)
		return b[2:]
	}
	b[0], b[1] = 0x80|opcode, 0x80|126
	binary.BigEndian.PutUint16(b[2:], uint16(n))
	return b
}

func applyMask(b []byte, mask [4]byte) {
	word := uint64(binary.LittleEndian.Uint32(mask[:]))
	word |= word << 32
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)^word)
		b = b[8:]
	}
	for i := range b {
		b[i] ^= mask[i&3]
	}
}
