package udpaudio

import (
	"math"
	"time"

	"fleetd/internal/opus"
)

// speech is what a device announced it would say.
type speech struct {
	duration time.Duration // of one packet; 0 for any
	mono     bool
	// What a plausible packet says for its sender, in bits: how much likelier
	// it is from the device than from random bytes. A device repeats mode,
	// bandwidth and channels in steady of its packets; first is for a packet
	// with none before it, again for one like the one before, fresh for the
	// others. As these are likelihood ratios, a run of random packets reaches a
	// sum of n bits with a chance of at most 2^-n.
	first, again, fresh float64
}

const steady = 0.75

func newSpeech(duration time.Duration, channels int) speech {
	s := speech{duration: duration, mono: channels == 1}
	// Of the 256 first bytes, those that random packets can pass with: all,
	// and of one kind. Code 3 needs more luck, which the halves stand for.
	pass, like := 0.5, 0.5
	for kind := range 64 {
		n := 0.0
		for code := range 3 {
			toc := byte(kind<<2 | code)
			if s.fits(time.Duration(min(code, 1)+1)*opus.FrameDuration(toc), toc&4 != 0) {
				n++
			}
		}
		pass += n
		like = max(like, n+0.5)
	}
	s.first = math.Log2(256 / pass)
	s.again = math.Log2(256 * steady / like)
	s.fresh = math.Log2(256 * (1 - steady) / pass)
	return s
}

func (s *speech) fits(duration time.Duration, stereo bool) bool {
	return (s.duration == 0 || s.duration == duration) && !(s.mono && stereo)
}

// plausible reports whether p may be what the device says.
func (s *speech) plausible(p []byte) bool {
	duration, stereo, ok := opus.Inspect(p)
	return ok && s.fits(duration, stereo)
}
