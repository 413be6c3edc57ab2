package connlimit

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

// Limits of PROXY headers.
const (
	HeaderTimeout = 5 * time.Second
	MaxHeaders    = 4_096 // connections whose header has not arrived; more are closed
	headerBuffer  = 256   // a header of version 2 with its extensions may be longer
)

// ProxyListener is a listener for proxies that name the client of each connection by
// the PROXY protocol (version 1 or 2). Headers are accepted from trusted proxies only,
// and these must send one; other peers connect without. Close ends its goroutines.
type ProxyListener struct {
	net.Listener
	trusted []netip.Prefix
	log     *slog.Logger
	out     chan acceptResult
	ctx     context.Context
	stop    context.CancelFunc
	tasks   sync.WaitGroup
	waiting atomic.Int64

	// Refused counts connections of trusted proxies without a valid header.
	Refused atomic.Uint64
}

type acceptResult struct {
	conn net.Conn
	err  error
}

// NewProxyListener returns a running ProxyListener over l.
func NewProxyListener(l net.Listener, trusted []netip.Prefix, log *slog.Logger) *ProxyListener {
	p := &ProxyListener{Listener: l, trusted: trusted, log: log, out: make(chan acceptResult)}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.tasks.Go(p.accept)
	return p
}

// Accept waits for a connection whose client is known.
func (p *ProxyListener) Accept() (net.Conn, error) {
	select {
	case a := <-p.out:
		return a.conn, a.err
	case <-p.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close closes the listener and the connections that were not accepted.
func (p *ProxyListener) Close() error {
	err := p.Listener.Close()
	p.stop()
	p.tasks.Wait()
	return err
}

func (p *ProxyListener) accept() {
	for {
		c, err := p.Listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		peer := netip.AddrPort{}
		if err == nil {
			peer, _ = netip.ParseAddrPort(c.RemoteAddr().String()) // zero is not trusted
		}
		if err != nil || !InNetworks(peer.Addr(), p.trusted) {
			p.deliver(acceptResult{c, err})
			continue
		}
		if p.waiting.Add(1) > MaxHeaders {
			p.waiting.Add(-1)
			p.refuse(c, errors.New("too many connections whose header has not arrived"))
			continue
		}
		p.tasks.Go(func() { p.read(c) }) // a silent proxy must not delay other connections
	}
}

// deliver passes a connection or an error to Accept.
func (p *ProxyListener) deliver(a acceptResult) {
	select {
	case p.out <- a:
	case <-p.ctx.Done():
		if a.conn != nil {
			_ = a.conn.Close() // closed without a response
		}
	}
}

func (p *ProxyListener) refuse(c net.Conn, err error) {
	p.Refused.Add(1)
	p.log.Debug("trusted proxy sends no valid PROXY header; make it send one, or remove it from --trusted-proxies", "remote", c.RemoteAddr(), "error", err)
	_ = c.Close() // a response could not be in the right protocol
}

// read reads the header of a trusted proxy.
func (p *ProxyListener) read(c net.Conn) {
	_ = c.SetReadDeadline(time.Now().Add(HeaderTimeout)) // an error shows in the read
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
	} // else a health check of the proxy: keep its own address
	if r.Buffered() == 0 {
		v.rest = nil
	}
	p.deliver(acceptResult{v, nil})
}

// proxiedConn is a connection whose client the proxy has named.
type proxiedConn struct {
	net.Conn
	rest   *bufio.Reader // bytes that arrived with the header; nil when they are read
	remote net.Addr
}

// RemoteAddr returns the address of the client.
func (c *proxiedConn) RemoteAddr() net.Addr { return c.remote }

// Read implements net.Conn. Unlike other connections, it allows one caller at a time.
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

// CloseWrite is called by net/http to end a connection whose peer is still sending.
func (c *proxiedConn) CloseWrite() error { return closeWrite(c.Conn) }
