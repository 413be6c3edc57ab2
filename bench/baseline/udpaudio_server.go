package main

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
)

// A packet is a header (type, flags, length, source, timestamp, sequence), which is the counter of AES-CTR too, and audio.
const (
	audioHeader = 16
	audioType   = 1
	socketBytes = 4 << 20
)

// audioSource is the number by which packets of device i are known.
func audioSource(i int) uint32 { return uint32(i) * 2654435761 } // spread over the map

// audioSession is one device's audio.
type audioSession struct {
	source       uint32
	block        cipher.Block
	received     uint32 // highest sequence
	sent         uint32
	heardFrom    netip.AddrPort
	peer         *audioSession
	counter, key [aes.BlockSize]byte // scratch
}

// relay opens packets and passes them on.
type relay struct {
	mu       sync.RWMutex
	sessions map[uint32]*audioSession
	forward  bool
	packets  atomic.Int64
}

// serveAudio takes the arguments forward, number of sessions and address to which all audio goes.
func serveAudio(arguments []string) error {
	if len(arguments) != 3 {
		return errors.New("give forward, the number of sessions and an address")
	}
	forward, forwardErr := strconv.ParseBool(arguments[0])
	n, countErr := strconv.Atoi(arguments[1])
	to, addressErr := netip.ParseAddrPort(arguments[2])
	if err := errors.Join(forwardErr, countErr, addressErr); err != nil {
		return err
	}
	r := &relay{sessions: make(map[uint32]*audioSession, n), forward: forward}
	for i := range n {
		s := &audioSession{source: audioSource(i)}
		var key [aes.BlockSize]byte
		binary.BigEndian.PutUint32(key[:], s.source)
		var err error
		if s.block, err = aes.NewCipher(key[:]); err != nil {
			return err
		}
		r.sessions[s.source] = s
		if i%2 == 1 {
			s.peer = r.sessions[audioSource(i-1)]
			s.peer.peer = s
		}
	}
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return err
	}
	if err := errors.Join(c.SetReadBuffer(socketBytes), c.SetWriteBuffer(socketBytes)); err != nil {
		return fmt.Errorf("buffers of the socket: %w", err)
	}
	go r.serve(c, to)
	return answer(c.LocalAddr().String(), func(string) any { return r.packets.Load() })
}

func (r *relay) serve(c *net.UDPConn, to netip.AddrPort) {
	b := make([]byte, 2048)
	for {
		n, from, err := c.ReadFromUDPAddrPort(b)
		if err != nil {
			return
		}
		if r.pass(b[:n], from) {
			_, _ = c.WriteToUDPAddrPort(b[:n], to) // nobody reads it
		}
	}
}

// pass decrypts a packet, and encrypts it in place for the peer if it is to be sent.
func (r *relay) pass(b []byte, from netip.AddrPort) (send bool) {
	if len(b) < audioHeader || b[0] != audioType || int(binary.BigEndian.Uint16(b[2:])) != len(b)-audioHeader {
		return false
	}
	r.mu.RLock()
	s := r.sessions[binary.BigEndian.Uint32(b[4:])]
	r.mu.RUnlock()
	seq := binary.BigEndian.Uint32(b[12:])
	if s == nil || seq < s.received {
		return false
	}
	s.received, s.heardFrom = seq, from
	s.crypt(b)
	r.packets.Add(1)
	if !r.forward {
		return false
	}
	p := s.peer
	p.sent++
	binary.BigEndian.PutUint32(b[4:], p.source)
	binary.BigEndian.PutUint32(b[12:], p.sent)
	p.crypt(b)
	return true
}

// crypt applies AES-CTR to the audio of a packet, whose header is the first counter. It works in the session's own blocks,
// so that nothing is allocated.
func (s *audioSession) crypt(packet []byte) {
	s.counter = [aes.BlockSize]byte(packet)
	for at := audioHeader; at < len(packet); at += aes.BlockSize {
		s.block.Encrypt(s.key[:], s.counter[:])
		end := min(at+aes.BlockSize, len(packet))
		subtle.XORBytes(packet[at:end], packet[at:end], s.key[:])
		for i := len(s.counter) - 1; i >= 0; i-- {
			if s.counter[i]++; s.counter[i] != 0 {
				break
			}
		}
	}
}
