// Package udpaudio implements the audio of the MQTT transport: Opus packets in UDP
// datagrams in both directions, one channel per conversation.
//
//	u8 type=1 | u8 flags | u16 length | u32 ssrc | u32 timestamp | u32 sequence | Opus
//
// All integers are big-endian; the length is that of the Opus packet. The 16 bytes before
// it are the IV of its AES-128-CTR encryption (mqtt_protocol.cc:180-212, 267-334; vectors
// udp_audio.json). The device copies type, flags and ssrc from its nonce, so ssrc
// identifies the channel. Uplink flags are 0; downlink packets have flag 0x80 and ssrc bit
// 0x01000000 set, because both directions use one key.
//
// Packets are not authenticated, and ssrc is sent in clear text. An address is therefore
// not trusted because its packet decrypts: admit.go describes the evidence that it needs,
// and what an attacker can and cannot do.
package udpaudio

import (
	"context"
	"crypto/aes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/envelope"
	"fleetd/internal/tasks"
)

// Limits of a Table.
const (
	MaxChannels  = 1 << 18 // about 1 KB each
	SilentAfter  = 10 * time.Second
	sweepEvery   = time.Second
	socketBuffer = 4 << 20 // bytes, in each direction; the kernel may grant less
	shards       = 64
	// After maxReadErrors read errors in sequence the reader waits before each attempt, so
	// that a broken socket does not use a whole core.
	maxReadErrors = 16
	readRetry     = 50 * time.Millisecond
)

// Errors of Open and SendAudio.
var (
	ErrClosed    = errors.New("audio channel is closed")
	ErrTooMany   = errors.New("too many audio channels on this node; end conversations or add a node")
	ErrNoAddress = errors.New("the UDP address of the device is unknown until it has sent audio")
	ErrEmpty     = errors.New("an audio packet must not be empty")
	ErrTooLong   = errors.New("audio packet is too long for one datagram")
	ErrExhausted = errors.New("audio channel has used all sequence numbers; open a new one")
)

// Receiver receives a device's audio. Calls for one channel are sequential, on the
// goroutine that reads the socket, which they must not block. A call may still be in
// progress when Channel.Close returns.
type Receiver interface {
	// HandleAudio receives one Opus packet. f.Opus is valid only during the call.
	HandleAudio(f envelope.Frame)
	// ReportNoAudio is called at most once: if the channel was open for SilentAfter and no
	// packet was accepted. tried is the number of datagrams with the channel's ssrc: 0
	// indicates a blocked port, many a wrong key or an attacker.
	ReportNoAudio(tried uint64)
}

// Params describe one channel.
type Params struct {
	// FrameDuration is the value of the device's hello, for example 60 ms; 0 for any.
	FrameDuration time.Duration
	// Channels is the value of the device's hello; 1 refuses stereo.
	Channels int
	// Remote is the address of the control connection. It is preferred if several
	// addresses claim the channel, and never required.
	Remote   netip.Addr
	Receiver Receiver
}

// Table contains the channels of one socket. It is safe for concurrent use.
type Table struct {
	log      *slog.Logger
	conn     *net.UDPConn
	raw      syscall.RawConn
	ipv6     bool // the socket's family
	wildcard bool // the socket receives for all addresses of the host
	outgoing sync.Pool
	stats    Stats

	shards [shards]shard
	ctx    context.Context // ends with Close
	stop   context.CancelFunc
	tasks  sync.WaitGroup
}

type shard struct {
	mu       sync.RWMutex
	channels map[uint32]*Channel
}

func newTable(log *slog.Logger) *Table {
	t := &Table{log: log}
	t.ctx, t.stop = context.WithCancel(context.Background())
	for i := range t.shards {
		t.shards[i].channels = map[uint32]*Channel{}
	}
	t.outgoing.New = func() any { return newOutgoing() }
	return t
}

// Listen opens the socket at addr, "host:port", and returns a Table that runs until Close. The device supports IPv4 only
// (esp-ml307 esp_udp.cc).
func Listen(addr string, log *slog.Logger) (*Table, error) {
	packets, err := net.ListenPacket("udp", addr)
	if err != nil {
		return nil, fmt.Errorf("udpaudio: %w", err)
	}
	conn := packets.(*net.UDPConn)
	raw, err := conn.SyscallConn()
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("udpaudio: %w", err)
	}
	t := newTable(log)
	t.conn, t.raw, t.ipv6 = conn, raw, localAddr(conn).Addr().Is6()
	if err := errors.Join(conn.SetReadBuffer(socketBuffer), conn.SetWriteBuffer(socketBuffer)); err != nil {
		log.Warn("cannot enlarge the buffers of the UDP socket; packets may be lost under load", "error", err)
	}
	if err := t.enableLocalAddress(); err != nil {
		log.Warn("cannot set the source address of UDP packets; if this host has several addresses, listen on one of them", "error", err)
	}
	t.tasks.Go(t.read)
	t.tasks.Go(t.sweeper)
	return t, nil
}

func localAddr(conn *net.UDPConn) netip.AddrPort {
	addr := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	return netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
}

// Addr returns the address of the socket.
func (t *Table) Addr() netip.AddrPort { return localAddr(t.conn) }

// Stats returns the counters of the table.
func (t *Table) Stats() *Stats { return &t.stats }

// Close closes all channels and waits for the table's goroutines. It must not be called
// from a Receiver.
func (t *Table) Close() {
	t.stop()
	_ = t.conn.Close() // fails if it is closed already
	for i := range t.shards {
		for _, c := range t.shards[i].list(nil) {
			c.Close()
		}
	}
	t.tasks.Wait()
}

// list appends the channels of s to dst.
func (s *shard) list(dst []*Channel) []*Channel {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, c := range s.channels {
		dst = append(dst, c)
	}
	return dst
}

func (t *Table) shard(ssrc uint32) *shard { return &t.shards[ssrc%shards] }

// Open creates a channel with a new key and ssrc. Errors: ErrClosed, and ErrTooMany above
// MaxChannels.
func (t *Table) Open(p Params) (*Channel, error) {
	var random [20]byte
	if _, err := rand.Read(random[:]); err != nil {
		return nil, fmt.Errorf("udpaudio: %w", err)
	}
	key := [16]byte(random[:16])
	block, err := aes.NewCipher(key[:])
	if err != nil {
		return nil, fmt.Errorf("udpaudio: %w", err)
	}
	if t.stats.Channels.Add(1) > MaxChannels {
		t.stats.Channels.Add(-1)
		return nil, ErrTooMany
	}
	c := newChannel(t, p, key, block)
	for ssrc := binary.BigEndian.Uint32(random[16:]); ; ssrc++ {
		if c.ssrc = ssrc &^ ssrcDownlink; c.ssrc == 0 {
			continue
		}
		switch added, err := t.add(c); {
		case err != nil:
			t.stats.Channels.Add(-1)
			return nil, err
		case added:
			return c, nil
		}
	}
}

// add registers c. It returns false if its ssrc is in use.
func (t *Table) add(c *Channel) (bool, error) {
	s := t.shard(c.ssrc)
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.ctx.Err() != nil { // set before Close lists the channels
		return false, ErrClosed
	}
	if s.channels[c.ssrc] != nil {
		return false, nil
	}
	s.channels[c.ssrc] = c
	return true, nil
}

func (t *Table) remove(c *Channel) {
	s := t.shard(c.ssrc)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.channels, c.ssrc)
	t.stats.Channels.Add(-1)
}

func (t *Table) find(ssrc uint32) *Channel {
	s := t.shard(ssrc)
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.channels[ssrc]
}

// read is the only reader of the socket. It ends when the socket is closed.
func (t *Table) read() {
	r := reader{table: t}
	for failed := 0; ; {
		n, info, _, from, err := t.conn.ReadMsgUDPAddrPort(r.buf[:], r.control[:])
		if err == nil {
			failed = 0
			if t.wildcard {
				r.local = localAddress(r.control[:info])
			}
			r.contain(r.buf[:n], from, time.Now())
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		t.stats.ReadErrors.Add(1) // on some systems, ICMP errors of sent packets are reported here
		if failed++; failed == maxReadErrors {
			t.log.Warn("cannot read from the UDP socket; trying again", "error", err)
		}
		if failed >= maxReadErrors && !clock.Sleep(t.ctx, readRetry) {
			return
		}
	}
}

// reader contains the buffers of the reading goroutine. It must be allocated once, not per
// packet.
type reader struct {
	table   *Table
	packet  packet
	ctr     ctr
	local   netip.Addr // destination address of the datagram
	control [maxControl]byte
	buf     [maxPacket + 1]byte // one byte more, to detect packets that are too long
}

// contain calls handle for one datagram of an unknown sender: a panic that its bytes cause
// must not end the audio of all devices.
func (r *reader) contain(b []byte, from netip.AddrPort, now time.Time) {
	defer tasks.Contain(r.table.log, func() { r.table.stats.ReadErrors.Add(1) })
	r.handle(b, from, now)
}

// handle handles one datagram, which it decrypts in place, and counts it at the end.
func (r *reader) handle(b []byte, from netip.AddrPort, now time.Time) {
	t := r.table
	h, verdict := parse(b)
	if verdict == Accepted && h.flags != 0 {
		verdict = BadFlags
	}
	var c *Channel
	if verdict == Accepted {
		if c = t.find(h.ssrc); c == nil {
			verdict = UnknownSSRC
		}
	}
	if verdict != Accepted {
		t.stats.packets[verdict].Add(1)
		return
	}
	r.packet = packet{
		header: h, iv: (*[HeaderSize]byte)(b), body: b[HeaderSize:], ctr: &r.ctr,
		from: netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), local: r.local, now: now,
	}
	verdict, change := c.admit(&r.packet)
	if change != nil {
		t.apply(c, change)
	}
	if verdict == Accepted {
		c.receiver.HandleAudio(envelope.Frame{Timestamp: h.timestamp, Opus: r.packet.body})
	}
	t.stats.packets[verdict].Add(1)
}

// apply counts a change of address and delivers the frames held for it.
func (t *Table) apply(c *Channel, ch *change) {
	t.stats.Released.Add(uint64(len(ch.released)))
	t.stats.Discarded.Add(uint64(ch.discarded))
	if ch.moved {
		t.stats.Moves.Add(1)
	}
	t.log.Debug("audio address proven", "ssrc", c.ssrc, "from", ch.from, "to", ch.to, "held", len(ch.released))
	for _, f := range ch.released {
		c.receiver.HandleAudio(f.frame)
	}
}

// sweeper serves all channels, so that none needs a timer.
func (t *Table) sweeper() {
	var list []*Channel
	for now := range clock.Ticks(t.ctx, sweepEvery) {
		for i := range t.shards { // one shard at a time, so that the reader is not delayed
			list = t.shards[i].list(list[:0])
			for _, c := range list {
				t.sweep(c, now)
			}
			clear(list)
		}
	}
}

func (t *Table) sweep(c *Channel, now time.Time) {
	tried, silent, discarded := c.sweep(now)
	t.stats.Discarded.Add(uint64(discarded))
	if silent {
		c.receiver.ReportNoAudio(tried)
	}
}
