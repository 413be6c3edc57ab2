package lobby

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Shares bounds how much of something one address may hold, so that a single
// host cannot keep all others out. An IPv6 host counts with its /64, of which
// it has all addresses. It is safe for concurrent use.
type Shares struct {
	limit int // 0: none
	mu    sync.Mutex
	held  map[netip.Addr]int
}

// NewShares returns Shares of limit each; 0 is no limit.
func NewShares(limit int) *Shares { return &Shares{limit: limit, held: map[netip.Addr]int{}} }

// Enter takes one; false if the address holds its share already.
func (s *Shares) Enter(addr netip.Addr) bool {
	if s.limit == 0 {
		return true
	}
	host := HostOf(addr)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[host] >= s.limit {
		return false
	}
	s.held[host]++
	return true
}

// Leave gives back what Enter took.
func (s *Shares) Leave(addr netip.Addr) {
	if s.limit == 0 {
		return
	}
	host := HostOf(addr)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[host]--; s.held[host] <= 0 {
		delete(s.held, host)
	}
}

// HostOf is what limits per address count by: an IPv6 host has a whole /64.
func HostOf(addr netip.Addr) netip.Addr {
	if addr = addr.Unmap(); addr.Is6() {
		if network, err := addr.WithZone("").Prefix(64); err == nil {
			return network.Addr()
		}
	}
	return addr
}

// Gate stands before the listeners of devices. Together they hold at most so
// many connections, which leaves descriptors to the rest of the process; and
// of those that have not proven yet who they are, each address has a share.
type Gate struct {
	most    int64
	trusted []netip.Prefix
	shares  *Shares
	open    atomic.Int64
	silent  Silent // of timed listeners: those that have not proven who they are
}

// NewGate returns a Gate for at most that many connections (0: no limit), and
// unproven ones of one address (0: no limit). Addresses in trusted are
// proxies: what comes from them comes from many, and has no share.
func NewGate(connections, perAddress int, trusted []netip.Prefix) *Gate {
	return &Gate{most: int64(connections), trusted: trusted, shares: NewShares(perAddress)}
}

// Open is the number of connections, and the most there may be.
func (g *Gate) Open() (connections, most int64) { return g.open.Load(), g.most }

// Guard returns a listener that hands out what the gate lets in, and closes
// the rest unanswered.
func (g *Gate) Guard(l net.Listener) *Guarded { return &Guarded{Listener: l, gate: g} }

// GuardTimed is Guard for callers over plain HTTP: every write of an answer has
// WriteTime, and when there are too many, one that has not proven who it is gives way.
func (g *Gate) GuardTimed(l net.Listener) *Guarded {
	return &Guarded{Listener: l, gate: g, timed: WriteTime}
}

// Guarded is a listener behind a Gate.
type Guarded struct {
	net.Listener
	gate  *Gate
	timed time.Duration // of a write; 0: no limit
	// Full counts connections closed because there are too many, Crowded those
	// closed because their address has its share.
	Full, Crowded atomic.Uint64
	// Late counts requests whose body came too slowly, Slow answers that were not taken in
	// time, where these have limits.
	Late, Slow atomic.Uint64
}

// Accept waits for a connection that the gate lets in.
func (l *Guarded) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if guest := l.admit(c); guest != nil {
			return guest, nil
		}
		_ = c.Close() // nobody was told anything yet
	}
}

func (l *Guarded) admit(c net.Conn) *guest {
	g := l.gate
	if n := g.open.Add(1); g.most > 0 && n > g.most && (l.timed == 0 || !g.silent.GiveWay()) {
		g.open.Add(-1)
		l.Full.Add(1)
		return nil
	}
	v := &guest{Conn: c, gate: g}
	if l.timed > 0 {
		v.Conn = &timedConn{Conn: c, limit: l.timed, slow: &l.Slow}
	}
	if peer, err := netip.ParseAddrPort(c.RemoteAddr().String()); err == nil && !within(peer.Addr(), g.trusted) {
		v.addr = peer.Addr()
		if !g.shares.Enter(v.addr) {
			g.open.Add(-1)
			l.Crowded.Add(1)
			return nil
		}
		if l.timed > 0 {
			g.silent.put(v, &v.waiting)
		}
	}
	return v
}

// guest is a connection that the gate has let in.
type guest struct {
	net.Conn
	gate   *Gate
	addr   netip.Addr  // zero: of a proxy
	proven atomic.Bool // or closed
	closed atomic.Bool

	waiting Waiting // among the silent, who guard it
}

// Vouch says that the peer of a connection has proven who it is, so that it
// takes no part of its address's share any more. TLS is looked through;
// connections that came through no gate are left alone.
func Vouch(c net.Conn) {
	for {
		switch v := c.(type) {
		case *guest:
			v.vouch()
			return
		case interface{ NetConn() net.Conn }:
			c = v.NetConn()
		default:
			return
		}
	}
}

// connKey is where WithConn puts the connection.
type connKey struct{}

// WithConn is the ConnContext of an http.Server behind a gate, so that
// VouchFor finds the connection of a request.
func WithConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// VouchFor is Vouch for the connection of a request.
func VouchFor(ctx context.Context) {
	if c, ok := ctx.Value(connKey{}).(net.Conn); ok {
		Vouch(c)
	}
}

func (v *guest) vouch() {
	if v.addr.IsValid() && v.proven.CompareAndSwap(false, true) {
		v.gate.shares.Leave(v.addr)
		v.gate.silent.take(&v.waiting)
	}
}

// Close gives up the connection's place.
func (v *guest) Close() error {
	if v.closed.CompareAndSwap(false, true) {
		v.vouch()
		v.gate.open.Add(-1)
	}
	return v.Conn.Close()
}

// CloseWrite is what net/http ends a connection with whose peer still sends,
// so that it can read the answer.
func (v *guest) CloseWrite() error {
	return closeWrite(v.Conn)
}

func closeWrite(c net.Conn) error {
	if timed, ok := c.(*timedConn); ok {
		c = timed.Conn
	}
	if c, ok := c.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return nil
}
