// Package udpaudio is the audio plane of the MQTT transport: Opus packets in
// UDP datagrams, both ways, one channel per conversation.
//
//	u8 type=1 | u8 flags | u16 length | u32 ssrc | u32 timestamp | u32 sequence | Opus
//
// All integers are big-endian, the length is that of the Opus packet. The 16
// bytes before it are the IV of AES-128-CTR over it (mqtt_protocol.cc:180-212,
// 267-334; vectors udp_audio.json). The device copies type, flags and ssrc
// from the nonce it is given, so ssrc names the channel. Uplink flags are 0;
// downlink packets have flag 0x80 and ssrc bit 0x01000000 set, since one key
// serves both directions.
//
// Nothing authenticates a packet, and ssrc travels in clear text. So an
// address is not believed because its packet decrypts: see admit.go for what
// it must prove, and what an attacker can and cannot do.
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
	"sync/atomic"
	"syscall"
	"time"

	"fleetd/internal/envelope"
	"fleetd/internal/tasks"
)

// DefaultAddr is where a Table listens unless told otherwise: all addresses,
// IPv4 and IPv6. The device itself speaks IPv4 only (esp-ml307 esp_udp.cc).
const DefaultAddr = ":8884"

// Limits of a Table.
const (
	MaxChannels  = 1 << 18 // about 1 KB each
	SilentAfter  = 10 * time.Second
	sweepEvery   = time.Second
	socketBuffer = 4 << 20 // bytes, each way; the kernel may grant less
	shards       = 64
	// After so many read errors in a row the reader waits before each attempt,
	// so that a broken socket does not take a core.
	maxReadErrors = 16
	readRetry     = 50 * time.Millisecond
)

// Errors of Open and SendAudio.
var (
	ErrClosed    = errors.New("audio channel is closed")
	ErrTooMany   = errors.New("too many audio channels; close some or add a node")
	ErrNoAddress = errors.New("the device's UDP address is not known before it has spoken")
	ErrEmpty     = errors.New("an audio packet must not be empty")
	ErrTooLong   = errors.New("audio packet is too long for one datagram")
	ErrExhausted = errors.New("audio channel has used up its sequences; open a new one")
)

// Receiver takes what a device says. Calls for one channel come one after the
// other, from the goroutine that reads the socket, which they must not block;
// one may still be under way when Channel.Close returns.
type Receiver interface {
	// HandleAudio takes one Opus packet. f.Opus is only valid during the call.
	HandleAudio(f envelope.Frame)
	// Silent is called at most once: the channel has been open for SilentAfter
	// and no packet was accepted for it. tried is the number of datagrams that
	// named it: 0 tells of a blocked port, many of a wrong key or a forger.
	Silent(tried uint64)
}

// Params describe one channel.
type Params struct {
	// FrameDuration is that of the device's hello, for example 60 ms; 0 for any.
	FrameDuration time.Duration
	// Channels is that of the device's hello; 1 refuses stereo.
	Channels int
	// Remote is the address of the control connection. It is preferred when
	// several addresses claim the channel, never required.
	Remote   netip.Addr
	Receiver Receiver
}

// Table is the channels of one socket. All methods may be called at any time
// and concurrently.
type Table struct {
	log      *slog.Logger
	conn     *net.UDPConn
	raw      syscall.RawConn
	ipv6     bool // the socket's family
	wildcard bool // the socket takes packets for all addresses of the host
	outgoing sync.Pool
	stats    Stats

	shards [shards]shard
	once   sync.Once
	closed atomic.Bool
	done   chan struct{}
	tasks  sync.WaitGroup
}

type shard struct {
	mu       sync.RWMutex
	channels map[uint32]*Channel
}

func newTable(log *slog.Logger) *Table {
	t := &Table{log: log, done: make(chan struct{})}
	for i := range t.shards {
		t.shards[i].channels = map[uint32]*Channel{}
	}
	t.outgoing.New = func() any { return newOutgoing() }
	return t
}

// Listen opens the socket at addr, "host:port", DefaultAddr if empty, and
// returns a running Table. It runs until Close or the end of ctx.
func Listen(ctx context.Context, addr string, log *slog.Logger) (*Table, error) {
	if addr == "" {
		addr = DefaultAddr
	}
	var config net.ListenConfig
	packets, err := config.ListenPacket(ctx, "udp", addr)
	if err != nil {
		return nil, fmt.Errorf("udpaudio: %w", err)
	}
	conn, ok := packets.(*net.UDPConn)
	if !ok {
		_ = packets.Close()
		return nil, fmt.Errorf("udpaudio: %s is not a UDP address", addr)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("udpaudio: %w", err)
	}
	t := newTable(log)
	t.conn, t.raw, t.ipv6 = conn, raw, localAddr(conn).Addr().Is6()
	if err := errors.Join(conn.SetReadBuffer(socketBuffer), conn.SetWriteBuffer(socketBuffer)); err != nil {
		log.Warn("udp socket keeps its default buffers", "error", err)
	}
	if err := t.askLocal(); err != nil {
		log.Warn("udp answers leave from the address that the system chooses: listen on one address if this host has several", "error", err)
	}
	stop := context.AfterFunc(ctx, t.shut)
	t.tasks.Go(func() { defer stop(); t.read() })
	t.tasks.Go(t.sweeper)
	return t, nil
}

func localAddr(conn *net.UDPConn) netip.AddrPort {
	local, ok := conn.LocalAddr().(*net.UDPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	addr := local.AddrPort()
	return netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
}

// Addr is the address the socket is bound to.
func (t *Table) Addr() netip.AddrPort { return localAddr(t.conn) }

// Stats returns the counters of the table.
func (t *Table) Stats() *Stats { return &t.stats }

// Close ends all channels and waits for the table's goroutines. It must not be
// called from a Receiver.
func (t *Table) Close() {
	t.shut()
	t.tasks.Wait()
}

func (t *Table) shut() {
	t.once.Do(func() {
		t.closed.Store(true)
		close(t.done)
		_ = t.conn.Close() // closed only here
		for i := range t.shards {
			for _, c := range t.shards[i].list(nil) {
				c.Close()
			}
		}
	})
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

// Open makes a channel with a fresh key and ssrc. Errors: ErrClosed, and
// ErrTooMany above MaxChannels.
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

// add registers c and reports false if its ssrc is in use.
func (t *Table) add(c *Channel) (bool, error) {
	s := t.shard(c.ssrc)
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.closed.Load() { // set before shut lists the shards
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

// read is the socket's one reader. It ends when the socket is closed.
func (t *Table) read() {
	r := reader{table: t}
	for failed := 0; ; {
		n, info, _, from, err := t.conn.ReadMsgUDPAddrPort(r.buf[:], r.control[:])
		if err == nil {
			failed = 0
			if t.wildcard {
				r.local = localOf(r.control[:info])
			}
			r.contain(r.buf[:n], from, time.Now())
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		t.stats.ReadErrors.Add(1) // ICMP errors of what was sent come out here on some systems
		if failed++; failed == maxReadErrors {
			t.log.Warn("udp socket fails to read", "error", err)
		}
		if failed >= maxReadErrors {
			select {
			case <-time.After(readRetry):
			case <-t.done:
				return
			}
		}
	}
}

// reader is what one reading goroutine needs. It must live on the heap once,
// not per packet.
type reader struct {
	table   *Table
	packet  packet
	ctr     ctr
	local   netip.Addr // that the datagram was sent to
	control [maxControl]byte
	buf     [maxPacket + 1]byte // one more, to see that a packet is too long
}

// contain is handle for one datagram of a stranger: a fault that its bytes set
// off must not end the audio of all devices.
func (r *reader) contain(b []byte, from netip.AddrPort, now time.Time) {
	defer tasks.Contain(r.table.log, func() { r.table.stats.ReadErrors.Add(1) })
	r.handle(b, from, now)
}

// handle takes one datagram, which it decrypts in place, and counts it when it
// is done with it.
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
		t.tell(c, change)
	}
	if verdict == Accepted {
		c.receiver.HandleAudio(envelope.Frame{Timestamp: h.timestamp, Opus: r.packet.body})
	}
	t.stats.packets[verdict].Add(1)
}

// tell counts a change of address and hands over what was held for it.
func (t *Table) tell(c *Channel, ch *change) {
	t.stats.Confirmed.Add(1)
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
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	var list []*Channel
	for {
		select {
		case <-t.done:
			return
		case now := <-tick.C:
			for i := range t.shards { // one at a time, so that the reader is never kept long
				list = t.shards[i].list(list[:0])
				for _, c := range list {
					t.sweep(c, now)
				}
				clear(list)
			}
		}
	}
}

func (t *Table) sweep(c *Channel, now time.Time) {
	tried, silent, discarded := c.sweep(now)
	t.stats.Discarded.Add(uint64(discarded))
	if silent {
		t.stats.Silent.Add(1)
		c.receiver.Silent(tried)
	}
}
