package firmware

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

const handshakeTimeout = 10 * time.Second

// link is the device's socket as the rest of the device sees it; tests put a recorder here.
type link interface {
	// write sends one message. It may be called by several goroutines.
	write(opcode byte, room *[]byte) error
	// drop closes the TCP connection without a Close frame, as the firmware does. Any number of times, by anyone.
	drop()
}

// wsConn is one client connection after esp-ml307 src/web_socket.cc. Reading belongs to one goroutine; write and drop
// to anyone.
type wsConn struct {
	tcp    net.Conn
	reader frameReader

	wmu  sync.Mutex
	rand uint32

	// closed is set by a Close frame of the server: the firmware then sends nothing more but keeps the TCP socket.
	closed atomic.Bool

	fragmented, fragBinary bool
	fragment               []byte
}

// upgradeRequest builds the request with the header order of a std::map and a Host without port.
func upgradeRequest(u deviceURL, l *Login, key string) []byte {
	b := make([]byte, 0, 512)
	b = append(append(append(b, "GET "...), u.path...), " HTTP/1.1\r\nHost: "...)
	b = append(append(b, u.host...), "\r\n"...)
	if l.Token != "" {
		token := l.Token
		if !bytes.ContainsRune([]byte(token), ' ') {
			token = "Bearer " + token
		}
		b = append(append(append(b, "Authorization: "...), token...), "\r\n"...)
	}
	b = append(append(b, "Client-Id: "...), l.Client...)
	b = append(append(b, "\r\nConnection: Upgrade\r\nDevice-Id: "...), l.Device...)
	b = strconv.AppendInt(append(b, "\r\nProtocol-Version: "...), int64(l.Version), 10)
	b = append(append(b, "\r\nSec-WebSocket-Key: "...), key...)
	return append(b, "\r\nSec-WebSocket-Version: 13\r\nUpgrade: websocket\r\n\r\n"...)
}

// dialWS opens TCP (or TLS) and performs the handshake. seed stands for the chip's rand(), which is never seeded and so
// gives the same key and masks at every boot.
func dialWS(ctx context.Context, d *dialer, index int, u deviceURL, l *Login, seed uint32) (*wsConn, error) {
	tcp, err := d.dial(ctx, index, u)
	if err != nil {
		return nil, err
	}
	return openWS(ctx, tcp, u, l, seed)
}

// openWS is dialWS on a connection that is there.
func openWS(ctx context.Context, tcp net.Conn, u deviceURL, l *Login, seed uint32) (*wsConn, error) {
	c := &wsConn{tcp: tcp, rand: seed | 1}
	var raw [16]byte
	for i := 0; i < len(raw); i += 4 {
		binary.LittleEndian.PutUint32(raw[i:], c.next())
	}
	stop := context.AfterFunc(ctx, c.drop)
	defer stop()
	err := c.handshake(upgradeRequest(u, l, base64.StdEncoding.EncodeToString(raw[:])))
	if err != nil {
		c.drop()
		return nil, err
	}
	return c, nil
}

func (c *wsConn) handshake(request []byte) error {
	if err := c.tcp.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	if _, err := c.tcp.Write(request); err != nil {
		return err
	}
	tmp := getBuffer()
	defer putBuffer(tmp)
	answer := (*tmp)[:0]
	end := -1
	for end < 0 {
		if len(answer) == cap(answer) {
			if len(answer) > 64<<10 {
				return fmt.Errorf("%w: answer headers without an end", errHandshake)
			}
			answer = append(answer, 0)[:len(answer)]
		}
		n, err := c.tcp.Read(answer[len(answer):cap(answer)])
		from := max(0, len(answer)-3)
		answer = answer[:len(answer)+n]
		if i := bytes.Index(answer[from:], []byte("\r\n\r\n")); i >= 0 {
			end = from + i + 4
		} else if err != nil {
			return fmt.Errorf("%w: no complete answer: %w", errHandshake, err)
		}
	}
	if !bytes.Contains(answer[:end], []byte("HTTP/1.1 101")) {
		line, _, _ := bytes.Cut(answer, []byte("\r\n"))
		return fmt.Errorf("%w: %s", errHandshake, line)
	}
	rest := answer[end:]
	c.reader = frameReader{byteReader{src: c.tcp, buf: make([]byte, max(idleBuffer, len(rest))), w: len(rest)}}
	copy(c.reader.buf, rest)
	return c.tcp.SetDeadline(time.Time{})
}

// next is a xorshift step: cheap, and it never yields an all-zero mask for long.
func (c *wsConn) next() uint32 {
	c.rand ^= c.rand << 13
	c.rand ^= c.rand >> 17
	c.rand ^= c.rand << 5
	return c.rand
}

// write seals the buffer begun with appendFrameRoom and sends it in one piece.
func (c *wsConn) write(opcode byte, room *[]byte) error {
	if len(*room)-frameRoom > maxOutgoing {
		return errTooLong
	}
	if c.closed.Load() {
		return errNotOpen
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	var mask [4]byte
	binary.LittleEndian.PutUint32(mask[:], c.next())
	_, err := c.tcp.Write(sealFrame(*room, opcode, mask))
	return err
}

func (c *wsConn) drop() { _ = c.tcp.Close() }

// events receives what happens on a connection.
type events interface {
	onMessage(binary bool, data []byte)
	onPing()
	onClose()
}

// read runs until TCP ends and returns why. Messages are delivered from this goroutine.
func (c *wsConn) read(to events) error {
	for {
		if err := c.step(to); err != nil {
			return err
		}
	}
}

// step reads one frame.
func (c *wsConn) step(to events) error {
	f, err := c.reader.next()
	if err != nil {
		return err
	}
	switch f.opcode {
	case opContinuation, opText, opBinary:
		c.data(f, to)
	case opClose:
		c.closed.Store(true)
		to.onClose()
	case opPing:
		to.onPing()
		if len(f.payload) <= maxControl {
			room := getBuffer()
			*room = append(appendFrameRoom(*room), f.payload...)
			// A failed pong shows as the end of the stream in the next read.
			_ = c.write(opPong, room)
			putBuffer(room)
		}
	}
	return nil
}

// data follows the reassembly in OnTcpData, its oddities included: a new message inside a fragmented one is lost, a
// unexpected continuation counts as a message.
func (c *wsConn) data(f frame, to events) {
	if f.opcode != opContinuation {
		if c.fragmented {
			return
		}
		c.fragmented, c.fragBinary = !f.fin, f.opcode == opBinary
		c.fragment = c.fragment[:0]
		if f.fin {
			to.onMessage(c.fragBinary, f.payload)
			return
		}
	}
	c.fragment = append(c.fragment, f.payload...)
	if f.fin {
		to.onMessage(c.fragBinary, c.fragment)
		c.fragment, c.fragmented = nil, false
	}
}
