// Package load is what the bench and its baselines share: devices and callers that speak just enough HTTP, WebSocket and
// MQTT to be understood. They share two cores with the server, so everything else is left out; and as both sides are
// measured with the same load, their ratio does not depend on it.
package load

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

// Dial connects as client number i. Clients are spread over 127.0.0.2 and up, 1500 each: beyond that the kernel's
// search for a free port takes longer than the connect. The connection works for ExchangeLimit, so that a server that
// falls silent ends the run.
func Dial(ctx context.Context, address string, i int) (net.Conn, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(2+i/1500))}, Timeout: ExchangeLimit, Control: lateBind}
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return c, c.SetDeadline(time.Now().Add(ExchangeLimit))
}

// DatagramBatch is how many UDP packets leave with one system call.
const DatagramBatch = 64

// ExchangeLimit bounds what is said on one connection until the device is ready.
const ExchangeLimit = time.Minute

// ReadResponse reads one HTTP response with a Content-Length. The body is valid until the next read.
func ReadResponse(br *bufio.Reader) (status int, body []byte, err error) {
	length := -1
	for {
		line, err := br.ReadSlice('\n')
		if err != nil {
			return 0, nil, err
		}
		if status == 0 {
			if len(line) < 12 {
				return 0, nil, fmt.Errorf("status line %q", line)
			}
			if status, err = strconv.Atoi(string(line[9:12])); err != nil {
				return 0, nil, fmt.Errorf("status line %q", line)
			}
			continue
		}
		if len(line) == 2 {
			break
		}
		if value, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return 0, nil, fmt.Errorf("header %q", line)
			}
		}
	}
	if length < 0 {
		return status, nil, errors.New("response without Content-Length")
	}
	body, err = br.Peek(length)
	if err == nil {
		_, err = br.Discard(length)
	}
	return status, body, err
}

// Upgrade turns a fresh connection into a WebSocket. The key is fixed: nobody checks the answer.
func Upgrade(c net.Conn, br *bufio.Reader, path, headers string) error {
	request := "GET " + path + " HTTP/1.1\r\nHost: bench\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" +
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n" + headers + "\r\n"
	if _, err := io.WriteString(c, request); err != nil {
		return err
	}
	for first := true; ; first = false {
		line, err := br.ReadSlice('\n')
		switch {
		case err != nil:
			return fmt.Errorf("upgrade: %w", err)
		case first && !bytes.Contains(line, []byte(" 101 ")):
			return fmt.Errorf("upgrade refused: %q", line)
		case len(line) == 2:
			return nil
		}
	}
}

// WebSocket opcodes (RFC 6455, 5.2).
const (
	OpText = 1
	OpPing = 9
	OpPong = 10
)

// AppendFrame appends a client's frame, masked with zeros.
func AppendFrame(dst []byte, op byte, payload []byte) []byte {
	dst = append(dst, 0x80|op)
	if len(payload) < 126 {
		dst = append(dst, 0x80|byte(len(payload)))
	} else {
		dst = append(dst, 0x80|126, byte(len(payload)>>8), byte(len(payload)))
	}
	dst = append(dst, 0, 0, 0, 0)
	return append(dst, payload...)
}

// ReadFrame reads a server's frame into buf, or a larger buffer if it does not fit.
func ReadFrame(br *bufio.Reader, buf []byte) (op byte, payload []byte, err error) {
	head, err := br.Peek(2)
	if err != nil {
		return 0, nil, err
	}
	op, n := head[0]&15, int(head[1]&127)
	if _, err := br.Discard(2); err != nil {
		return 0, nil, err
	}
	switch n {
	case 126:
		if head, err = br.Peek(2); err != nil {
			return 0, nil, err
		}
		n = int(binary.BigEndian.Uint16(head))
		if _, err := br.Discard(2); err != nil {
			return 0, nil, err
		}
	case 127:
		return 0, nil, errors.New("frame over 64 KiB")
	}
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	_, err = io.ReadFull(br, buf[:n])
	return op, buf[:n], err
}
