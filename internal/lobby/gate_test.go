package lobby

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"
)

func TestShares(t *testing.T) {
	s := NewShares(2)
	addr := netip.MustParseAddr
	for _, step := range []struct {
		addr string
		want bool
	}{
		{"192.0.2.1", true}, {"::ffff:192.0.2.1", true}, {"192.0.2.1", false}, {"192.0.2.2", true},
		{"2001:db8::1", true}, {"2001:db8::2:3:4:5", true}, {"2001:db8::9", false}, {"2001:db8:0:1::1", true}, {"fe80::1%eth0", true},
	} {
		if got := s.Enter(addr(step.addr)); got != step.want {
			t.Errorf("%s: %v", step.addr, got)
		}
	}
	s.Leave(addr("2001:db8::2"))
	if !s.Enter(addr("2001:db8::9")) {
		t.Error("no room after one left")
	}
	for _, a := range []string{"192.0.2.1", "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::1", "2001:db8:0:1::1", "fe80::1"} {
		s.Leave(addr(a))
	}
	if len(s.held) != 0 {
		t.Errorf("kept for nothing: %v", s.held)
	}
	if free := NewShares(0); !free.Enter(addr("192.0.2.1")) || len(free.held) != 0 {
		t.Error("0 is a limit")
	}
}

// door is a guarded listener whose guests are kept.
type door struct {
	*Guarded
	guests chan net.Conn
}

func openDoor(t *testing.T, g *Gate) door {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := door{g.Guard(l), make(chan net.Conn, 100)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := d.Accept()
			if err != nil {
				return
			}
			d.guests <- c
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return d
}

// knock connects from an address of this machine; nil if it was sent away.
func (d door) knock(t *testing.T, from string) (guest net.Conn) {
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
	case guest = <-d.guests:
		t.Cleanup(func() { _ = guest.Close() })
		return guest
	case <-gone:
		return nil
	}
}

func TestGate(t *testing.T) {
	g := NewGate(5, 2, []netip.Prefix{netip.MustParsePrefix("127.0.0.9/32")})
	a, b := openDoor(t, g), openDoor(t, g)
	first, second := a.knock(t, "127.0.0.1"), b.knock(t, "127.0.0.1") // one share for all listeners
	if first == nil || second == nil || a.knock(t, "127.0.0.1") != nil || a.Crowded.Load() != 1 {
		t.Fatal("the share of one address is not 2")
	}
	if a.knock(t, "127.0.0.2") == nil {
		t.Error("another address is kept out")
	}
	Vouch(first)
	Vouch(first)
	if third := a.knock(t, "127.0.0.1"); third == nil || a.knock(t, "127.0.0.1") != nil {
		t.Error("who is proven takes a part of the share still, or two")
	}
	if a.knock(t, "127.0.0.9") == nil { // the fifth
		t.Error("a proxy has a share")
	}
	if a.knock(t, "127.0.0.9") != nil || b.knock(t, "127.0.0.3") != nil || a.Full.Load() != 1 || b.Full.Load() != 1 {
		t.Errorf("more than 5 are in; %d and %d were sent away", a.Full.Load(), b.Full.Load())
	}
	var closing sync.WaitGroup
	for range 4 { // by several, at once
		closing.Go(func() { _ = second.Close(); Vouch(second) })
	}
	closing.Wait()
	if open, most := g.Open(); open != 4 || most != 5 {
		t.Errorf("%d of %d are open", open, most)
	}
	if b.knock(t, "127.0.0.1") == nil || b.knock(t, "127.0.0.4") != nil {
		t.Error("the place of one that ended is not there for exactly one")
	}
	if err := first.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Error(err)
	}
	Vouch(&net.TCPConn{}) // of no gate
}

// Silent connections of a few addresses fill a gate of callers; who comes next is let
// in, and served.
func TestSilentCallersGiveWay(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	const most = 40
	gate := NewGate(most, most/2, nil)
	serveBehind(t, gate.GuardTimed(l), http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { VouchFor(r.Context()) }))
	call := func(from string) error {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := dialer.Dial("tcp", l.Addr().String())
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = c.Close() })
		if from != "127.0.0.9" {
			return nil // it says nothing
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
	for i := range 2 * most { // they stay, so that callers fill it, too
		// security: N38
		if err := call("127.0.0.9"); (err == nil) != (i < most) {
			t.Fatalf("caller %d: %v", i+1, err)
		}
	}
	if open, _ := gate.Open(); open != most {
		t.Errorf("%d are in, want %d", open, most)
	}
}
