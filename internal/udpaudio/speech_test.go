package udpaudio

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

func TestPlausible(t *testing.T) {
	for _, k := range []struct {
		ms       time.Duration
		channels int
		p        []byte
		want     bool
	}{
		{60, 1, []byte{11 << 3}, true},
		{60, 1, []byte{11<<3 | 4}, false},
		{60, 2, []byte{11<<3 | 4}, true},
		{60, 0, []byte{11<<3 | 4}, true},
		{60, 1, []byte{0xf8, 0xff, 0xfe}, false}, // 20 ms
		{20, 1, []byte{0xf8, 0xff, 0xfe}, true},
		{0, 1, []byte{0xf8, 0xff, 0xfe}, true},
		{60, 1, []byte{9<<3 | 3, 3, 1, 2, 3}, true},
		{60, 1, []byte{9<<3 | 3, 3, 1, 2}, false},
		{0, 0, nil, false},
	} {
		s := newPacketModel(k.ms*time.Millisecond, k.channels)
		if got := s.plausible(k.p); got != k.want {
			t.Errorf("%d ms, %d channels, %x: %v", k.ms, k.channels, k.p, got)
		}
	}
}

// TestChance measures how often random bytes are plausible, which the evidence in bits must
// not overstate.
func TestChance(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, k := range []struct {
		ms       time.Duration
		channels int
		most     float64
	}{{60, 1, 0.013}, {20, 1, 0.12}, {0, 1, 0.45}, {0, 2, 0.9}} {
		s := newPacketModel(k.ms*time.Millisecond, k.channels)
		const tries = 200_000
		// The likelihood ratio of a random packet after another must be 1 on average, or less.
		passed, ratio, toc := 0, 0.0, byte(11<<3)
		for range tries {
			p := make([]byte, 89+rng.IntN(2))
			for i := range min(8, len(p)) {
				p[i] = byte(rng.Uint32())
			}
			if !s.plausible(p) {
				continue
			}
			passed++
			proof := proof{packets: 1, toc: toc}
			proof.add(p[0], &s)
			ratio += math.Exp2(proof.bits)
		}
		if got := float64(passed) / tries; got > k.most {
			t.Errorf("%v ms, %d channels: %.4f of random packets pass, want at most %.4f", k.ms, k.channels, got, k.most)
		}
		if got := ratio / tries; got > 1.25 {
			t.Errorf("%v ms, %d channels: mean likelihood ratio is %.2f", k.ms, k.channels, got)
		}
	}
}
