package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"time"

	"fleetd/bench/load"
)

// audioSockets is over how many sockets all devices send, in bursts.
const audioSockets = 16

// loadAudio measures packets of devices that talk to each other in pairs. The server has a processor for itself, and the
// devices another one.
func loadAudio(ctx context.Context, arguments []string, out io.Writer) (err error) {
	o := newOptions("udpaudio")
	reads := o.choice("io", "a system call for every packet, by Go's net", "std")
	crypt := o.choice("crypt", "AES-CTR that keeps the key's schedule and allocates nothing", "manual")
	forward := o.Bool("forward", false, "encrypt for the peer and send")
	sessions := o.Int("sessions", 4096, "devices, an even number")
	size := o.Int("size", 90, "bytes of audio in a packet")
	rate := o.Int("pps", 0, "packets offered per second; 0: as many as go")
	duration := o.Duration("d", 4*time.Second, "measured time of one run")
	if err := o.positive(arguments, sessions, size); err != nil {
		return err
	}
	if *sessions%2 != 0 || *rate < 0 {
		return errors.New("-sessions must be even, -pps not negative")
	}
	sink, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}) // what arrives is not read
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sink.Close()) }()
	runtime.LockOSThread() // until the program ends: the thread belongs to one processor
	if err := pin(0); err != nil {
		return err
	}
	s, err := startServer([]string{"GOMAXPROCS=1"}, "udpaudio", strconv.FormatBool(*forward), strconv.Itoa(*sessions), sink.LocalAddr().String())
	if err != nil {
		return err
	}
	defer s.Stop()
	if err := pin(1); err != nil {
		return err
	}
	d, err := newSpeakers(s.Address, *sessions, *size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	var handled, offered, cpu, mallocs series
	for i := range *o.runs + 1 {
		r, err := d.run(ctx, s, *rate, *duration)
		if err != nil {
			return err
		}
		if i == 0 { // warms up
			continue
		}
		n := float64(max(1, r.handled))
		handled = append(handled, float64(r.handled)/r.took.Seconds())
		offered = append(offered, float64(r.sent)/r.took.Seconds())
		cpu = append(cpu, float64(r.cpu)/n)
		mallocs = append(mallocs, float64(r.mallocs)/n)
	}
	_, err = fmt.Fprintf(out, "io=%s crypt=%s forward=%v size=%d offered=%s | handled %s pps | cpu %s ns/packet | allocs %s\n",
		*reads, *crypt, *forward, *size, offered.text(0), handled.text(0), cpu.text(0), mallocs.text(2))
	return err
}

// speakers sends packets of all devices in turn.
type speakers struct {
	sockets []*load.Datagrams
	devices int
	burst   int
	next    int    // device
	seq     uint32 // of all devices' next packets
}

func newSpeakers(address string, devices, size int) (*speakers, error) {
	server, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	s := &speakers{devices: devices, seq: 1}
	for range audioSockets {
		d, err := load.NewDatagrams(server, audioHeader+size)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		for _, b := range d.Buffers {
			b[0] = audioType
			binary.BigEndian.PutUint16(b[2:], uint16(size))
		}
		s.sockets = append(s.sockets, d)
	}
	return s, nil
}

func (s *speakers) close() (err error) {
	for _, d := range s.sockets {
		err = errors.Join(err, d.Close())
	}
	return err
}

// spoken is what one run took.
type spoken struct {
	sent, handled int
	took, cpu     time.Duration
	mallocs       uint64
}

// askPackets is the question for the number of packets that a server has handled.
const askPackets = "packets"

func (s *speakers) run(ctx context.Context, server server, rate int, duration time.Duration) (r spoken, err error) {
	var first, last int
	before, err := server.state()
	if err := errors.Join(err, server.Ask(askPackets, &first)); err != nil {
		return r, err
	}
	begun := time.Now()
	r.sent, err = s.speak(ctx, rate, duration)
	r.took = time.Since(begun)
	if err := errors.Join(err, server.Ask(askPackets, &last)); err != nil {
		return r, err
	}
	after, err := server.state()
	r.handled, r.cpu, r.mallocs = last-first, after.CPU-before.CPU, after.Mallocs-before.Mallocs
	return r, err
}

func (s *speakers) speak(ctx context.Context, rate int, duration time.Duration) (sent int, err error) {
	return load.Offer(ctx, rate, duration, func(n int) error {
		s.burst = (s.burst + 1) % len(s.sockets)
		d := s.sockets[s.burst]
		for _, b := range d.Buffers[:n] {
			binary.BigEndian.PutUint32(b[4:], audioSource(s.next))
			binary.BigEndian.PutUint32(b[12:], s.seq)
			if s.next++; s.next == s.devices {
				s.next, s.seq = 0, s.seq+1
			}
		}
		return d.Send(n)
	})
}
