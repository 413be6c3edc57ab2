package load

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"
)

// DeviceID is the address-like name of device i.
func DeviceID(i int) string { return fmt.Sprintf("02:00:00:%02x:%02x:%02x", i>>16, i>>8&255, i&255) }

// AudioParams end a device's hello.
const AudioParams = `"audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}`

// HelloFrame is what a device says first over WebSocket.
var HelloFrame = AppendFrame(nil, OpText, []byte(`{"type":"hello","version":1,"features":{"mcp":true},"transport":"websocket",`+AudioParams))

var (
	markID      = []byte(`"id":`)
	markSession = []byte(`"session_id":"`)
)

// RequestID is the number after the last "id" of a message, nil if it is no request: the daemon writes it last.
func RequestID(m []byte) []byte {
	at := bytes.LastIndex(m, markID)
	if at < 0 {
		return nil
	}
	at += len(markID)
	end := at
	for end < len(m) && m[end] >= '0' && m[end] <= '9' {
		end++
	}
	return m[at:end]
}

// AppendReply appends the beginning of an answer, with the session that the request names.
func AppendReply(dst, request, id []byte) []byte {
	dst = append(dst, `{"session_id":"`...)
	if _, session, found := bytes.Cut(request, markSession); found {
		dst = append(dst, session[:max(0, bytes.IndexByte(session, '"'))]...)
	}
	dst = append(dst, `","type":"mcp","payload":{"jsonrpc":"2.0","id":`...)
	dst = append(dst, id...)
	return append(dst, `,"result":`...)
}

// AnswerCalls answers every request as a tool that did its work, and every ping, until the connection ends.
func AnswerCalls(c net.Conn, wire Framing) {
	br, buf := bufio.NewReaderSize(c, 512), make([]byte, 512)
	var body, out []byte
	for {
		op, m, err := wire.Read(br, buf)
		if err != nil {
			return
		}
		switch op {
		case OpPing:
			out = AppendFrame(out[:0], OpPong, m)
		case OpText:
			id := RequestID(m)
			if id == nil {
				continue
			}
			body = append(AppendReply(body[:0], m, id), `{"content":[{"type":"text","text":"true"}],"isError":false}}}`...)
			out = wire.Append(out[:0], body)
		default:
			continue
		}
		if _, err := c.Write(out); err != nil {
			return
		}
	}
}

// Attach connects device i to the server of a baseline, which asks for no login. With secure it speaks TLS.
func Attach(ctx context.Context, address string, i int, secure *tls.Config, br *bufio.Reader, headers string) (net.Conn, error) {
	c, err := Dial(ctx, address, i)
	if err != nil {
		return nil, err
	}
	if secure != nil {
		c = tls.Client(c, secure) // the first write shakes hands
	}
	br.Reset(c) // the server never speaks first, so nothing of the last connection is missing
	err = Upgrade(c, br, "/ws", "Device-Id: "+DeviceID(i)+"\r\n"+headers)
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// AttachedTarget takes calls to devices that are attached.
func AttachedTarget(address string) Target {
	const body = `{"name":"` + ToolSetVolume + `","arguments":{"volume":50}}`
	return Target{Address: address, Before: "POST /v1/devices/",
		After: fmt.Sprintf("/tools/call HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)}
}
