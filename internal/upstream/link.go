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

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
	"fleetd/internal/hello"
	"fleetd/internal/jsonspan"
)

// link is one connection to the chat server. Its fields belong to the goroutine that runs
// it; fields that others read are set before they can access the link.
type link struct {
	t         *bridgeSession
	ctx       context.Context // ends with the connection: requests of the chat server do
	raw       net.Conn
	stopWatch func() bool // stops the watch of the conversation's context
	ws        *websocket.Conn
	id        string // the chat server's session id
	gotHello  bool   // the chat server's hello was received
	ping      *time.Timer
	calls     atomic.Int32 // requests in progress
	buf       []byte

	speaking    bool      // between `tts` start and stop
	playedOut   time.Time // latest time when the device has played everything that was sent
	interrupted atomic.Bool
}

// errGoodbye ends a connection when the chat server sends goodbye.
var errGoodbye = errors.New("the chat server sent goodbye")

// converse dials, sends the hello, and passes on the chat server's messages until either
// side ends the connection.
func (l *link) converse() (Outcome, error) {
	t := l.t
	err := l.dial()
	if l.stopWatch != nil {
		defer l.stopWatch()
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
	case !l.gotHello && isTimeout(err):
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
			l.stopWatch = context.AfterFunc(l.t.ctx, l.interrupt) // the handshake itself does not observe its context
		}
		return conn, err
	}
	ws, response, err := dialer.DialContext(l.t.ctx, b.url, b.header(l.t.c.Identity(), clock.Now()))
	if err != nil {
		if response != nil {
			return fmt.Errorf("the chat server responds with %s: %w", response.Status, err)
		}
		return err
	}
	l.ws = ws
	return nil
}

// header returns the request headers for a device's connection, the same as those of
// xiaozhi-mqtt-gateway.
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

// addressOf returns the IP address of a remote address, or "" if it has none.
func addressOf(remote string) string {
	if addr, err := netip.ParseAddrPort(remote); err == nil {
		return addr.Addr().Unmap().WithZone("").String()
	}
	if addr, err := netip.ParseAddr(remote); err == nil {
		return addr.Unmap().WithZone("").String()
	}
	return ""
}

// appendHello appends the hello for the chat server, with the values of the device's hello.
// The gateway omits text_font, without which a chat server cannot push glyphs.
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

// interrupt ends pending reads and writes.
func (l *link) interrupt() { _ = l.raw.SetDeadline(time.Now()) } // fails only on a closed connection

// extend sets the next read deadline, unless the conversation is over.
func (l *link) extend(d time.Duration) {
	_ = l.ws.SetReadDeadline(time.Now().Add(d)) // an error shows in the read
	if l.t.ctx.Err() != nil {
		l.interrupt()
	}
}

// close sends a Close frame and closes the connection.
func (l *link) close() {
	l.t.mu.Lock()
	if l.ping != nil {
		l.ping.Stop()
	}
	l.t.mu.Unlock()
	frame := websocket.FormatCloseMessage(websocket.CloseNormalClosure, "")
	_ = l.ws.WriteControl(websocket.CloseMessage, frame, time.Now().Add(closeLinger)) // the chat server may be disconnected
	_ = l.ws.Close()
}

// read passes on the chat server's messages. It returns the error that ended reading.
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
			l.countBad(BadTooLarge, l.buf, fmt.Errorf("a message over %d bytes", limit))
		} else if err := l.handle(kind, l.buf); err != nil {
			return err
		}
	}
}

// alive extends the deadline; before the hello, only the deadline of the hello applies.
func (l *link) alive() {
	if l.gotHello {
		l.extend(DeadAfter)
	}
}

// receive reads one message into the link's buffer; of a message over the limit, its
// beginning.
func (l *link) receive(r io.Reader, limit int) (fits bool, err error) {
	if cap(l.buf) > 16<<10 || l.buf == nil {
		l.buf = make([]byte, 0, 1024) // drops the buffer of one large message
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

// handle handles one message of the chat server. Invalid messages are counted; the only
// error is errGoodbye.
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
		l.countBad(kind, data, err)
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

// countBad counts an unusable message, and logs the first of a conversation.
func (l *link) countBad(kind MessageError, data []byte, err error) {
	t := l.t
	t.b.BadMessages.Add(kind, 1)
	if !t.logged {
		t.logged = true
		t.b.opt.Log.Warn("unusable message of the chat server; further ones of this conversation are counted but not logged",
			"device", t.c.Identity().Device, "session", t.c.ID(), "kind", kind, "error", err, "message", fmt.Sprintf("%.80q", data))
	}
}

// hello starts the writing of queued items.
func (l *link) hello(m envelope.Message, data []byte) {
	if l.gotHello {
		return
	}
	id := string(m.SessionID)
	if len(id) > MaxIDLength {
		l.countBad(BadHello, data, fmt.Errorf("a session id of %d bytes", len(id)))
		id = ""
	}
	l.id, l.gotHello = id, true
	l.extend(DeadAfter)
	t := l.t
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failures = 0
	if t.phase != phaseWanted {
		return // the conversation has ended
	}
	t.phase = phaseUp
	l.ping = time.AfterFunc(PingEvery, l.pingDue)
	t.writeLocked()
}

// pingDue queues a ping, so that a chat server whose machine has failed is detected.
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
	err := t.c.Send(principal, jsonspan.WithString(data, "session_id", t.c.ID()))
	if err != nil {
		switch code := devices.AsError(err).Code; code {
		case devices.CodeBadRequest, devices.CodeForbidden, devices.CodeTooLarge:
			l.countBad(BadRefused, data, err)
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
		if now := time.Now().Add(speech.SpeechGap); l.interrupted.Swap(false) || l.playedOut.Before(now) {
			l.playedOut = now
		}
	case "stop":
		l.speaking = false
	}
}

// headerLength is the length in bytes of the header of binary messages: framing 2 towards
// the chat server. xiaozhi-server responds with a header of its own, of which only u32
// timestamp at 8 and u32 length at 12 are the same.
const headerLength = 16

// longestPacket is the longest playing time of a packet; playedOut is computed with it.
const longestPacket = 60 * time.Millisecond

// frame passes one packet on to the device.
func (l *link) frame(data []byte) {
	if len(data) <= headerLength || uint64(binary.BigEndian.Uint32(data[12:])) != uint64(len(data)-headerLength) {
		l.countBad(BadFrame, data[:min(len(data), headerLength)],
			fmt.Errorf("a binary message of %d bytes is not a frame with a header of %d bytes; configure the chat server for from=mqtt_gateway", len(data), headerLength))
		return
	}
	t := l.t
	if err := t.c.SendAudio(envelope.Frame{Timestamp: binary.BigEndian.Uint32(data[8:]), Opus: data[headerLength:]}); err != nil {
		if devices.AsError(err).Code == devices.CodeBadRequest {
			l.countBad(BadAudio, data[:headerLength], err)
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

// write writes one item. It is called by one goroutine at a time.
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
