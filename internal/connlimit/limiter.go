package connlimit

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// Shares limits how much of a resource each of many may hold, so that none
// excludes the others. It is safe for concurrent use.
type Shares[K comparable] struct {
	limit int // 0: none
	mu    sync.Mutex
	held  map[K]int
}

// NewShares returns Shares of limit each; 0: unlimited. Shares of addresses have an AddressKey.
func NewShares[K comparable](limit int) *Shares[K] {
	return &Shares[K]{limit: limit, held: map[K]int{}}
}

// Acquire takes one. It returns false if the holder already has its share.
func (s *Shares[K]) Acquire(holder K) bool {
	if s.limit == 0 {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[holder] >= s.limit {
		return false
	}
	s.held[holder]++
	return true
}

// Release returns one that Acquire took.
func (s *Shares[K]) Release(holder K) {
	if s.limit == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[holder]--; s.held[holder] <= 0 {
		delete(s.held, holder)
	}
}

// AddressKey returns the address by which limits count: for IPv6 its /64 network, because a host usually has all of it.
func AddressKey(addr netip.Addr) netip.Addr {
	if addr = addr.Unmap(); addr.Is6() {
		if network, err := addr.WithZone("").Prefix(64); err == nil {
			return network.Addr()
		}
	}
	return addr
}

// Limiter limits the connections of a group of listeners: their total, which leaves
// file descriptors to the rest of the process, and per address the number of
// connections that are not authenticated yet.
type Limiter struct {
	maxOpen int64
	trusted []netip.Prefix
	shares  *Shares[netip.Addr]
	open    atomic.Int64
	silent  SilentConns // of listeners for callers: connections that are not authenticated
}

// NewLimiter returns a Limiter for at most connections, and perAddress connections
// of one address that are not authenticated (0: unlimited). Addresses in trusted are
// proxies; their connections belong to many clients and have no share.
func NewLimiter(connections, perAddress int, trusted []netip.Prefix) *Limiter {
	return &Limiter{maxOpen: int64(connections), trusted: trusted, shares: NewShares[netip.Addr](perAddress)}
}

// Open returns the number of open connections and the maximum.
func (g *Limiter) Open() (connections, most int64) { return g.open.Load(), g.maxOpen }

// Limit returns a listener that accepts connections within the limits, and closes
// the others without a response.
func (g *Limiter) Limit(l net.Listener) *Listener { return &Listener{Listener: l, limiter: g} }

// LimitCallers is Limit for API callers over plain HTTP. Every write of a response
// has WriteTime. At the maximum, a connection that is not authenticated is closed in
// favor of a new one.
func (g *Limiter) LimitCallers(l net.Listener) *Listener {
	return &Listener{Listener: l, limiter: g, timed: WriteTime, unread: UnreadTime}
}

// Listener is a listener with the limits of a Limiter.
type Listener struct {
	net.Listener
	limiter *Limiter
	timed   time.Duration // per write; 0: no limit
	unread  time.Duration // UnreadTime; 0: the default of the operating system
	// Full counts connections closed at the maximum, OverShare those closed
	// because their address has its share.
	Full, OverShare atomic.Uint64
	// Late counts requests whose body was too slow, Slow responses that the client
	// did not read in time.
	Late, Slow atomic.Uint64
}

// Accept waits for a connection within the limits.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if tracked := l.admit(c); tracked != nil {
			return tracked, nil
		}
		_ = c.Close() // closed without a response
	}
}

func (l *Listener) admit(c net.Conn) *trackedConn {
	g := l.limiter
	if n := g.open.Add(1); g.maxOpen > 0 && n > g.maxOpen && (l.timed == 0 || !g.silent.CloseOldest()) {
		g.open.Add(-1)
		l.Full.Add(1)
		return nil
	}
	v := &trackedConn{Conn: c, limiter: g}
	if l.timed > 0 {
		v.Conn = &timedConn{Conn: c, limit: l.timed, slow: &l.Slow}
		v.caller = &caller{}
		endUnread(c, l.unread)
	}
	if peer, err := netip.ParseAddrPort(c.RemoteAddr().String()); err == nil && !InNetworks(peer.Addr(), g.trusted) {
		v.addr = peer.Addr()
		if !g.shares.Acquire(AddressKey(v.addr)) {
			g.open.Add(-1)
			l.OverShare.Add(1)
			return nil
		}
		if v.caller != nil {
			g.silent.Add(v, &v.caller.silentEntry)
		}
	}
	return v
}

// trackedConn is a connection that a Limiter has admitted.
type trackedConn struct {
	net.Conn
	limiter         *Limiter
	addr            netip.Addr  // zero: of a trusted proxy
	isAuthenticated atomic.Bool // authenticated or closed
	closed          atomic.Bool

	caller *caller // nil: a device's
}

// caller is what a connection to the API has in addition.
type caller struct {
	silentEntry SilentEntry                  // in limiter.silent, whose lock protects it
	pace        atomic.Pointer[rate.Limiter] // of unauthenticated requests; nil: none came
}

// How often an unauthenticated caller of the API may send requests that need no token,
// on each connection: so many at once, and then so many a second.
const (
	AnonymousRate  = 20
	AnonymousBurst = 50
)

// PaceAnonymous delays a request on an unauthenticated connection that sends more of
// them than it may. Connections of trusted proxies carry many callers and are not delayed.
func PaceAnonymous(ctx context.Context) {
	c, _ := ctx.Value(connKey{}).(net.Conn)
	if v := trackedOf(c); v != nil {
		v.paceAnonymous(ctx)
	}
}

func (v *trackedConn) paceAnonymous(ctx context.Context) {
	if v.caller == nil || !v.addr.IsValid() || v.isAuthenticated.Load() {
		return
	}
	pace := &v.caller.pace
	if pace.Load() == nil {
		pace.CompareAndSwap(nil, rate.NewLimiter(AnonymousRate, AnonymousBurst))
	}
	_ = pace.Load().Wait(ctx) // the client is gone if this fails
}

// MarkAuthenticated records that the peer of a connection is authenticated, so that
// the connection no longer counts for the share of its address. It unwraps TLS
// connections, and ignores connections without a Limiter.
func MarkAuthenticated(c net.Conn) {
	if v := trackedOf(c); v != nil {
		v.authenticated()
	}
}

// trackedOf returns the limited connection below c; nil if there is none.
func trackedOf(c net.Conn) *trackedConn {
	for {
		switch v := c.(type) {
		case *trackedConn:
			return v
		case interface{ NetConn() net.Conn }:
			c = v.NetConn()
		default:
			return nil
		}
	}
}

// connKey is the context key of WithConn.
type connKey struct{}

// WithConn is the ConnContext of an http.Server with a limited listener. It lets
// MarkRequestAuthenticated find the connection of a request.
func WithConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// MarkRequestAuthenticated is MarkAuthenticated for the connection of a request.
func MarkRequestAuthenticated(ctx context.Context) {
	if c, ok := ctx.Value(connKey{}).(net.Conn); ok {
		MarkAuthenticated(c)
	}
}

func (v *trackedConn) authenticated() {
	if v.addr.IsValid() && v.isAuthenticated.CompareAndSwap(false, true) {
		v.limiter.shares.Release(AddressKey(v.addr))
		if v.caller != nil {
			v.limiter.silent.Remove(&v.caller.silentEntry)
		}
	}
}

// Close closes the connection and releases its place.
func (v *trackedConn) Close() error {
	if v.closed.CompareAndSwap(false, true) {
		v.authenticated()
		v.limiter.open.Add(-1)
	}
	return v.Conn.Close()
}

// CloseWrite is called by net/http to end a connection whose peer is still sending,
// so that the peer can read the response.
func (v *trackedConn) CloseWrite() error {
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
