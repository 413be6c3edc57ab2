package connlimit

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestShares(t *testing.T) {
	s := NewShares[netip.Addr](2)
	addr := func(text string) netip.Addr { return AddressKey(netip.MustParseAddr(text)) }
	for _, step := range []struct {
		addr string
		want bool
	}{
		{"192.0.2.1", true}, {"::ffff:192.0.2.1", true}, {"192.0.2.1", false}, {"192.0.2.2", true},
		{"2001:db8::1", true}, {"2001:db8::2:3:4:5", true}, {"2001:db8::9", false}, {"2001:db8:0:1::1", true}, {"fe80::1%eth0", true},
	} {
		if got := s.Acquire(addr(step.addr)); got != step.want {
			t.Errorf("%s: %v", step.addr, got)
		}
	}
	s.Release(addr("2001:db8::2"))
	if !s.Acquire(addr("2001:db8::9")) {
		t.Error("no room after one left")
	}
	for _, a := range []string{"192.0.2.1", "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::1", "2001:db8:0:1::1", "fe80::1"} {
		s.Release(addr(a))
	}
	if len(s.held) != 0 {
		t.Errorf("entries are kept for addresses without a share: %v", s.held)
	}
	if free := NewShares[netip.Addr](0); !free.Acquire(addr("192.0.2.1")) || len(free.held) != 0 {
		t.Error("a limit of 0 is not unlimited")
	}
}

// testListener is a limited listener whose accepted connections are kept.
type testListener struct {
	*Listener
	accepted chan net.Conn
}

func openTestListener(t *testing.T, g *Limiter) testListener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := testListener{g.Limit(l), make(chan net.Conn, 100)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := d.Accept()
			if err != nil {
				return
			}
			d.accepted <- c
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return d
}

// dial connects from a local address. It returns nil if the connection was refused.
func (d testListener) dial(t *testing.T, from string) (tracked net.Conn) {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := dialer.Dial("tcp", d.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	gone := make(chan struct{})
	go func() {
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Read(make([]byte, 1)); errors.Is(err, io.EOF) || !errors.Is(err, net.ErrClosed) {
			close(gone)
		}
	}()
	select {
	case tracked = <-d.accepted:
		t.Cleanup(func() { _ = tracked.Close() })
		return tracked
	case <-gone:
		return nil
	}
}

func TestLimiter(t *testing.T) {
	g := NewLimiter(5, 2, []netip.Prefix{netip.MustParsePrefix("127.0.0.9/32")})
	a, b := openTestListener(t, g), openTestListener(t, g)
	first, second := a.dial(t, "127.0.0.1"), b.dial(t, "127.0.0.1") // one share for all listeners
	if first == nil || second == nil || a.dial(t, "127.0.0.1") != nil || a.OverShare.Load() != 1 {
		t.Fatal("the share of one address is not 2")
	}
	if a.dial(t, "127.0.0.2") == nil {
		t.Error("another address is refused")
	}
	MarkAuthenticated(first)
	MarkAuthenticated(first)
	if third := a.dial(t, "127.0.0.1"); third == nil || a.dial(t, "127.0.0.1") != nil {
		t.Error("an authenticated connection still counts, or was subtracted twice")
	}
	if a.dial(t, "127.0.0.9") == nil { // the fifth
		t.Error("a proxy has a share")
	}
	if a.dial(t, "127.0.0.9") != nil || b.dial(t, "127.0.0.3") != nil || a.Full.Load() != 1 || b.Full.Load() != 1 {
		t.Errorf("more than 5 are open; %d and %d were refused", a.Full.Load(), b.Full.Load())
	}
	var closing sync.WaitGroup
	for range 4 { // concurrently
		closing.Go(func() { _ = second.Close(); MarkAuthenticated(second) })
	}
	closing.Wait()
	if open, most := g.Open(); open != 4 || most != 5 {
		t.Errorf("%d of %d are open", open, most)
	}
	if b.dial(t, "127.0.0.1") == nil || b.dial(t, "127.0.0.4") != nil {
		t.Error("a closed connection does not make room for exactly one")
	}
	if err := first.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Error(err)
	}
	MarkAuthenticated(&net.TCPConn{}) // without a Limiter
}

// Silent connections of a few addresses fill the listener; a caller that comes next is
// accepted and served.
func TestSilentConnectionsAreClosed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	const most = 40
	limiter := NewLimiter(most, most/2, nil)
	serveOn(t, limiter.LimitCallers(l), http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { MarkRequestAuthenticated(r.Context()) }))
	call := func(from string) error {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := dialer.Dial("tcp", l.Addr().String())
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = c.Close() })
		if from != "127.0.0.9" {
			return nil // it stays silent
		}
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			return err
		}
		_, err = http.ReadResponse(bufio.NewReader(c), nil)
		return err
	}
	for i := range 2 * most {
		if err := call(fmt.Sprintf("127.0.2.%d", 1+i%4)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 2 * most { // these stay open until the limit is reached
		// security: N38
		if err := call("127.0.0.9"); (err == nil) != (i < most) {
			t.Fatalf("caller %d: %v", i+1, err)
		}
	}
	if open, _ := limiter.Open(); open != most {
		t.Errorf("%d are open, want %d", open, most)
	}
}

// A connection that has proven nothing is answered at a rate; one that has is not delayed.
func TestAnonymousRequestsArePaced(t *testing.T) {
	const more = 10
	send := func(address string) time.Duration {
		c := dial(t, address, strings.Repeat("GET / HTTP/1.1\r\nHost: x\r\n\r\n", AnonymousBurst+more))
		in, begun := bufio.NewReader(c), time.Now()
		for range AnonymousBurst + more {
			answer, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			_ = answer.Body.Close() // it has none
		}
		return time.Since(begun)
	}
	anonymous, _ := serveTimed(t, WriteTime, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		PaceAnonymous(r.Context())
	}))
	// security: N42
	if took := send(anonymous); took < (more-1)*time.Second/AnonymousRate {
		t.Errorf("%d requests over the burst are answered within %v", more, took)
	}
	known, _ := serveTimed(t, WriteTime, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		MarkRequestAuthenticated(r.Context())
		PaceAnonymous(r.Context())
	}))
	if took := send(known); took >= (more-1)*time.Second/AnonymousRate {
		t.Errorf("a client with a token is delayed: %v", took)
	}
}
