package storetest

import (
	"io"
	"net"
	"sync"
	"testing"
)

// Proxy is a TCP proxy in front of a database that a test can take away.
type Proxy struct {
	t        testing.TB
	address  string // of the proxy; the same after every Start
	upstream string

	mu       sync.Mutex
	listener net.Listener
	conns    map[net.Conn]struct{}
	stalled  bool
	running  sync.WaitGroup
}

// NewProxy reserves an address. Nothing listens there before Start.
func NewProxy(t testing.TB, upstream string) *Proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{t: t, address: listener.Addr().String(), upstream: upstream, conns: map[net.Conn]struct{}{}}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	return p
}

// Address is where the proxy listens once started.
func (p *Proxy) Address() string { return p.address }

// Start forwards connections from now on.
func (p *Proxy) Start() {
	p.t.Helper()
	listener, err := net.Listen("tcp", p.address)
	if err != nil {
		p.t.Fatal(err)
	}
	p.mu.Lock()
	p.listener, p.stalled = listener, false
	p.mu.Unlock()
	p.running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", p.upstream)
			if err != nil {
				_ = client.Close()
				continue
			}
			p.forward(listener, client, server)
		}
	})
}

// forward copies both directions until either end is closed. A connection that
// was accepted while Stop closed the listener is closed at once.
func (p *Proxy) forward(of net.Listener, client, server net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != of {
		_, _ = client.Close(), server.Close()
		return
	}
	p.conns[client], p.conns[server] = struct{}{}, struct{}{}
	p.running.Go(func() { p.copy(client, server) })
	p.running.Go(func() { p.copy(server, client) })
}

func (p *Proxy) copy(from, to net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		stalled := p.stalled
		p.mu.Unlock()
		if n > 0 && !stalled {
			if _, werr := to.Write(buf[:n]); werr != nil {
				err = werr
			}
		}
		if err != nil {
			break
		}
	}
	_, _ = from.Close(), to.Close()
	p.mu.Lock()
	delete(p.conns, from)
	p.mu.Unlock()
}

// Stall keeps all connections and passes nothing on, like a cable that is cut.
func (p *Proxy) Stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stalled = true
}

// Refuse closes the port and keeps the connections that are open.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.listener.Close()
	p.listener = nil
}

// Stop closes the port and every connection, and waits for all of it.
func (p *Proxy) Stop() {
	p.mu.Lock()
	closers := make([]io.Closer, 0, len(p.conns)+1)
	for conn := range p.conns {
		closers = append(closers, conn)
	}
	if p.listener != nil {
		closers = append(closers, p.listener)
		p.listener = nil
	}
	p.mu.Unlock()
	for _, c := range closers {
		_ = c.Close()
	}
	p.running.Wait()
}
