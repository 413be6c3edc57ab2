package connlimit

import (
	"context"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
)

// Limits of failed logins per address. All addresses of an IPv6 /64 network count as
// one.
const (
	FailureBurst         = 20               // failures that are answered at once
	FailureEvery         = 10 * time.Second // after which one more is answered at once
	FailureDelay         = 2 * time.Second  // before the answer to any other failure
	MaxDelayed           = 256              // answers that are delayed at a time, for all addresses
	MaxDelayedPerAddress = 4                // for one address; more are refused at once
)

// Failures slows down clients that try credentials at a listener. It is called only
// after a failed attempt, so it never delays a client with valid credentials, even
// if other clients at the same address fail. The delay depends on the number of
// failures alone, not on the credentials presented. A nil *Failures delays nothing.
// It is safe for concurrent use.
type Failures struct {
	trusted []netip.Prefix
	rates   Rates
	waiting *Shares[netip.Addr] // for the answer
	places  chan struct{}       // of all that wait

	// Answered counts failures within the burst, Delayed those that were answered
	// late, Refused those that were refused because too many were being delayed.
	Answered, Delayed, Refused atomic.Uint64
}

// NewFailures returns Failures. Addresses in trusted are proxies: their failures are
// not counted, since the client is unknown.
func NewFailures(trusted []netip.Prefix) *Failures {
	return &Failures{trusted: trusted, waiting: NewShares[netip.Addr](MaxDelayedPerAddress), places: make(chan struct{}, MaxDelayed)}
}

// Failed counts a failed attempt. Within the burst of the address it returns false at
// once. Otherwise it returns true, after FailureDelay unless too many answers are
// delayed already; the caller must then answer that there are too many attempts.
func (f *Failures) Failed(ctx context.Context, addr netip.Addr) (tooMany bool) {
	if f == nil || InNetworks(addr, f.trusted) {
		return false
	}
	return f.failed(ctx, addr)
}

func (f *Failures) failed(ctx context.Context, addr netip.Addr) (tooMany bool) {
	if !addr.IsValid() {
		return false
	}
	host := AddressKey(addr)
	if f.rates.Allow(host, int(time.Minute/FailureEvery), FailureBurst) {
		f.Answered.Add(1)
		return false
	}
	if !f.waiting.Acquire(host) {
		f.Refused.Add(1)
		return true
	}
	defer f.waiting.Release(host)
	select {
	case f.places <- struct{}{}:
		defer func() { <-f.places }()
	default:
		f.Refused.Add(1)
		return true
	}
	f.Delayed.Add(1)
	clock.Sleep(ctx, FailureDelay)
	return true
}

// FailedRequest is Failed for the client of an HTTP request. A client that a trusted
// proxy names is counted even if its address is in a trusted network.
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

// InNetworks reports whether an address is in one of the networks.
func InNetworks(addr netip.Addr, networks []netip.Prefix) bool {
	addr = addr.Unmap()
	for _, network := range networks {
		if network.Contains(addr) {
			return true
		}
	}
	return false
}

// Client returns the client of a request for logs and the audit log: the peer with its
// port, or the address that a trusted proxy names. A nil f trusts no proxy.
func (f *Failures) Client(r *http.Request) string {
	if f == nil || len(f.trusted) == 0 {
		return r.RemoteAddr
	}
	addr := ClientAddress(r, f.trusted)
	if peer, err := netip.ParseAddrPort(r.RemoteAddr); err == nil && peer.Addr().Unmap() == addr {
		return r.RemoteAddr
	}
	return addr.String()
}

// BearerToken returns the token of a request (RFC 6750), or "" if the request has none
// or several.
func BearerToken(h http.Header) string {
	const scheme = "Bearer "
	values := h["Authorization"]
	if len(values) != 1 || len(values[0]) <= len(scheme) || !strings.EqualFold(values[0][:len(scheme)], scheme) {
		return ""
	}
	return values[0][len(scheme):]
}

// ClientAddress returns the address of the peer, or the one that a trusted proxy
// names. It returns the zero Addr if the peer has no IP address.
func ClientAddress(r *http.Request, trusted []netip.Prefix) netip.Addr {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	addr := peer.Addr().Unmap()
	if !InNetworks(addr, trusted) {
		return addr
	}
	// A proxy may append a field of its own to those that the client sent, so only the last address counts.
	list := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	if forwarded, err := netip.ParseAddr(strings.TrimSpace(list[len(list)-1])); err == nil {
		return forwarded.Unmap()
	}
	return addr
}
