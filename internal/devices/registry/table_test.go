package registry

import (
	"math/rand/v2"
	"runtime"
	"testing"
)

// A table behaves like a map for any sequence of insertions and removals, also if hashes
// collide.
func TestTable(t *testing.T) {
	r, rounds := rand.New(rand.NewPCG(3, 4)), 200_000
	if testing.Short() {
		rounds = 20_000
	}
	for _, crowd := range []uint64{1 << 63, 1 << 58, 40} {
		var got table
		want := map[uint64]record{}
		for range rounds {
			h := r.Uint64N(crowd) % 3_000 * (crowd/3_000 + 1)
			rec := record{client: r.Uint64(), flags: uint8(r.IntN(8))}
			i, found := got.find(h)
			if _, has := want[h]; found != has {
				t.Fatalf("%d is found %v", h, found)
			}
			switch {
			case found && r.IntN(2) == 0:
				got.remove(i)
				delete(want, h)
				continue
			case found:
				got.set(i, rec)
			default:
				got.insert(h, rec)
			}
			want[h] = rec
		}
		if got.n != len(want) {
			t.Errorf("%d records, want %d", got.n, len(want))
		}
		for h, rec := range want {
			if i, found := got.find(h); !found || got.at(i) != rec {
				t.Errorf("%d: %v", h, found)
			}
		}
	}
}

// A member costs at most 26 bytes.
func TestRosterAllocates(t *testing.T) {
	for _, n := range []int{100_000, 1_000_000} {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		all := newRoster(sipKey{1, 2})
		h := rand.New(rand.NewPCG(1, 2))
		for range n {
			all.updateHash(h.Uint64(), func(record, bool) (record, bool) { return record{client: 5}, true })
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		if each := float64(after.HeapAlloc-before.HeapAlloc) / float64(n); each > 26 {
			t.Errorf("%d members take %.1f bytes each", n, each)
		}
		runtime.KeepAlive(all)
	}
}
