package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fleetd/bench/load"
	"fleetd/simulator/firmware"
)

// Sizes of the load: a packet is 60 ms of speech at the firmware's bit rate, and packets leave in bursts over a few
// sockets, each device's always over the same one. The baseline's generator does it alike.
const (
	audioHeader  = firmware.AudioHeader
	audioPayload = 90
	audioSockets = 16
)

// speech is the Opus packet that every device sends: SILK, wideband, mono, one frame of 60 ms (RFC 6716, section 3.1),
// and nothing that matters here after its first byte.
var speech = func() (s [audioPayload]byte) {
	for i := range s {
		s[i] = byte(i * 7)
	}
	s[0] = 11 << 3
	return s
}()

// speaker lets the devices of a fleet speak in turn.
type speaker struct {
	channels []*firmware.Audio
	sockets  []*load.Datagrams
	next     []int // device that comes next on each socket
	burst    int
}

func newSpeaker(channels []*firmware.Audio) (*speaker, error) {
	s := &speaker{channels: channels}
	for i := range min(audioSockets, len(channels)) {
		d, err := load.NewDatagrams(channels[0].Server, audioHeader+audioPayload)
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
			s.channels[s.next[s.burst]].Seal(b[:0], speech[:], 0)
			if s.next[s.burst] += len(s.sockets); s.next[s.burst] >= len(s.channels) {
				s.next[s.burst] = s.burst
			}
		}
		if err := d.Send(n); err != nil {
			return fmt.Errorf("send to %v: %w", s.channels[0].Server, err)
		}
		return nil
	})
}
