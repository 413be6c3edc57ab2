package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
)

// dancer connects devices one after another with buffers of its own.
type dancer struct {
	br   *bufio.Reader
	buf  []byte
	body []byte
	out  []byte
}

var (
	markID         = []byte(`"id":`)
	markInitialize = []byte(`"method":"initialize"`)
	markSession    = []byte(`"session_id":"`)
	markHello      = []byte(`"type":"hello"`)
)

// dance takes one device from dial to the last page of its tools, and, if the fleet speaks, to its audio channel.
func (w *dancer) dance(ctx context.Context, f *fleet, i int) (net.Conn, error) {
	address := f.address
	if f.transport == overMQTT {
		address = f.logins[i].address
	}
	c, err := f.dial(ctx, address, i)
	if err != nil {
		return nil, err
	}
	w.br.Reset(c) // the server never speaks first, so nothing of the last connection is missing
	if err := w.talk(c, f, i); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// open logs the device in, and says hello where a connection begins so.
func (w *dancer) open(c net.Conn, f *fleet, i int) error {
	if f.transport == overMQTT {
		return w.connectMQTT(c, f.logins[i], i)
	}
	headers := "Device-Id: " + deviceID(i) + "\r\nClient-Id: " + clientID(i) + "\r\nProtocol-Version: 1\r\nAuthorization: Bearer " + f.logins[i].password + "\r\n"
	if err := upgrade(c, w.br, "/xiaozhi/v1/", headers); err != nil {
		return err
	}
	_, err := c.Write(helloFrame)
	return err
}

func (w *dancer) talk(c net.Conn, f *fleet, i int) error {
	if err := w.open(c, f, i); err != nil {
		return err
	}
	wire := f.framing(i)
	pages := f.lists[i%len(f.lists)]
	for next := 0; next < len(pages); {
		_, m, err := wire.read(w.br, w.buf)
		if err != nil {
			return err
		}
		id := requestID(m)
		if id == nil { // the server's hello, or a notification
			continue
		}
		w.body = appendReply(w.body[:0], m, id)
		if bytes.Contains(m, markInitialize) {
			w.body = fmt.Appendf(w.body, `{"protocolVersion":"2024-11-05","capabilities":{"tools":{}},"serverInfo":{"name":"bread-compact-wifi","version":"2.%d.0"}}}}`, i%len(f.lists))
		} else {
			w.body = append(append(w.body, pages[next]...), "}}"...)
			next++
		}
		w.out = wire.append(w.out[:0], w.body)
		if _, err := c.Write(w.out); err != nil {
			return err
		}
	}
	if f.channels == nil {
		return nil
	}
	return w.wake(c, f, i)
}

// wake opens the device's audio channel, as a user's word would.
func (w *dancer) wake(c net.Conn, f *fleet, i int) error {
	wire := f.framing(i)
	if _, err := c.Write(wire.append(nil, helloUDP)); err != nil {
		return err
	}
	for {
		_, m, err := wire.read(w.br, w.buf)
		if err != nil {
			return fmt.Errorf("waiting for the server's hello: %w", err)
		}
		if bytes.Contains(m, markHello) {
			return f.channels[i].open(m)
		}
	}
}

// requestID is the number after the last "id" of a message, nil if it is no request: the daemon writes it last.
func requestID(m []byte) []byte {
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

// appendReply appends the beginning of an answer, with the session that the request names.
func appendReply(dst, request, id []byte) []byte {
	dst = append(dst, `{"session_id":"`...)
	if _, session, found := bytes.Cut(request, markSession); found {
		dst = append(dst, session[:max(0, bytes.IndexByte(session, '"'))]...)
	}
	dst = append(dst, `","type":"mcp","payload":{"jsonrpc":"2.0","id":`...)
	dst = append(dst, id...)
	return append(dst, `,"result":`...)
}

// answerCalls answers every request as a tool that did its work, and every ping, until the connection ends.
func answerCalls(c net.Conn, wire framing) {
	br, buf := bufio.NewReaderSize(c, 512), make([]byte, 512)
	var body, out []byte
	for {
		op, m, err := wire.read(br, buf)
		if err != nil {
			return
		}
		switch op {
		case opPing:
			out = appendFrame(out[:0], opPong, m)
		case opText:
			id := requestID(m)
			if id == nil {
				continue
			}
			body = append(appendReply(body[:0], m, id), `{"content":[{"type":"text","text":"true"}],"isError":false}}}`...)
			out = wire.append(out[:0], body)
		default:
			continue
		}
		if _, err := c.Write(out); err != nil {
			return
		}
	}
}
