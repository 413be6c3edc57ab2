package main

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/fleetbench/load"
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
		first, body, err := load.ReadPacket(br, buf)
		if err != nil {
			return
		}
		var reply []byte
		switch first & 0xf0 {
		case load.MQTTConnect:
			reply = []byte{load.MQTTConnack, 2, 0, 0}
		case load.MQTTPublish:
			s.receive(body)
			buf = body // grown for the first answer, kept for the next
		case mqttSubscribe & 0xf0:
			if len(body) < 5 {
				return
			}
			s.devices.Store(string(body[4:len(body)-1]), c)
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
		return errors.New("nobody subscribes to " + topic)
	}
	b := s.packets.Get().(*[]byte)
	defer s.packets.Put(b)
	*b = load.Framing{Topic: topic}.Append((*b)[:0], []byte(message))
	_, err := c.(net.Conn).Write(*b) // net.Conn writes one packet after the other
	return err
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
