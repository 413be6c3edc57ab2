package main

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"fleetd/internal/fleetbench/load"
)

// Sizes of the load: a packet is 60 ms of speech at the firmware's bit rate, and packets leave in bursts over a few
// sockets, each device's always over the same one. The baseline's generator does it alike.
const (
	audioHeader  = 16
	audioPayload = 90
	audioSockets = 16
)

// channel is a device's audio, as the server's hello opened it.
type channel struct {
	server netip.AddrPort
	nonce  [audioHeader]byte
	block  cipher.Block
	seq    uint32
}

func (c *channel) open(hello []byte) error {
	var h struct {
		UDP struct {
			Server     string
			Port       int
			Key, Nonce string
		}
	}
	if err := json.Unmarshal(hello, &h); err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	key, keyErr := hex.DecodeString(h.UDP.Key)
	nonce, nonceErr := hex.DecodeString(h.UDP.Nonce)
	server, addressErr := netip.ParseAddrPort(net.JoinHostPort(h.UDP.Server, strconv.Itoa(h.UDP.Port)))
	block, blockErr := aes.NewCipher(key)
	if err := errors.Join(keyErr, nonceErr, addressErr, blockErr); err != nil || len(nonce) != audioHeader {
		return fmt.Errorf("no usable audio channel in %.300q: %w", hello, err)
	}
	*c = channel{server: server, nonce: [audioHeader]byte(nonce), block: block}
	return nil
}

// speech is the Opus packet that every device says: SILK, wideband, mono, one frame of 60 ms (RFC 6716, section 3.1),
// and nothing that matters here behind its first byte.
var speech = func() (s [audioPayload]byte) {
	for i := range s {
		s[i] = byte(i * 7)
	}
	s[0] = 11 << 3
	return s
}()

// seal writes the device's next packet into b (mqtt_protocol.cc:180-212).
func (c *channel) seal(b []byte) {
	c.seq++
	copy(b, c.nonce[:])
	binary.BigEndian.PutUint16(b[2:], audioPayload)
	binary.BigEndian.PutUint32(b[12:], c.seq)
	var block [audioHeader]byte
	for at, counter := audioHeader, [audioHeader]byte(b); at < len(b); at += len(block) {
		c.block.Encrypt(block[:], counter[:])
		subtle.XORBytes(b[at:], block[:min(len(block), len(b)-at)], speech[at-audioHeader:])
		binary.BigEndian.PutUint64(counter[8:], binary.BigEndian.Uint64(counter[8:])+1)
	}
}

// speaker lets the devices of a fleet speak in turn.
type speaker struct {
	channels []channel
	sockets  []*load.Datagrams
	next     []int // device that comes next on each socket
	burst    int
}

func newSpeaker(channels []channel) (*speaker, error) {
	s := &speaker{channels: channels}
	for i := range min(audioSockets, len(channels)) {
		d, err := load.NewDatagrams(channels[0].server, audioHeader+audioPayload)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.sockets, s.next = append(s.sockets, d), append(s.next, i)
	}
	return s, nil
}

func (s *speaker) close() (err error) {
	for _, d := range s.sockets {
		err = errors.Join(err, d.Close())
	}
	return err
}

// speak offers rate packets per second, or as many as go if that is 0, and returns how many it sent.
func (s *speaker) speak(ctx context.Context, rate int, duration time.Duration) (sent int, err error) {
	return load.Offer(ctx, rate, duration, func(n int) error {
		s.burst = (s.burst + 1) % len(s.sockets)
		d := s.sockets[s.burst]
		for _, b := range d.Buffers[:n] {
			s.channels[s.next[s.burst]].seal(b)
			if s.next[s.burst] += len(s.sockets); s.next[s.burst] >= len(s.channels) {
				s.next[s.burst] = s.burst
			}
		}
		if err := d.Send(n); err != nil {
			return fmt.Errorf("send to %v: %w", s.channels[0].server, err)
		}
		return nil
	})
}
