package upstream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
	"fleetd/internal/hello"
	"fleetd/internal/jsonspan"
)

// link is one connection to the chat server. Its fields belong to the goroutine
// that runs it; what others read is set before they can see it.
type link struct {
	t     *talk
	ctx   context.Context // ends with the connection: requests of the chat server do
	raw   net.Conn
	free  func() bool // lets go of the conversation's context
	ws    *websocket.Conn
	id    string // the chat server's session id
	heard bool   // its hello
	ping  *time.Timer
	calls atomic.Int32 // requests in progress
	buf   []byte

	speaking  bool      // between `tts` start and stop
	playedOut time.Time // at the latest, when the device will have played what was sent
	hushed    atomic.Bool
}

// errGoodbye ends a connection at the chat server's wish.
var errGoodbye = errors.New("the chat server said goodbye")

// converse dials, says hello and passes on what the chat server says, until
// either side ends it.
func (l *link) converse() (Outcome, error) {
	t := l.t
	err := l.dial()
	if l.free != nil {
		defer l.free()
	}
	if err != nil {
		if t.ctx.Err() != nil {
			return Ended, err
		}
		return DialFailed, err
	}
	var cancel context.CancelFunc
	l.ctx, cancel = context.WithCancel(t.ctx)
	defer cancel()
	t.b.Connections.Add(Dialled, 1)
	defer l.close()
	t.mu.Lock()
	t.link = l
	t.mu.Unlock()
	err = l.send(websocket.TextMessage, appendHello(nil, t.c.Hello()))
	if err == nil {
		err = l.read()
	}
	switch {
	case t.ctx.Err() != nil:
		return Ended, err
	case !l.heard && isTimeout(err):
		return HelloMissing, fmt.Errorf("no hello within %v: %w", HelloTimeout, err)
	}
	return Closed, err
}

func isTimeout(err error) bool {
	var network net.Error
	return errors.As(err, &network) && network.Timeout()
}

func (l *link) dial() error {
	b := l.t.b
	dialer := b.dialer
	dialer.NetDialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := b.dialNet(ctx, network, addr)
		if err == nil {
			l.raw = conn
			l.free = context.AfterFunc(l.t.ctx, l.interrupt) // the handshake itself does not look at its context
		}
		return conn, err
	}
	ws, response, err := dialer.DialContext(l.t.ctx, b.url, b.header(l.t.c.Who(), time.Now()))
	if err != nil {
		if response != nil {
			return fmt.Errorf("the chat server answers %s: %w", response.Status, err)
		}
		return err
	}
	l.ws = ws
	return nil
}

// header is what the request for a device's connection carries, as
// xiaozhi-mqtt-gateway's.
func (b *Bridge) header(who devices.Identity, now time.Time) http.Header {
	device := string(who.Device)
	h := http.Header{}
	h.Set("Device-Id", device)
	h.Set("Client-Id", who.ClientID)
	h.Set("Protocol-Version", "2")
	h.Set("Authorization", "Bearer "+b.opt.Token(who.ClientID, device, now))
	h.Set("User-Agent", "fleetd/"+b.opt.Version)
	if ip := addressOf(who.Remote); ip != "" {
		h.Set("X-Forwarded-For", ip)
	}
	return h
}

// addressOf is the IP address of a remote address; empty if it has none.
func addressOf(remote string) string {
	if addr, err := netip.ParseAddrPort(remote); err == nil {
		return addr.Addr().Unmap().WithZone("").String()
	}
	if addr, err := netip.ParseAddr(remote); err == nil {
		return addr.Unmap().WithZone("").String()
	}
	return ""
}

// appendHello tells the chat server what the device told us. The gateway left
// text_font out, without which a chat server cannot push glyphs.
func appendHello(dst []byte, h hello.Device) []byte {
	dst = append(dst, `{"type":"hello","version":2,"transport":"websocket","audio_params":{"format":"opus","sample_rate":`...)
	dst = strconv.AppendInt(dst, int64(h.Audio.SampleRate), 10)
	dst = append(dst, `,"channels":`...)
	dst = strconv.AppendInt(dst, int64(h.Audio.Channels), 10)
	dst = append(dst, `,"frame_duration":`...)
	dst = strconv.AppendInt(dst, int64(h.Audio.FrameDuration), 10)
	dst = append(dst, `},"features":`...)
	if h.Features == nil {
		dst = append(dst, "{}"...)
	}
	dst = append(dst, h.Features...)
	if h.TextFont != nil {
		dst = append(append(dst, `,"text_font":`...), h.TextFont...)
	}
	return append(dst, '}')
}

// interrupt wakes whoever reads or writes.
func (l *link) interrupt() { _ = l.raw.SetDeadline(time.Now()) } // fails only on a closed connection

// extend gives the chat server time again, unless the conversation is over.
func (l *link) extend(d time.Duration) {
	_ = l.ws.SetReadDeadline(time.Now().Add(d)) // an error shows at the read
	if l.t.ctx.Err() != nil {
		l.interrupt()
	}
}

// close takes leave of the chat server and closes the connection.
func (l *link) close() {
	l.t.mu.Lock()
	if l.ping != nil {
		l.ping.Stop()
	}
	l.t.mu.Unlock()
	frame := websocket.FormatCloseMessage(websocket.CloseNormalClosure, "")
	_ = l.ws.WriteControl(websocket.CloseMessage, frame, time.Now().Add(closeLinger)) // it may be gone
	_ = l.ws.Close()
}

// read passes on what the chat server says. It returns the error that ended it.
func (l *link) read() error {
	l.ws.SetReadLimit(MaxMessage)
	l.ws.SetPongHandler(func(string) error { l.alive(); return nil })
	pong := l.ws.PingHandler()
	l.ws.SetPingHandler(func(data string) error { l.alive(); return pong(data) })
	l.extend(HelloTimeout)
	for {
		kind, r, err := l.ws.NextReader()
		if err != nil {
			return err
		}
		limit := MaxText
		if kind == websocket.BinaryMessage {
			limit = MaxBinary
		}
		fits, err := l.receive(r, limit)
		if err != nil {
			return err
		}
		l.alive()
		if !fits {
			l.bad(BadTooLarge, l.buf, fmt.Errorf("a message over %d bytes", limit))
		} else if err := l.handle(kind, l.buf); err != nil {
			return err
		}
	}
}

// alive notes a sign of life; before its hello the chat server has but one
// deadline.
func (l *link) alive() {
	if l.heard {
		l.extend(DeadAfter)
	}
}

// receive reads one message into the link's buffer; of one over the limit, its
// beginning.
func (l *link) receive(r io.Reader, limit int) (fits bool, err error) {
	if cap(l.buf) > 16<<10 || l.buf == nil {
		l.buf = make([]byte, 0, 1024) // nothing keeps what one large message took
	}
	b := l.buf[:0]
	for len(b) <= limit {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := r.Read(b[len(b):min(cap(b), limit+1)])
		b = b[:len(b)+n]
		l.buf = b
		switch {
		case errors.Is(err, io.EOF):
			return len(b) <= limit, nil
		case err != nil:
			return false, err
		}
	}
	_, err = io.Copy(io.Discard, r) // at most MaxMessage
	return false, err
}

// handle takes one message of the chat server. None does harm: an error is its
// goodbye.
func (l *link) handle(kind int, data []byte) error {
	if kind == websocket.BinaryMessage {
		l.frame(data)
		return nil
	}
	m, err := envelope.Parse(data)
	if err != nil {
		kind := BadJSON
		if errors.Is(err, jsonspan.ErrType) || errors.Is(err, envelope.ErrNoType) {
			kind = BadEnvelope
		}
		l.bad(kind, data, err)
		return nil
	}
	switch string(m.Type) {
	case "hello":
		l.hello(m, data)
	case envelope.TypeMCP:
		l.mcp(m.Payload, data)
	case "goodbye":
		return errGoodbye
	default:
		l.message(string(m.Type), data)
	}
	return nil
}

// bad counts an unusable message, and shows the first of a conversation.
func (l *link) bad(kind Bad, data []byte, err error) {
	t := l.t
	t.b.BadMessages.Add(kind, 1)
	if !t.logged {
		t.logged = true
		t.b.opt.Log.Warn("unusable message of the chat server; further ones of this conversation are only counted",
			"device", t.c.Who().Device, "session", t.c.ID(), "kind", kind, "error", err, "message", fmt.Sprintf("%.80q", data))
	}
}

// hello opens the way for what has queued.
func (l *link) hello(m envelope.Message, data []byte) {
	if l.heard {
		return
	}
	id := string(m.SessionID)
	if len(id) > MaxIDLength {
		l.bad(BadHello, data, fmt.Errorf("a session id of %d bytes", len(id)))
		id = ""
	}
	l.id, l.heard = id, true
	l.extend(DeadAfter)
	t := l.t
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failures = 0
	if t.phase != phaseWanted {
		return // ended meanwhile
	}
	t.phase = phaseUp
	l.ping = time.AfterFunc(PingEvery, l.pingDue)
	t.writeLocked()
}

// pingDue lets the writer ping, so that a chat server whose machine vanished is
// noticed.
func (l *link) pingDue() {
	t := l.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.link == l && t.phase == phaseUp {
		t.pushLocked(item{kind: itemPing})
		l.ping.Reset(PingEvery)
	}
}

// message passes one message on to the device.
func (l *link) message(kind string, data []byte) {
	t := l.t
	err := t.c.Send(by, jsonspan.WithString(data, "session_id", t.c.ID()))
	if err != nil {
		switch code := devices.AsError(err).Code; code {
		case devices.CodeBadRequest, devices.CodeForbidden, devices.CodeTooLarge:
			l.bad(BadRefused, data, err)
		default:
			t.b.Dropped.Add(DropDevice, 1)
		}
		return
	}
	if kind != "tts" {
		return
	}
	switch stateOf(data) {
	case "start":
		l.speaking = true
		if now := time.Now().Add(speech.SpeechGap); l.hushed.Swap(false) || l.playedOut.Before(now) {
			l.playedOut = now
		}
	case "stop":
		l.speaking = false
	}
}

// headerLength is that of binary messages, in bytes: those of framing 2 to the
// chat server. xiaozhi-server answers with a header of its own, of which only
// u32 timestamp at 8 and u32 length at 12 are the same.
const headerLength = 16

// longestPacket is the playing time of the longest packet a device takes;
// playedOut counts with it.
const longestPacket = 60 * time.Millisecond

// frame passes one packet on to the device.
func (l *link) frame(data []byte) {
	if len(data) <= headerLength || uint64(binary.BigEndian.Uint32(data[12:])) != uint64(len(data)-headerLength) {
		l.bad(BadFrame, data[:min(len(data), headerLength)],
			fmt.Errorf("a binary message of %d bytes is no frame with %d bytes of header: does the chat server know that it speaks to a gateway?", len(data), headerLength))
		return
	}
	t := l.t
	if err := t.c.SendAudio(envelope.Frame{Timestamp: binary.BigEndian.Uint32(data[8:]), Opus: data[headerLength:]}); err != nil {
		if devices.AsError(err).Code == devices.CodeBadRequest {
			l.bad(BadAudio, data[:headerLength], err)
		} else {
			t.b.Dropped.Add(DropDevice, 1)
		}
		return
	}
	t.b.Frames.Add(Down, 1)
	if now := time.Now(); l.playedOut.Before(now) {
		l.playedOut = now
	}
	l.playedOut = l.playedOut.Add(longestPacket)
}

// write writes one item; called by one goroutine at a time.
func (l *link) write(it item) error {
	switch it.kind {
	case itemFrame:
		err := l.send(websocket.BinaryMessage, it.data)
		if err == nil {
			l.t.b.Frames.Add(Up, 1)
		}
		return err
	case itemMessage:
		return l.send(websocket.TextMessage, jsonspan.WithString(it.data, "session_id", l.id))
	case itemAnswer:
		out := jsonspan.AppendString([]byte(`{"session_id":`), l.id)
		out = append(append(out, `,"type":"mcp","payload":`...), it.data...)
		return l.send(websocket.TextMessage, append(out, '}'))
	}
	return l.ws.WriteControl(websocket.PingMessage, nil, time.Now().Add(WriteTimeout))
}

func (l *link) send(kind int, msg []byte) error {
	_ = l.ws.SetWriteDeadline(time.Now().Add(WriteTimeout)) // never fails (gorilla/websocket)
	return l.ws.WriteMessage(kind, msg)
}
