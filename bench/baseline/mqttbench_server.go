package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/bench/load"
	"fleetd/simulator/firmware"
)

// mqttServer answers the packets of devices, and calls them.
type mqttServer struct {
	lastID  atomic.Uint64
	pending sync.Map // id of a call -> chan struct{}
	devices sync.Map // topic -> net.Conn
	packets sync.Pool
}

func serveMQTT([]string) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := &mqttServer{packets: sync.Pool{New: func() any { return new([]byte) }}}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go s.device(c)
		}
	}()
	return answer(l.Addr().String(), s.called)
}

// device takes the packets of one device.
func (s *mqttServer) device(c net.Conn) {
	defer func() { _ = c.Close() }()
	br := bufio.NewReaderSize(c, 256)
	var buf []byte
	for {
		first, body, err := readPacket(br, buf)
		if err != nil {
			return
		}
		var reply []byte
		switch first & 0xf0 {
		case mqttConnect:
			id := body[min(len(body), 12):] // after the fixed part, the keepalive, and the length of the id
			s.devices.Store(topicDown+string(id), c)
			reply = []byte{mqttConnack, 2, 0, 0}
		case mqttPublish:
			s.receive(body)
			buf = body // grown for the first answer, kept for the next
		case mqttSubscribe & 0xf0:
			if len(body) < 5 {
				return
			}
			reply = []byte{mqttSuback, 3, body[0], body[1], 0}
		case mqttPing:
			reply = []byte{mqttPong, 0}
		}
		if reply == nil {
			continue
		}
		if _, err := c.Write(reply); err != nil {
			return
		}
	}
}

// receive ends the wait of a call; the id is found in the packet.
func (s *mqttServer) receive(packet []byte) {
	id, err := strconv.ParseUint(string(load.RequestID(packet)), 10, 64)
	if err != nil {
		return
	}
	if done, ok := s.pending.LoadAndDelete(id); ok {
		done.(chan struct{}) <- struct{}{}
	}
}

// publish sends a message to a device.
func (s *mqttServer) publish(topic, message string) error {
	c, connected := s.devices.Load(topic)
	if !connected {
		return errors.New("no device has " + topic)
	}
	b := s.packets.Get().(*[]byte)
	defer s.packets.Put(b)
	*b = firmware.AppendPublish((*b)[:0], topic, []byte(message))
	_, err := c.(net.Conn).Write(*b) // net.Conn writes one packet after the other
	return err
}

// First bytes of packets (MQTT 3.1.1, section 3).
const (
	mqttConnect   = 0x10
	mqttConnack   = 0x20
	mqttPublish   = 0x30
	mqttSubscribe = 0x82
	mqttSuback    = 0x90
	mqttPing      = 0xc0
	mqttPong      = 0xd0
)

// readPacket reads one packet of a device into buf, or a larger buffer if it does not fit.
func readPacket(br *bufio.Reader, buf []byte) (first byte, body []byte, err error) {
	if first, err = br.ReadByte(); err != nil {
		return 0, nil, err
	}
	n, err := binary.ReadUvarint(br)
	if err != nil {
		return 0, nil, err
	}
	if n > 64<<10 {
		return 0, nil, errors.New("MQTT packet over 64 KiB")
	}
	if uint64(cap(buf)) < n {
		buf = make([]byte, n)
	}
	_, err = io.ReadFull(br, buf[:n])
	return first, buf[:n], err
}

// mqttCalled is what calls took.
type mqttCalled struct {
	Took      time.Duration
	Latencies []time.Duration
	Error     string
}

// called lets callers call devices for a time: "call callers devices nanoseconds".
func (s *mqttServer) called(question string) any {
	var callers, devices int
	var duration time.Duration
	if _, err := fmt.Sscanf(question, "call %d %d %d", &callers, &devices, &duration); err != nil {
		return mqttCalled{Error: err.Error()}
	}
	parts, begun := make([][]time.Duration, callers), time.Now()
	err := load.InParallel(callers, callers, func() (func(k int) error, func(), error) {
		done, limit := make(chan struct{}, 1), time.NewTimer(callLimit)
		return func(k int) error {
			for time.Since(begun) < duration {
				id, sent := s.lastID.Add(1), time.Now()
				s.pending.Store(id, done)
				limit.Reset(callLimit)
				if err := s.publish(topicDown+strconv.Itoa(rand.IntN(devices)), requestStart+
					`tools/call","params":{"name":"`+load.ToolSetVolume+`","arguments":{"volume":50}},"id":`+strconv.FormatUint(id, 10)+"}}"); err != nil {
					return err
				}
				select {
				case <-done:
				case <-limit.C:
					return errors.New("a call is not answered")
				}
				parts[k] = append(parts[k], time.Since(sent))
			}
			return nil
		}, func() { limit.Stop() }, nil
	})
	r := mqttCalled{Took: time.Since(begun), Latencies: slices.Concat(parts...)}
	if err != nil {
		r.Error = err.Error()
	}
	return r
}
