package udpaudio

import (
	"math"
	"time"

	"fleetd/internal/opus"
)

// speech describes the packets that a device announced.
type packetModel struct {
	duration time.Duration // of one packet; 0 for any
	mono     bool
	// The evidence of a plausible packet for its sender, in bits: how much likelier it is
	// from the device than from random bytes. A device repeats mode, bandwidth and
	// channels in the fraction steady of its packets. first is for a packet without a
	// predecessor, again for one like its predecessor, fresh for others. These are
	// likelihood ratios, so random packets reach a sum of n bits with a probability of at
	// most 2^-n.
	first, again, fresh float64
}

const steady = 0.75

func newPacketModel(duration time.Duration, channels int) packetModel {
	s := packetModel{duration: duration, mono: channels == 1}
	// Of the 256 first bytes, the number with which random packets can pass: of all kinds,
	// and of one kind. Code 3 passes less often; the halves account for it.
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

func (s *packetModel) fits(duration time.Duration, stereo bool) bool {
	return (s.duration == 0 || s.duration == duration) && !(s.mono && stereo)
}

// plausible reports whether the device may have sent p.
func (s *packetModel) plausible(p []byte) bool {
	duration, stereo, ok := opus.Inspect(p)
	return ok && s.fits(duration, stereo)
}
