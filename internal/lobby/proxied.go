package lobby

import (
	"bufio"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pires/go-proxyproto"
)

// Limits of what proxies say before the client speaks.
const (
	HeaderTimeout = 5 * time.Second
	MaxHeaders    = 4_096 // connections whose header has not come; more are closed
	headerBuffer  = 256   // a header of version 2 with its extensions may be longer
)

// Proxied is a listener behind proxies that say by the PROXY protocol (version 1 or 2)
// whose connection they pass on. Headers are taken from trusted proxies alone, and
// these must send one; others connect as ever. Close it to end its goroutines.
type Proxied struct {
	net.Listener
	trusted []netip.Prefix
	log     *slog.Logger
	out     chan accepted
	ctx     context.Context
	stop    context.CancelFunc
	tasks   sync.WaitGroup
	waiting atomic.Int64

	// Refused counts connections of trusted proxies without a valid header.
	Refused atomic.Uint64
}

type accepted struct {
	conn net.Conn
	err  error
}

// NewProxied returns a running Proxied over l.
func NewProxied(l net.Listener, trusted []netip.Prefix, log *slog.Logger) *Proxied {
	p := &Proxied{Listener: l, trusted: trusted, log: log, out: make(chan accepted)}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.tasks.Go(p.accept)
	return p
}

// Accept waits for a connection whose client is known.
func (p *Proxied) Accept() (net.Conn, error) {
	select {
	case a := <-p.out:
		return a.conn, a.err
	case <-p.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close ends the listener and what has not been accepted.
func (p *Proxied) Close() error {
	err := p.Listener.Close()
	p.stop()
	p.tasks.Wait()
	return err
}

func (p *Proxied) accept() {
	for {
		c, err := p.Listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		peer := netip.AddrPort{}
		if err == nil {
			peer, _ = netip.ParseAddrPort(c.RemoteAddr().String()) // zero is not trusted
		}
		if err != nil || !within(peer.Addr(), p.trusted) {
			p.hand(accepted{c, err})
			continue
		}
		if p.waiting.Add(1) > MaxHeaders {
			p.waiting.Add(-1)
			p.refuse(c, errors.New("too many connections whose header has not come"))
			continue
		}
		p.tasks.Go(func() { p.read(c) }) // a proxy that says nothing must not keep others waiting
	}
}

// hand gives a connection, or an error, to who calls Accept.
func (p *Proxied) hand(a accepted) {
	select {
	case p.out <- a:
	case <-p.ctx.Done():
		if a.conn != nil {
			_ = a.conn.Close() // nobody was told anything yet
		}
	}
}

func (p *Proxied) refuse(c net.Conn, err error) {
	p.Refused.Add(1)
	p.log.Debug("trusted proxy sends no valid PROXY header; have it send one, or take it from --trusted-proxies", "remote", c.RemoteAddr(), "error", err)
	_ = c.Close() // what it sent instead is not an answer's due
}

// read takes the header of a trusted proxy.
func (p *Proxied) read(c net.Conn) {
	_ = c.SetReadDeadline(time.Now().Add(HeaderTimeout)) // an error shows at the read
	stop := context.AfterFunc(p.ctx, func() { _ = c.Close() })
	defer stop()
	r := bufio.NewReaderSize(c, headerBuffer)
	header, err := proxyproto.Read(r)
	p.waiting.Add(-1)
	if err != nil {
		p.refuse(c, err)
		return
	}
	_ = c.SetReadDeadline(time.Time{})
	v := &proxiedConn{Conn: c, rest: r, remote: c.RemoteAddr()}
	if source, _, ok := header.TCPAddrs(); ok && !header.Command.IsLocal() {
		v.remote = source
	} // else the proxy's own: it looks whether the port lives
	if r.Buffered() == 0 {
		v.rest = nil
	}
	p.hand(accepted{v, nil})
}

// proxiedConn is a connection whose client the proxy has named.
type proxiedConn struct {
	net.Conn
	rest   *bufio.Reader // what came with the header; nil when it is read
	remote net.Addr
}

// RemoteAddr is the client's address.
func (c *proxiedConn) RemoteAddr() net.Addr { return c.remote }

// Read implements net.Conn. Like any net.Conn's, it has one caller at a time here.
func (c *proxiedConn) Read(b []byte) (int, error) {
	if c.rest == nil {
		return c.Conn.Read(b)
	}
	n, err := c.rest.Read(b[:min(len(b), c.rest.Buffered())])
	if c.rest.Buffered() == 0 {
		c.rest = nil
	}
	return n, err
}

// CloseWrite is what net/http ends a connection with whose peer still sends.
func (c *proxiedConn) CloseWrite() error { return closeWrite(c.Conn) }
