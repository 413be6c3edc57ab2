package connlimit

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// maxRates is the number of limiters kept. Above it, an eighth of them is removed, those
// with the least use first.
const maxRates = 20_000

// Rates limits how often each address does something. The zero value is ready to use; it is safe for concurrent use.
type Rates struct {
	mu        sync.Mutex
	byAddress map[netip.Addr]*rate.Limiter
}

// Allow counts one more of an AddressKey, and reports false if that is too many: nothing is counted then. perMinute is 0 without a
// limit; all calls have the same.
func (r *Rates) Allow(address netip.Addr, perMinute, burst int) bool {
	if perMinute == 0 {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	limiter := r.byAddress[address]
	if limiter == nil {
		if len(r.byAddress) >= maxRates {
			r.evictLocked(time.Now())
		}
		limiter = rate.NewLimiter(rate.Limit(float64(perMinute)/60), max(burst, 1))
		if r.byAddress == nil {
			r.byAddress = map[netip.Addr]*rate.Limiter{}
		}
		r.byAddress[address] = limiter
	}
	return limiter.Allow()
}

// evictLocked removes limiters. An address with a complete burst is equal to an unknown one.
// Of the others, those with the most of their burst left are removed, so that many addresses
// with one use each do not reset the limiter of an address with too many.
func (r *Rates) evictLocked(now time.Time) {
	maps.DeleteFunc(r.byAddress, func(_ netip.Addr, limiter *rate.Limiter) bool {
		return limiter.TokensAt(now) >= float64(limiter.Burst())
	})
	most := maxRates * 7 / 8
	if len(r.byAddress) <= most {
		return
	}
	addresses := slices.SortedFunc(maps.Keys(r.byAddress), func(a, b netip.Addr) int {
		return cmp.Compare(r.byAddress[b].TokensAt(now), r.byAddress[a].TokensAt(now))
	})
	for _, address := range addresses[:len(addresses)-most] {
		delete(r.byAddress, address)
	}
}
