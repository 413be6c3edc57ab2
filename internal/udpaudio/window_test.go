package udpaudio

import (
	"math/rand/v2"
	"testing"
)

func TestWindow(t *testing.T) {
	for _, k := range []struct {
		name  string
		took  []uint32
		seq   uint32
		where place
	}{
		{"first", nil, 1, ahead},
		{"duplicate", []uint32{1}, 1, accepted},
		{"64 below", []uint32{65}, 1, inside},
		{"64 below, taken", []uint32{1, 65}, 1, accepted},
		{"65 below", []uint32{66}, 1, below},
		{"hole", []uint32{1, 2, 4}, 3, inside},
		{"filled hole", []uint32{1, 2, 4, 3}, 3, accepted},
		{"all but the edge slid out", []uint32{1, 2, 66}, 2, accepted},
		{"slid out at once", []uint32{5, 1000}, 999, inside},
		{"highest of all", []uint32{1, 1<<32 - 1}, 1<<32 - 1, accepted},
		{"below the highest of all", []uint32{1, 1<<32 - 1}, 1<<32 - 65, inside},
	} {
		var w window
		for _, seq := range k.took {
			w.accept(seq)
		}
		if got, _ := w.place(k.seq); got != k.where {
			t.Errorf("%s: got %d, want %d", k.name, got, k.where)
		}
	}
}

// TestWindowModel compares the window with a set.
func TestWindowModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var w window
		high, set := uint32(0), map[uint32]bool{}
		for range 500 {
			seq := uint32(max(1, int(high)+rng.IntN(150)-110))
			want := ahead
			switch {
			case seq > high:
			case set[seq] && high-seq <= windowSize:
				want = accepted
			case high-seq > windowSize:
				want = below
			default:
				want = inside
			}
			got, step := w.place(seq)
			if got != want || got == ahead && step != seq-high {
				t.Fatalf("%d at %d: got %d, want %d", seq, high, got, want)
			}
			if got == ahead || got == inside {
				w.accept(seq)
				set[seq], high = true, max(high, seq)
			}
		}
	}
}

func TestWindowMerge(t *testing.T) {
	for _, gap := range []uint32{1, 5, 63, 64, 65, 200} {
		var old, next window
		old.accept(98)
		old.accept(100)
		next.accept(100 + gap)
		next.merge(old)
		for _, seq := range []uint32{98, 99, 100} {
			want := inside
			if seq != 99 {
				want = accepted
			}
			if 100+gap-seq > windowSize {
				want = below
			}
			if got, _ := next.place(seq); got != want {
				t.Errorf("gap %d, sequence %d: got %d, want %d", gap, seq, got, want)
			}
		}
	}
}
