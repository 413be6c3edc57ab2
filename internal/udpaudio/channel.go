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
	// maxSequence is the last downlink sequence number: 4 years of packets of 60 ms. Below
	// it, the at most 88 blocks of a packet cannot carry into the timestamp.
	maxSequence = 1 << 31
	// maxTimestampStep is the largest step of the timestamp, in ms. A frame that is
	// further ahead, or not ahead, advances it by 1.
	maxTimestampStep = 3_600_000
	// maxTimestampTravel limits the sum of all steps over 1, so that with maxSequence
	// steps of 1 the timestamp never wraps to a used value.
	maxTimestampTravel = 1<<31 - 1
)

// Channel is the audio of one conversation. It is safe for concurrent use. For frames to
// arrive in order, one goroutine must send them, because the device drops every sequence
// number below the last.
type Channel struct {
	table    *Table
	receiver Receiver
	ssrc     uint32
	key      [16]byte
	block    cipher.Block
	model    packetModel
	control  netip.Addr
	opened   time.Time

	remote atomic.Pointer[endpoint] // proven address
	closed atomic.Bool

	sendMu    sync.Mutex
	sequence  uint32 // last used
	timestamp uint32 // last used
	travel    uint32 // sum of timestamp steps over 1

	mu              sync.Mutex // guards the rest; see admit.go
	datagrams       uint64     // datagrams with the ssrc of the channel
	hasAudio        bool       // at least one was accepted
	silenceReported bool       // Silent was called, or is no longer due
	path            path       // zero while no address is verified
	claims          map[netip.AddrPort]*claim
	heldBytes       int       // of all claims
	contested       time.Time // when a packet of another sender was last received
}

// endpoint is the device's address, and the local address to which it sends: its socket
// accepts responses from there only.
type endpoint struct {
	netip.AddrPort
	local netip.Addr // zero if the socket has only one
}

func newChannel(t *Table, p Params, key [16]byte, block cipher.Block) *Channel {
	return &Channel{
		table: t, receiver: p.Receiver, key: key, block: block, control: p.Remote.Unmap(),
		model: newPacketModel(p.FrameDuration, p.Channels), opened: time.Now(),
	}
}

// Key returns the AES-128 key for the device.
func (c *Channel) Key() [16]byte { return c.key }

// Nonce returns the nonce for the device, which overwrites bytes 2-3 and 8-15 with length,
// timestamp and sequence number (mqtt_protocol.cc:192-206).
func (c *Channel) Nonce() [16]byte {
	nonce := [16]byte{packetType}
	binary.BigEndian.PutUint32(nonce[4:], c.ssrc)
	return nonce
}

// Remote returns the device's proven address; zero until there is one.
func (c *Channel) Remote() netip.AddrPort {
	if to := c.remote.Load(); to != nil {
		return to.AddrPort
	}
	return netip.AddrPort{}
}

// SendAudio encrypts f and writes it to the socket. It never blocks: if the socket's buffer
// is full, the packet is lost and counted, and the error is returned. f.Timestamp is in
// milliseconds; one that is not ahead of the last packet's, or more than an hour ahead, is
// replaced by the last plus 1. Other errors: ErrEmpty (an empty datagram would end the
// device's receive task), ErrTooLong, ErrClosed, ErrNoAddress, ErrExhausted.
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

// next returns the header of the next downlink packet. The counter of block i is
// (timestamp, sequence+i), so packets with different timestamps never share a block
// (vectors udp_keystream_overlap.json).
func (c *Channel) next(timestamp uint32) (header, error) {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if c.sequence >= maxSequence {
		return header{}, ErrExhausted
	}
	step := timestamp - c.timestamp
	switch {
	case c.sequence == 0: // any first value is valid
	case step == 0 || step > maxTimestampStep || step > maxTimestampTravel-c.travel:
		timestamp = c.timestamp + 1
	case step > 1:
		c.travel += step
	}
	c.timestamp = timestamp
	c.sequence++
	return header{flags: flagDownlink, ssrc: c.ssrc | ssrcDownlink, timestamp: timestamp, sequence: c.sequence}, nil
}

// Close closes the channel. Later packets for it count as UnknownSSRC.
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

// sweep drops inactive claims, and reports whether Silent is due.
func (c *Channel) sweep(now time.Time) (tried uint64, silent bool, discarded int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cl := range c.claims {
		if now.Sub(cl.lastReceived) >= claimLife {
			discarded += c.drop(cl)
		}
	}
	if c.silenceReported || now.Sub(c.opened) < SilentAfter {
		return c.datagrams, false, discarded
	}
	c.silenceReported = true
	return c.datagrams, !c.hasAudio && !c.closed.Load(), discarded
}
