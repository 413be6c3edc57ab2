package udpaudio

import (
	"net/netip"
	"time"

	"fleetd/internal/envelope"
)

// proof is the evidence of consecutive plausible packets for their sender.
type proof struct {
	packets int
	bits    float64 // see speech
	toc     byte    // of the latest packet
}

func (p *proof) add(toc byte, s *packetModel) {
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

// path is the verified address of the device. It is provisional at first: its audio is
// delivered, but nothing is sent to it until it is confirmed.
type path struct {
	addr         netip.AddrPort
	window       window
	proof        proof // until confirmed
	confirmed    bool
	lastReceived time.Time // last accepted packet

	// A path that began with a jump may itself be forged. Until it has advanced by a whole
	// window, sequence numbers between floor (the highest of the previous path) and the
	// window may start a claim, because they were never accepted.
	first, floor uint32

	forged   time.Time // last implausible packet from addr, which shows that the address is being forged
	credit   uint32    // steps that the sequence may make meanwhile
	credited time.Time
}

func (p *path) alive(now time.Time) bool { return now.Sub(p.lastReceived) < aliveFor }

// maybeMissed reports whether seq, which is below the window, may belong to the stream before
// a forged jump.
func (p *path) maybeMissed(seq uint32) bool {
	return p.window.high-p.first <= windowSize && seq > p.floor
}

// recordForgery records a packet with the path's address that somebody forged.
func (p *path) recordForgery(now time.Time) {
	if now.Sub(p.forged) >= contestedFor {
		p.credit, p.credited = maxCredit, now
	}
	p.forged = now
}

// mayAdvance reports whether the highest sequence may advance by step. It always may unless
// the path's address is being forged. Then it advances no faster than the device speaks,
// so that forgeries that are plausible by chance cannot move the window far.
func (p *path) mayAdvance(step uint32, now time.Time, every time.Duration) bool {
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

// claim is an address other than the path's whose packets were plausible so far. A jump
// of the path's own address is also a claim.
type claim struct {
	addr         netip.AddrPort
	window       window
	proof        proof
	first        uint32 // lowest sequence number
	lastReceived time.Time
	frames       []heldFrame
	bytes        int
}

// heldFrame is a frame whose sender is not proven yet.
type heldFrame struct {
	sequence uint32
	frame    envelope.Frame
}

// change describes a newly proven address.
type change struct {
	from, to  netip.AddrPort
	moved     bool
	released  []heldFrame // to be delivered before the current packet
	discarded int
}

// drop removes a claim and returns the number of its frames.
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

// strength orders claims for eviction. A flood from many ports creates many claims of one
// packet each; claims with more evidence are kept longer, and so is a claim from the host
// of the control connection.
func (c *Channel) strength(cl *claim) float64 {
	if cl.addr.Addr() == c.control {
		return cl.proof.bits + c.model.again
	}
	return cl.proof.bits
}

// weakest returns the claim to evict first: the one with the least evidence, and among
// equals the one that was inactive for longest.
func (c *Channel) weakest() *claim {
	var weakest *claim
	least := 0.0
	for _, cl := range c.claims {
		if s := c.strength(cl); weakest == nil || s < least || s == least && cl.lastReceived.Before(weakest.lastReceived) {
			weakest, least = cl, s
		}
	}
	return weakest
}

// hold stores the packet in its claim, and evicts weaker claims if necessary.
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
