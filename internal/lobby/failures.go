package lobby

import (
	"context"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of failed attempts to prove who one is, per address. An IPv6 host
// counts with its /64.
const (
	FailureBurst    = 20               // failed attempts at once, answered as ever
	FailureEvery    = 10 * time.Second // after which one more is
	FailureDelay    = 2 * time.Second  // before the answer to any other
	MaxDelayed      = 256              // answers that wait, of all addresses
	MaxDelayedOf    = 4                // of one; others are refused at once
	maxFailureHosts = 20_000           // addresses remembered
)

// Failures slows down who tries credentials at a listener. It is asked only
// once an attempt has failed, so whoever has valid ones never notices it,
// whatever his neighbours behind the same address do. What it does depends on
// the number of failures alone, not on what was presented. A nil *Failures
// slows nobody down. It is safe for concurrent use.
type Failures struct {
	trusted []netip.Prefix

	mu      sync.Mutex
	hosts   map[netip.Addr]*attempts
	delayed int

	// Answered counts failures within the burst, Delayed those that were
	// answered late, Refused those for which too many waited already.
	Answered, Delayed, Refused atomic.Uint64
}

// attempts of one address: spent are those of the burst that did not grow back.
type attempts struct {
	spent   float64
	at      time.Time
	delayed int
}

// NewFailures returns Failures. Addresses in trusted are proxies: of them is
// not known who tried.
func NewFailures(trusted []netip.Prefix) *Failures {
	return &Failures{trusted: trusted, hosts: map[netip.Addr]*attempts{}}
}

// Failed notes a failed attempt. Within the burst of its address it returns
// false at once; else true, after FailureDelay if there is room to wait: the
// attempt is then to be refused as one too many.
func (f *Failures) Failed(ctx context.Context, addr netip.Addr) (tooMany bool) {
	if f == nil || within(addr, f.trusted) {
		return false
	}
	return f.failed(ctx, addr)
}

func (f *Failures) failed(ctx context.Context, addr netip.Addr) (tooMany bool) {
	if !addr.IsValid() {
		return false
	}
	host := HostOf(addr)
	switch f.spend(host, time.Now()) {
	case spentNothing:
		f.Answered.Add(1)
		return false
	case spentRefused:
		f.Refused.Add(1)
		return true
	}
	f.Delayed.Add(1)
	defer f.release(host)
	timer := time.NewTimer(FailureDelay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return true
}

// FailedRequest is Failed for the client of an HTTP request. A client that a
// trusted proxy names counts, whatever its address: it is no proxy.
func (f *Failures) FailedRequest(r *http.Request) (tooMany bool) {
	if f == nil {
		return false
	}
	addr := ClientAddress(r, f.trusted)
	if peer, err := netip.ParseAddrPort(r.RemoteAddr); err == nil && peer.Addr().Unmap() == addr {
		return f.Failed(r.Context(), addr)
	}
	return f.failed(r.Context(), addr)
}

// What becomes of a failure.
const (
	spentNothing = iota // it is within the burst
	spentDelayed        // a place to wait was taken
	spentRefused
)

func (f *Failures) spend(host netip.Addr, now time.Time) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	a := f.hosts[host]
	if a == nil {
		if len(f.hosts) >= maxFailureHosts {
			f.evictLocked(now)
		}
		a = &attempts{at: now}
		f.hosts[host] = a
	}
	a.spent = max(0, a.spent-float64(now.Sub(a.at))/float64(FailureEvery))
	a.at = now
	switch {
	case a.spent+1 <= FailureBurst:
		a.spent++
		return spentNothing
	case a.delayed >= MaxDelayedOf || f.delayed >= MaxDelayed:
		return spentRefused
	}
	a.delayed++
	f.delayed++
	return spentDelayed
}

func (f *Failures) release(host netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.delayed--
	if a := f.hosts[host]; a != nil && a.delayed > 0 {
		a.delayed--
	}
}

// evictLocked makes room, a good part of the table at once since it looks at
// all of it: those whose burst has grown back go, then anybody who does not
// wait. Many addresses then cost memory once, and little time each.
func (f *Failures) evictLocked(now time.Time) {
	for host, a := range f.hosts {
		if a.delayed == 0 && a.spent <= float64(now.Sub(a.at))/float64(FailureEvery) {
			delete(f.hosts, host)
		}
	}
	for host, a := range f.hosts {
		if len(f.hosts) <= maxFailureHosts*7/8 {
			return
		}
		if a.delayed == 0 {
			delete(f.hosts, host)
		}
	}
}

func within(addr netip.Addr, networks []netip.Prefix) bool {
	addr = addr.Unmap()
	for _, network := range networks {
		if network.Contains(addr) {
			return true
		}
	}
	return false
}

// From is where a request comes from, for the record: the peer with its port,
// or the address that a trusted proxy names behind it. A nil f trusts none.
func (f *Failures) From(r *http.Request) string {
	if f == nil || len(f.trusted) == 0 {
		return r.RemoteAddr
	}
	addr := ClientAddress(r, f.trusted)
	if peer, err := netip.ParseAddrPort(r.RemoteAddr); err == nil && peer.Addr().Unmap() == addr {
		return r.RemoteAddr
	}
	return addr.String()
}

// Bearer is the token of a request (RFC 6750),
// which is empty if it has none or several.
func Bearer(h http.Header) string {
	const scheme = "Bearer "
	values := h["Authorization"]
	if len(values) != 1 || len(values[0]) <= len(scheme) || !strings.EqualFold(values[0][:len(scheme)], scheme) {
		return ""
	}
	return values[0][len(scheme):]
}

// ClientAddress is the peer's address, or the one a trusted proxy names behind
// it; the zero Addr if the peer has none.
func ClientAddress(r *http.Request, trusted []netip.Prefix) netip.Addr {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	addr := peer.Addr().Unmap()
	if !within(addr, trusted) {
		return addr
	}
	// A proxy may add a field of its own behind the one that the client sent, which then says nothing.
	list := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	if behind, err := netip.ParseAddr(strings.TrimSpace(list[len(list)-1])); err == nil {
		return behind.Unmap()
	}
	return addr
}
