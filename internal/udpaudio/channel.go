package udpaudio

import (
	"crypto/cipher"
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/envelope"
)

// Limits that keep the counter blocks of downlink packets apart.
const (
	// maxSequence is the last downlink sequence: 4 years of packets of 60 ms.
	// Below it a packet's at most 88 blocks cannot carry into the timestamp.
	maxSequence = 1 << 31
	// maxTimestampStep bounds one step of the timestamp, in ms. A frame that
	// is further ahead or not ahead at all advances it by 1.
	maxTimestampStep = 3_600_000
	// maxTimestampTravel bounds the sum of all steps over 1, so that with
	// maxSequence steps of 1 the timestamp never comes round to a used value.
	maxTimestampTravel = 1<<31 - 1
)

// Channel is the audio of one conversation. All methods may be called at any
// time and concurrently; for frames to arrive in order one goroutine must send
// them, since the device drops every sequence below the last.
type Channel struct {
	table    *Table
	receiver Receiver
	ssrc     uint32
	key      [16]byte
	block    cipher.Block
	speech   speech
	control  netip.Addr
	opened   time.Time

	remote atomic.Pointer[endpoint] // proven address
	closed atomic.Bool

	sendMu    sync.Mutex
	sequence  uint32 // last used
	timestamp uint32 // last used
	travel    uint32 // sum of timestamp steps over 1

	mu        sync.Mutex // guards the rest; see admit.go
	tried     uint64     // datagrams that named the channel
	heard     bool       // one was accepted
	judged    bool       // Silent was called or is not due any more
	path      path       // zero while no address is believed
	claims    map[netip.AddrPort]*claim
	heldBytes int       // of all claims
	contested time.Time // somebody else was last seen to speak on the channel
}

// endpoint is the device's address, and the one of this host that it sends to:
// its socket takes answers from there alone.
type endpoint struct {
	netip.AddrPort
	local netip.Addr // zero if the socket has only one
}

func newChannel(t *Table, p Params, key [16]byte, block cipher.Block) *Channel {
	return &Channel{
		table: t, receiver: p.Receiver, key: key, block: block, control: p.Remote.Unmap(),
		speech: newSpeech(p.FrameDuration, p.Channels), opened: time.Now(),
	}
}

// Key is the AES-128 key to tell the device.
func (c *Channel) Key() [16]byte { return c.key }

// Nonce is the nonce to tell the device. It overwrites bytes 2-3 and 8-15 with
// length, timestamp and sequence (mqtt_protocol.cc:192-206).
func (c *Channel) Nonce() [16]byte {
	nonce := [16]byte{packetType}
	binary.BigEndian.PutUint32(nonce[4:], c.ssrc)
	return nonce
}

// Remote is the device's proven address, zero until there is one.
func (c *Channel) Remote() netip.AddrPort {
	if to := c.remote.Load(); to != nil {
		return to.AddrPort
	}
	return netip.AddrPort{}
}

// SendAudio seals f and gives it to the socket. It never blocks: what the
// socket does not take at once is lost, counted, and the error returned.
// f.Timestamp is in milliseconds; one that is not ahead of the last packet's,
// or more than an hour, is replaced by the last plus 1. Other errors: ErrEmpty
// (an empty datagram would end the device's receive task), ErrTooLong,
// ErrClosed, ErrNoAddress, ErrExhausted.
func (c *Channel) SendAudio(f envelope.Frame) error {
	switch {
	case len(f.Opus) == 0:
		return ErrEmpty
	case len(f.Opus) > MaxPayload:
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooLong, len(f.Opus), MaxPayload)
	case c.closed.Load():
		return ErrClosed
	}
	to := c.remote.Load()
	if to == nil {
		return ErrNoAddress
	}
	h, err := c.next(f.Timestamp)
	if err != nil {
		return err
	}
	t := c.table
	o := t.outgoing.Get().(*outgoing)
	defer t.outgoing.Put(o)
	o.n = seal(&o.buf, c.block, h, f.Opus, &o.ctr)
	if err := t.send(o, to); err != nil {
		t.stats.SendErrors.Add(1)
		return fmt.Errorf("udpaudio: send: %w", err)
	}
	t.stats.Sent.Add(1)
	return nil
}

// next returns the header of the next downlink packet. Block i of a packet is
// counted (timestamp, sequence+i), so packets with different timestamps never
// share a block (vectors udp_keystream_overlap.json).
func (c *Channel) next(timestamp uint32) (header, error) {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if c.sequence >= maxSequence {
		return header{}, ErrExhausted
	}
	step := timestamp - c.timestamp
	switch {
	case c.sequence == 0: // any start will do
	case step == 0 || step > maxTimestampStep || step > maxTimestampTravel-c.travel:
		timestamp = c.timestamp + 1
	case step > 1:
		c.travel += step
	}
	c.timestamp = timestamp
	c.sequence++
	return header{flags: flagDownlink, ssrc: c.ssrc | ssrcDownlink, timestamp: timestamp, sequence: c.sequence}, nil
}

// Close ends the channel. Further packets for it are of an unknown ssrc.
func (c *Channel) Close() {
	if c.closed.Swap(true) {
		return
	}
	c.table.remove(c)
	c.mu.Lock()
	discarded := c.dropClaims()
	c.mu.Unlock()
	c.table.stats.Discarded.Add(uint64(discarded))
}

// sweep forgets claims that fell silent, and reports whether Silent is due.
func (c *Channel) sweep(now time.Time) (tried uint64, silent bool, discarded int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cl := range c.claims {
		if now.Sub(cl.heard) >= claimLife {
			discarded += c.drop(cl)
		}
	}
	if c.judged || now.Sub(c.opened) < SilentAfter {
		return c.tried, false, discarded
	}
	c.judged = true
	return c.tried, !c.heard && !c.closed.Load(), discarded
}
