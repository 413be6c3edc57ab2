package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"

	"fleetd/bench/load"
	"fleetd/simulator/firmware"
)

var markHello = []byte(`"type":"hello"`)

// replyOf reads an OTA reply to device i, as its firmware does.
func replyOf(transport string, reply []byte, i int) (firmware.Reply, error) {
	r, err := new(firmware.Flash).ReadReply(reply, "2.0.0")
	l := &r.Login
	switch {
	case err != nil:
		return r, fmt.Errorf("OTA reply: %w", err)
	case transport == overMQTT && (l.URL != "" || l.Password == "" || l.PublishTopic == "" || l.Endpoint == ""), transport == overWebSocket && (l.URL == "" || l.Token == ""):
		return r, fmt.Errorf("OTA reply: no login over %s in %.300q", transport, reply)
	}
	l.Device, l.Client, l.SubscribeTopic = load.DeviceID(i), clientID(i), ""
	return r, nil
}

// connectDevice takes device i from dial to the last page of its tools, and, if the fleet speaks, to its audio channel.
func (f *fleet) connectDevice(ctx context.Context, i int) (net.Conn, *firmware.Line, error) {
	l := f.logins[i]
	address, err := l.Address()
	if err != nil {
		return nil, nil, err
	}
	c, err := f.dial(ctx, address, i)
	if err != nil {
		return nil, nil, err
	}
	line, err := load.Open(ctx, c, l)
	if err == nil && f.transport == overWebSocket {
		err = line.Send(load.Hello(l))
	}
	if err == nil {
		err = load.ListTools(line, fmt.Sprintf("2.%d.0", i%len(f.lists)), f.lists[i%len(f.lists)])
	}
	if err == nil && f.channels != nil {
		f.channels[i], err = wake(line, l)
	}
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	return c, line, nil
}

// wake opens a device's audio channel, as a user's word would.
func wake(line *firmware.Line, l firmware.Login) (*firmware.Audio, error) {
	if err := line.Send(load.Hello(l)); err != nil {
		return nil, err
	}
	for {
		m, err := line.Receive()
		if err != nil {
			return nil, fmt.Errorf("waiting for the server's hello: %w", err)
		}
		if bytes.Contains(m.Data, markHello) {
			return firmware.ReadAudio(m.Data)
		}
	}
}
