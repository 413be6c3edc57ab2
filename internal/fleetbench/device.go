package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"

	"fleetd/internal/fleetbench/load"
)

// dancer connects devices one after another with buffers of its own.
type dancer struct {
	br   *bufio.Reader
	buf  []byte
	body []byte
	out  []byte
}

var (
	markInitialize = []byte(`"method":"initialize"`)
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
	headers := "Device-Id: " + load.DeviceID(i) + "\r\nClient-Id: " + clientID(i) + "\r\nProtocol-Version: 1\r\nAuthorization: Bearer " + f.logins[i].password + "\r\n"
	if err := load.Upgrade(c, w.br, "/xiaozhi/v1/", headers); err != nil {
		return err
	}
	_, err := c.Write(load.HelloFrame)
	return err
}

func (w *dancer) talk(c net.Conn, f *fleet, i int) error {
	if err := w.open(c, f, i); err != nil {
		return err
	}
	wire := f.framing(i)
	pages := f.lists[i%len(f.lists)]
	for next := 0; next < len(pages); {
		_, m, err := wire.Read(w.br, w.buf)
		if err != nil {
			return err
		}
		id := load.RequestID(m)
		if id == nil { // the server's hello, or a notification
			continue
		}
		w.body = load.AppendReply(w.body[:0], m, id)
		if bytes.Contains(m, markInitialize) {
			w.body = fmt.Appendf(w.body, `{"protocolVersion":"2024-11-05","capabilities":{"tools":{}},"serverInfo":{"name":"bread-compact-wifi","version":"2.%d.0"}}}}`, i%len(f.lists))
		} else {
			w.body = append(append(w.body, pages[next]...), "}}"...)
			next++
		}
		w.out = wire.Append(w.out[:0], w.body)
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
	if _, err := c.Write(wire.Append(nil, helloUDP)); err != nil {
		return err
	}
	for {
		_, m, err := wire.Read(w.br, w.buf)
		if err != nil {
			return fmt.Errorf("waiting for the server's hello: %w", err)
		}
		if bytes.Contains(m, markHello) {
			return f.channels[i].open(m)
		}
	}
}
