package connlimit

import (
	"crypto/tls"
	"net"
	"net/http"
	"sync/atomic"
)

// LimitHandshakes returns a listener for s.ServeTLS on which only a share of the node's threads
// computes TLS handshakes at once, slotShare's. A handshake is the most that somebody who is not
// authenticated can have a node compute, and as many as there are connections would delay every
// other request. It sets s.ConnState.
func LimitHandshakes(s *http.Server, l net.Listener) net.Listener {
	s.ConnState = func(c net.Conn, state http.ConnState) {
		if over, ok := c.(*tls.Conn); ok && state != http.StateNew {
			if h, ok := over.NetConn().(*handshakeConn); ok {
				h.end()
			}
		}
	}
	return &handshakeListener{l, make(chan struct{}, slotsOfCaller())}
}

type handshakeListener struct {
	net.Listener
	slots chan struct{}
}

// Accept implements net.Listener.
func (l *handshakeListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &handshakeConn{Conn: c, slots: l.slots}, nil
}

// handshakeConn has a slot from the end of a read to the next read or write, until the first
// request has been read. Between those crypto/tls computes, and waits for nobody.
type handshakeConn struct {
	net.Conn
	slots       chan struct{}
	held, ended atomic.Bool
}

// NetConn returns the wrapped connection, for MarkAuthenticated.
func (c *handshakeConn) NetConn() net.Conn { return c.Conn }

// Read implements net.Conn.
func (c *handshakeConn) Read(b []byte) (int, error) {
	if c.ended.Load() {
		return c.Conn.Read(b)
	}
	c.leave()
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.slots <- struct{}{}
		c.held.Store(true)
	}
	return n, err
}

// Write implements net.Conn.
func (c *handshakeConn) Write(b []byte) (int, error) {
	c.leave()
	return c.Conn.Write(b)
}

// Close implements net.Conn. The server closes every connection after its last read.
func (c *handshakeConn) Close() error {
	c.leave()
	return c.Conn.Close()
}

// end makes reads and writes free.
func (c *handshakeConn) end() {
	c.ended.Store(true)
	c.leave()
}

func (c *handshakeConn) leave() {
	if c.held.CompareAndSwap(true, false) {
		<-c.slots
	}
}
