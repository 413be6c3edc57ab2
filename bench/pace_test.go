package main

import (
	"bufio"
	"crypto/tls"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/bench/load"
)

// Calls come at their rate, and the time of one that finds nobody free runs from when it was due.
func TestPaced(t *testing.T) {
	var calls atomic.Int64
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1) == 1 {
			time.Sleep(400 * time.Millisecond) // the slow call; a caller reads with the times of a real connection
		}
		_, _ = io.WriteString(w, `{"isError":false}`) // the caller reads it, or the test fails
	}))
	defer api.Close()
	b := &bench{opt: options{callers: 1, duration: 600 * time.Millisecond}}
	begun := time.Now()
	l, err := b.paced(t.Context(), (&daemon{api: api.URL}).target(), 3, 50)
	if err != nil || len(l.due) != 30 || calls.Load() != 30 || time.Since(begun) < 580*time.Millisecond {
		t.Errorf("%d calls in %v, %d noted, %v", calls.Load(), time.Since(begun), len(l.due), err)
	}
	slow := func(all []time.Duration) (n int) {
		for _, d := range all {
			if d > 100*time.Millisecond {
				n++
			}
		}
		return n
	}
	// Fifteen were due more than 100 ms before the first was over; a busy machine may be slow with a few others.
	if !slices.IsSorted(l.due) || slow(l.due) < 15 || slow(l.sent) < 1 || slow(l.sent) > slow(l.due)-5 {
		t.Errorf("since due %v, since sent %v", l.due, l.sent)
	}
	b.opt.callers = 4
	refusing := httptest.NewServer(http.NotFoundHandler())
	defer refusing.Close()
	if _, err := b.paced(t.Context(), (&daemon{api: refusing.URL}).target(), 3, 100); err == nil || !strings.Contains(err.Error(), "status 404") {
		t.Errorf("refused calls: %v", err)
	}
}

// Devices speak TLS with a server that has the certificate made for it.
func TestSelfSigned(t *testing.T) {
	certificate, key, err := selfSigned(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "hello")
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	server.StartTLS()
	defer server.Close()
	f := &fleet{secure: anyServer}
	c, err := f.dial(t.Context(), server.Listener.Addr().String(), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if status, body, err := load.ReadResponse(bufio.NewReader(c)); err != nil || status != 200 || string(body) != "hello" {
		t.Errorf("%d %q, %v", status, body, err)
	}
}

// Figures of a run go to the side they are of.
func TestMerge(t *testing.T) {
	fleetd, baseline := samples{}, samples{}
	for i := range 2 {
		fleetd.merge(baseline, samples{"x": {float64(i)}, baselineMark + "x": {float64(10 + i)}})
	}
	if !slices.Equal(fleetd["x"], []float64{0, 1}) || !slices.Equal(baseline["x"], []float64{10, 11}) || len(fleetd) != 1 {
		t.Errorf("%v, %v", fleetd, baseline)
	}
}
