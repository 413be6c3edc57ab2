package fleettest

import (
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// Fault is what is wrong with a wire.
type Fault int

// Faults of a wire. A stalled one loses every packet and closes nothing: what
// was sent arrives when it is restored, as TCP would send it again.
const (
	None Fault = iota
	Cut        // connections are closed, and new ones at once
	Stalled
)

// Wire carries TCP connections to one of several servers, as a load balancer
// does, or to the only one there is; the way to each can be broken. It is safe
// for concurrent use.
type Wire struct {
	t        testing.TB
	listener net.Listener
	tasks    sync.WaitGroup

	mu     sync.Mutex
	random *rand.Rand
	ends   []*wireEnd
	closed bool
}

// wireEnd is the way to one server.
type wireEnd struct {
	address  string
	fault    Fault
	restored chan struct{} // closed while the way is open
	links    map[*link]struct{}
}

// link is one connection through a wire.
type link struct {
	client, server net.Conn
	deserted       atomic.Bool
}

func (l *link) close() { _, _ = l.client.Close(), l.server.Close() }

// NewWire listens on a free port until the test ends. Which server a connection
// is carried to follows from the seed.
func NewWire(t testing.TB, seed uint64, servers ...string) *Wire {
	t.Helper()
	listener, err := net.Listen("tcp", freePort(t))
	if err != nil {
		t.Fatal(err)
	}
	w := &Wire{t: t, listener: listener, random: rand.New(rand.NewPCG(seed, 1))}
	for _, address := range servers {
		open := make(chan struct{})
		close(open)
		w.ends = append(w.ends, &wireEnd{address: address, restored: open, links: map[*link]struct{}{}})
	}
	w.tasks.Go(w.accept)
	t.Cleanup(func() {
		_ = w.listener.Close()
		for i := range w.ends {
			w.Break(i, Cut)
		}
		w.mu.Lock()
		w.closed = true
		for _, e := range w.ends {
			e.repair()
		}
		w.mu.Unlock()
		w.tasks.Wait()
	})
	return w
}

// Address is where clients connect.
func (w *Wire) Address() string { return w.listener.Addr().String() }

// Break sets what is wrong with the connection to one server, None to repair it.
func (w *Wire) Break(server int, fault Fault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.ends[server]
	if e.fault == Stalled && fault != Stalled {
		e.repair()
	}
	if fault == Stalled && e.fault != Stalled {
		e.restored = make(chan struct{})
	}
	e.fault = fault
	if fault == Cut {
		for l := range e.links {
			l.close()
		}
	}
}

func (e *wireEnd) repair() {
	select {
	case <-e.restored:
	default:
		close(e.restored)
	}
}

// Desert closes the clients' side of every connection to a server, which is
// not notified: as when devices lose their power or a router forgets them.
func (w *Wire) Desert(server int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for l := range w.ends[server].links {
		l.deserted.Store(true)
		_ = l.client.Close()
	}
}

// Sound reports whether nothing is wrong with the way to a server.
func (w *Wire) Sound(server int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ends[server].fault == None
}

// Links is how many connections the way to a server carries.
func (w *Wire) Links(server int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.ends[server].links)
}

func (w *Wire) accept() {
	for {
		client, err := w.listener.Accept()
		if err != nil {
			return
		}
		w.tasks.Go(func() { w.carry(client) })
	}
}

// pick chooses a server that is not known to be cut off.
func (w *Wire) pick() *wireEnd {
	w.mu.Lock()
	defer w.mu.Unlock()
	var open []*wireEnd
	for _, e := range w.ends {
		if e.fault != Cut {
			open = append(open, e)
		}
	}
	if len(open) == 0 || w.closed {
		return nil
	}
	return open[w.random.IntN(len(open))]
}

// carry takes one connection to a server, and to the next if that is down.
func (w *Wire) carry(client net.Conn) {
	defer func() { _ = client.Close() }()
	for range 2 * len(w.ends) {
		e := w.pick()
		if e == nil {
			return
		}
		server, err := net.DialTimeout("tcp", e.address, time.Second)
		if err != nil {
			continue
		}
		w.join(e, &link{client: client, server: server})
		return
	}
}

func (w *Wire) join(e *wireEnd, l *link) {
	w.mu.Lock()
	if w.closed || e.fault == Cut {
		w.mu.Unlock()
		l.close()
		return
	}
	e.links[l] = struct{}{}
	w.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() {
		err := w.copy(e, l.client, l.server)
		if !l.deserted.Load() {
			if tcp, ok := l.server.(*net.TCPConn); ok && errors.Is(err, syscall.ECONNRESET) {
				_ = tcp.SetLinger(0) // so that it is reset, too
			}
			_ = l.server.Close()
		}
	})
	both.Go(func() {
		_ = w.copy(e, l.server, l.client)
		if l.deserted.Load() { // the server talks to nobody, until it gives up
			_, _ = io.Copy(io.Discard, l.server)
		}
		_ = l.client.Close()
	})
	both.Wait()
	l.close()
	w.mu.Lock()
	delete(e.links, l)
	w.mu.Unlock()
}

// copy passes on what one side sends, while the way is open, until it ends, and returns how that ended.
func (w *Wire) copy(e *wireEnd, from, to net.Conn) error {
	buffer := make([]byte, 16<<10)
	for {
		n, err := from.Read(buffer)
		w.mu.Lock()
		open := e.restored
		w.mu.Unlock()
		<-open
		if n > 0 {
			if _, err := to.Write(buffer[:n]); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
	}
}
