package connlimit

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Failures within the burst are answered at once, others are delayed. The burst is
// restored over time.
func TestFailuresAreDelayed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFailures(nil)
		addr := netip.MustParseAddr("192.0.2.1")
		fail := func(want bool, wait time.Duration) {
			t.Helper()
			begun := time.Now()
			if got := f.Failed(t.Context(), addr); got != want || time.Since(begun) != wait {
				t.Errorf("%v after %v, want %v after %v", got, time.Since(begun), want, wait)
			}
		}
		for range FailureBurst {
			fail(false, 0)
		}
		// security: D7
		fail(true, FailureDelay)
		// security: D7
		if f.Failed(t.Context(), netip.MustParseAddr("192.0.2.2")) {
			t.Error("another address is slowed down")
		}
		time.Sleep(FailureEvery)
		fail(false, 0)
		// security: D7
		fail(true, FailureDelay)
		time.Sleep(FailureBurst * FailureEvery)
		for range FailureBurst {
			fail(false, 0)
		}
		if f.Delayed.Load() != 2 || f.Refused.Load() != 0 {
			t.Errorf("%d delayed, %d refused", f.Delayed.Load(), f.Refused.Load())
		}
	})
}

// All addresses of a /64 network count as one host, and no others.
func TestFailuresOfIPv6(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFailures(nil)
		for i := range FailureBurst {
			f.Failed(t.Context(), netip.MustParseAddr(fmt.Sprintf("2001:db8:0:1::%x", i)))
		}
		// security: D7
		if !f.Failed(t.Context(), netip.MustParseAddr("2001:db8:0:1:ffff::1")) {
			t.Error("another address of the /64 counts as another host")
		}
		// security: D7
		if f.Failed(t.Context(), netip.MustParseAddr("2001:db8:0:2::1")) {
			t.Error("the next /64 counts as the same host")
		}
	})
}

// The number of delayed answers is limited, per address and in all; further attempts
// are refused at once. A client that disconnects makes room.
func TestFailuresWaitBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFailures(nil)
		spend := func(addr netip.Addr) {
			for range FailureBurst {
				f.Failed(t.Context(), addr)
			}
		}
		one := netip.MustParseAddr("192.0.2.1")
		spend(one)
		ctx, leave := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range MaxDelayedPerAddress {
			wg.Go(func() { f.Failed(ctx, one) })
		}
		synctest.Wait()
		begun := time.Now()
		if !f.Failed(t.Context(), one) || time.Since(begun) != 0 || f.Refused.Load() != 1 {
			t.Error("an attempt above the limit of an address is delayed")
		}
		leave()
		wg.Wait()
		if len(f.places) != 0 || len(f.waiting.held) != 0 || time.Since(begun) != 0 {
			t.Errorf("%d still wait", len(f.places))
		}
		for i := range MaxDelayed {
			addr := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
			spend(addr)
			wg.Go(func() { f.Failed(t.Context(), addr) })
		}
		synctest.Wait()
		if !f.Failed(t.Context(), one) || f.Refused.Load() != 2 {
			t.Error("an attempt above the limit of all is delayed")
		}
		wg.Wait()
	})
}

// For a trusted proxy the address that it names is counted, and its own never is;
// other peers cannot name an address.
func TestFailuresBehindProxies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		proxies := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
		f := NewFailures(proxies)
		ask := func(peer, forwarded string) bool {
			r := httptest.NewRequest(http.MethodGet, "/", nil).WithContext(t.Context())
			r.RemoteAddr = peer
			if forwarded != "" {
				r.Header.Set("X-Forwarded-For", forwarded)
			}
			return f.FailedRequest(r)
		}
		for i := range FailureBurst {
			if ask("10.0.0.1:1", "203.0.113.1") || ask("10.0.0.1:1", "") || ask("198.51.100.1:1", fmt.Sprintf("203.0.113.%d", i)) {
				t.Fatal("slowed down too early")
			}
		}
		if !ask("10.0.0.2:1", "192.0.2.7, 203.0.113.1") {
			t.Error("the named address is not slowed down")
		}
		if !ask("198.51.100.1:1", "203.0.113.200") {
			t.Error("a peer that is not a trusted proxy chooses its address")
		}
		if ask("10.0.0.1:1", "") || ask("nonsense", "") {
			t.Error("the proxy, or a request without an address, is slowed down")
		}
	})
}

func TestNilFailures(t *testing.T) {
	var f *Failures
	if f.Failed(t.Context(), netip.MustParseAddr("192.0.2.1")) || f.FailedRequest(nil) {
		t.Error("nil slows down")
	}
}

// A client that a trusted proxy names is slowed down, also if its address is in a
// trusted network; the proxy itself is not.
func TestNamedClientsAreSlowedDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFailures([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")})
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr = "10.0.0.5:1234"
		for range 2 * FailureBurst {
			if f.FailedRequest(r) {
				t.Fatal("the proxy is slowed down for a request without a named client")
			}
		}
		r.Header.Set("X-Forwarded-For", "10.1.2.3")
		for range FailureBurst {
			f.FailedRequest(r)
		}
		// security: N34
		if !f.FailedRequest(r) {
			t.Error("a client inside the trusted networks is never slowed down")
		}
	})
}
