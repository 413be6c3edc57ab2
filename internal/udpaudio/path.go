package udpaudio

import (
	"net/netip"
	"time"

	"fleetd/internal/envelope"
)

// proof is what plausible packets in a row say about their sender.
type proof struct {
	packets int
	bits    float64 // see speech
	toc     byte    // of the latest
}

func (p *proof) add(toc byte, s *speech) {
	switch {
	case p.packets == 0:
		p.bits = s.first
	case toc>>2 == p.toc>>2:
		p.bits += s.again
	default:
		p.bits += s.fresh
	}
	p.packets++
	p.toc = toc
}

// path is the address the device is believed to speak from. It is provisional
// at first: heard at once, spoken to only when confirmed.
type path struct {
	addr      netip.AddrPort
	window    window
	proof     proof // until confirmed
	confirmed bool
	heard     time.Time // last accepted packet

	// A path that began with a jump may itself be the forgery. As long as it
	// has not outgrown its window, sequences between floor (the highest of the
	// path before) and the window may found a claim: they were never taken.
	first, floor uint32

	forged   time.Time // last implausible packet from addr: somebody forges the address
	credit   uint32    // steps that the sequence may make while forged
	credited time.Time
}

func (p *path) alive(now time.Time) bool { return now.Sub(p.heard) < aliveFor }

// missed reports whether seq, which is behind the window, may be part of what
// a forged jump left behind.
func (p *path) missed(seq uint32) bool {
	return p.window.high-p.first <= windowSize && seq > p.floor
}

// suspect notes a packet that somebody forged with the path's own address.
func (p *path) suspect(now time.Time) {
	if now.Sub(p.forged) >= contestedFor {
		p.credit, p.credited = maxCredit, now
	}
	p.forged = now
}

// afford reports whether the highest sequence may advance by step. It always
// may, unless somebody forges the path's address: then not faster than the
// device speaks, so that chance hits cannot run away with the window.
func (p *path) afford(step uint32, now time.Time, every time.Duration) bool {
	if now.Sub(p.forged) >= contestedFor {
		return true
	}
	if every <= 0 {
		every = defaultFrame
	}
	refill := max(0, now.Sub(p.credited)/every)
	p.credited = p.credited.Add(refill * every)
	p.credit = uint32(min(maxCredit, time.Duration(p.credit)+refill))
	if step > p.credit {
		return false
	}
	p.credit -= step
	return true
}

// claim is an address, not or not yet the path's, whose packets were plausible
// so far. Also a jump of the path's own address is a claim.
type claim struct {
	addr   netip.AddrPort
	window window
	proof  proof
	first  uint32 // lowest sequence
	heard  time.Time
	frames []heldFrame
	bytes  int
}

// heldFrame is a frame that waits for its sender to be proven.
type heldFrame struct {
	sequence uint32
	frame    envelope.Frame
}

// change tells of a newly proven address.
type change struct {
	from, to  netip.AddrPort
	moved     bool
	released  []heldFrame // to be delivered before the packet at hand
	discarded int
}

// drop forgets a claim and returns how many frames were lost with it.
func (c *Channel) drop(cl *claim) int {
	delete(c.claims, cl.addr)
	c.heldBytes -= cl.bytes
	return len(cl.frames)
}

func (c *Channel) dropClaims() (discarded int) {
	for _, cl := range c.claims {
		discarded += len(cl.frames)
	}
	c.claims, c.heldBytes = nil, 0
	return discarded
}

// strength orders claims for eviction. A flood from many ports founds many
// claims of one packet each; what proved more outlives them, and so does the
// host of the control connection.
func (c *Channel) strength(cl *claim) float64 {
	if cl.addr.Addr() == c.control {
		return cl.proof.bits + c.speech.again
	}
	return cl.proof.bits
}

// weakest is the claim to give up first: the least proven, and of those the
// one that was silent for longest.
func (c *Channel) weakest() *claim {
	var weakest *claim
	least := 0.0
	for _, cl := range c.claims {
		if s := c.strength(cl); weakest == nil || s < least || s == least && cl.heard.Before(weakest.heard) {
			weakest, least = cl, s
		}
	}
	return weakest
}

// hold keeps the packet for its claim, at the cost of weaker claims.
func (c *Channel) hold(cl *claim, p *packet) (discarded int) {
	if len(cl.frames) == maxHeldFrames {
		n := len(cl.frames[0].frame.Opus)
		cl.frames = append(cl.frames[:0], cl.frames[1:]...)
		cl.bytes -= n
		c.heldBytes -= n
		discarded++
	}
	frame := envelope.Frame{Timestamp: p.timestamp, Opus: append([]byte(nil), p.body...)}
	cl.frames = append(cl.frames, heldFrame{p.sequence, frame})
	cl.bytes += len(p.body)
	c.heldBytes += len(p.body)
	for c.heldBytes > maxHeldBytes {
		discarded += c.drop(c.weakest())
	}
	return discarded
}
