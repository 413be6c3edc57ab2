package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/bench/load"
)

// node is a server that greets with its name, after the head of a request.
func node(t *testing.T, name string) (address string, end func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns []net.Conn
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns = append(conns, c)
			if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				_, _ = io.WriteString(c, name+"\n") // the test reads it, or fails
			}
		}
	}()
	return l.Addr().String(), func() {
		_ = l.Close()
		<-ended
		for _, c := range conns {
			_ = c.Close()
		}
	}
}

// greeted sends the request of a device over a new connection and returns the name of the node that it reached.
func greeted(t *testing.T, dial func() (net.Conn, error), device string) (net.Conn, string) {
	t.Helper()
	c, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	// In two pieces, as TCP may deliver it.
	for _, piece := range []string{"GET /xiaozhi/v1/ HTTP/1.1\r\nHost: x\r\nDevice-Id: ", device + "\r\n\r\n"} {
		if _, err := io.WriteString(c, piece); err != nil {
			t.Fatal(err)
		}
	}
	name, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return c, strings.TrimSpace(name)
}

// Devices go to nodes in turn; those of a node that dies lose their connections, are reported when they return, once, and
// reach another.
func TestBalancer(t *testing.T) {
	one, endOne := node(t, "one")
	two, endTwo := node(t, "two")
	defer endTwo()
	b, err := newBalancer(one, two)
	if err != nil {
		t.Fatal(err)
	}
	defer b.close()
	overTCP := func() (net.Conn, error) { return net.Dial("tcp", b.address()) }
	inPieces := func() (net.Conn, error) { // a read from a pipe returns one write
		near, far := net.Pipe()
		b.live.Go(func() { b.carry(far, time.Now()) })
		return near, nil
	}
	first, name := greeted(t, inPieces, "02:00:00:00:00:0A")
	if name != "one" {
		t.Errorf("the first device is on node %s", name)
	}
	if _, name := greeted(t, inPieces, "02:00:00:00:00:0b"); name != "two" {
		t.Errorf("the second device is on node %s", name)
	}
	if held := b.steady(0); len(held) != 2 || held["02:00:00:00:00:0a"].node != 0 || held["02:00:00:00:00:0b"].node != 1 {
		t.Errorf("held: %v", held)
	}
	if held := b.steady(time.Hour); len(held) != 0 {
		t.Errorf("held for an hour: %v", held)
	}
	returns := make(chan string, 9)
	if lost := b.lose(0, func(device string, p *pair) { returns <- fmt.Sprint(device, " ", p.node) }); !slices.Equal(lost, []string{"02:00:00:00:00:0a"}) {
		t.Errorf("lost: %q", lost)
	}
	endOne()
	if _, err := first.Read(make([]byte, 1)); err == nil {
		t.Error("a device of the dead node is still connected")
	}
	for range 2 {
		if _, name := greeted(t, inPieces, "02:00:00:00:00:0a"); name != "two" {
			t.Errorf("back on node %s", name)
		}
	}
	greeted(t, overTCP, "02:00:00:00:00:0c")
	if got := <-returns; got != "02:00:00:00:00:0a 1" || len(returns) != 0 {
		t.Errorf("returned: %q and %d more", got, len(returns))
	}
}

func TestWebSocketOf(t *testing.T) {
	for _, tc := range []struct{ request, want string }{
		{"GET /xiaozhi/v1/ HTTP/1.1\r\nHost: x\r\nDevice-Id: 02:00:00:00:00:FF\r\nA: b\r\n\r\n", "02:00:00:00:00:ff"},
		{"GET /xiaozhi/v1/ HTTP/1.1\r\nHost: x\r\n\r\n", ""},
		{"POST /xiaozhi/ota/ws/ HTTP/1.1\r\nHost: x\r\nDevice-Id: 02:00:00:00:00:ff\r\n\r\n", ""},
	} {
		if got := webSocketOf([]byte(tc.request)); got != tc.want {
			t.Errorf("%q: %q", tc.request, got)
		}
	}
}

// A device that returned is called through the node that neither holds it nor is dead, again until it answers.
func TestProber(t *testing.T) {
	var calls atomic.Int64
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasPrefix(r.URL.Path, "/v1/devices/never/"):
			w.WriteHeader(http.StatusServiceUnavailable)
		case calls.Add(1) < 3:
			w.WriteHeader(http.StatusConflict)
		default:
			_, _ = io.WriteString(w, `{"isError":false}`) // the prober reads it, or the test fails
		}
	}))
	defer api.Close()
	alive := (&daemon{api: api.URL}).target()
	p := newProber([]load.Target{alive, {}, {Address: "127.0.0.1:1", Before: alive.Before, After: alive.After}}, 2)
	p.returned("soon", &pair{node: 2, since: time.Now()})
	p.begin(t.Context())
	p.await(t.Context(), 1)
	p.returned("never", &pair{node: 2, since: time.Now()})
	ctx, cancel := context.WithTimeout(t.Context(), 5*probePause)
	defer cancel()
	p.await(ctx, 2)
	results := p.end()
	if len(results) != 2 {
		t.Fatalf("%d results", len(results))
	}
	if x := results[0]; !x.ok || x.via != 0 || x.attempts != 3 || x.took < 2*probePause || x.took > load.ExchangeLimit {
		t.Errorf("%+v", *x)
	}
	if x := results[1]; x.ok || x.attempts < 2 || x.took < 4*probePause {
		t.Errorf("%+v", *x)
	}
}

// What a node does not list as online counts only if the device is connected, and was before the node was asked.
func TestMissing(t *testing.T) {
	var b *balancer
	old := time.Now().Add(-time.Minute)
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("cursor") == "" {
			_, _ = io.WriteString(w, `{"items":[{"id":"a"}],"next_cursor":"&more"}`)
			return
		}
		b.held["returned"] = &pair{since: old} // meanwhile
		delete(b.held, "gone")
		_, _ = io.WriteString(w, `{"items":[{"id":"b"}],"next_cursor":""}`)
	}))
	defer api.Close()
	b = &balancer{held: map[string]*pair{"a": {since: old}, "b": {since: old}, "gone": {since: old}, "new": {since: time.Now()}, "returned": {since: old}, "lost": {since: old}}}
	missing := map[string]bool{}
	if err := b.missing(t.Context(), &daemon{api: api.URL}, missing); err != nil || len(missing) != 1 || !missing["lost"] {
		t.Errorf("%v, %v", missing, err)
	}
}
