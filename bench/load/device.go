package load

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"fleetd/simulator/firmware"
)

// DeviceID is the address-like name of device i.
func DeviceID(i int) string { return fmt.Sprintf("02:00:00:%02x:%02x:%02x", i>>16, i>>8&255, i&255) }

var markInitialize = []byte(`"method":"initialize"`)

var (
	markID      = []byte(`"id":`)
	markSession = []byte(`"session_id":"`)
)

// RequestID is the number after the last "id" of a message, nil if it is not a request: the daemon writes it last.
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

// ListTools answers a server's requests as a device of the board and version until it has read the last page.
func ListTools(line *firmware.Line, version string, pages []string) error {
	var body []byte
	for next := 0; next < len(pages); {
		m, err := line.Receive()
		if err != nil {
			return fmt.Errorf("the device waits for a request: %w", err)
		}
		id := RequestID(m.Data)
		if id == nil { // the server's hello, or a notification
			continue
		}
		body = AppendReply(body[:0], m.Data, id)
		if bytes.Contains(m.Data, markInitialize) {
			body = append(body, `{"protocolVersion":"2024-11-05","capabilities":{"tools":{}},"serverInfo":{"name":"bread-compact-wifi","version":"`+version+`"}}`...)
		} else {
			body = append(body, pages[next]...)
			next++
		}
		if err := line.Send(append(body, "}}"...)); err != nil {
			return err
		}
	}
	return nil
}

// AnswerCalls answers every request as a tool that did its work until the connection ends.
func AnswerCalls(line *firmware.Line) {
	var body []byte
	for {
		m, err := line.Receive()
		if err != nil {
			return
		}
		id := RequestID(m.Data)
		if id == nil {
			continue
		}
		body = append(AppendReply(body[:0], m.Data, id), `{"content":[{"type":"text","text":"true"}],"isError":false}}}`...)
		if line.Send(body) != nil {
			return
		}
	}
}

// hellos is the profile whose hello devices say: the shortest of the versions.
var hellos = func() *firmware.Profile {
	list, err := firmware.ParseProfiles("fw-2.1")
	if err != nil {
		panic(err) // internal error (bug): the name is constant
	}
	return list[0]
}()

// Hello is what a device that logs in like this sends first, and at the beginning of a conversation.
func Hello(l firmware.Login) []byte { return []byte(hellos.Hello(l)) }

// Open logs a device in over a connection, which keeps its deadline.
func Open(ctx context.Context, c net.Conn, l firmware.Login) (*firmware.Line, error) {
	line, err := l.Open(ctx, c)
	if err != nil {
		return nil, err
	}
	return line, c.SetDeadline(time.Now().Add(ExchangeLimit))
}

// Attach connects device i to the server of a baseline, which looks at no login. With secure it speaks TLS.
func Attach(ctx context.Context, address string, i int, secure *tls.Config) (net.Conn, *firmware.Line, error) {
	c, err := Dial(ctx, address, i)
	if err != nil {
		return nil, nil, err
	}
	if secure != nil {
		c = tls.Client(c, secure) // the first write shakes hands
	}
	line, err := Open(ctx, c, firmware.Login{URL: "ws://" + address + "/ws", Device: DeviceID(i), Client: "36c98363-3656-43cb-a00f-8bced2391a90", Token: "0123456789abcdef", Version: 1})
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	return c, line, nil
}

// AttachedTarget takes calls to devices that are attached.
func AttachedTarget(address string) Target {
	const body = `{"name":"` + ToolSetVolume + `","arguments":{"volume":50}}`
	return Target{Address: address, Before: "POST /v1/devices/",
		After: fmt.Sprintf("/tools/call HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)}
}
