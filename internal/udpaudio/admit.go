package udpaudio

import (
	"net/netip"
	"time"
)

// How an address is verified. An attacker with the ssrc but without the key can only send
// packets that decrypt to random bytes. About 1.2 % of these look like a mono Opus packet
// of 60 ms, more for shorter frames. One plausible packet therefore proves nothing;
// several in sequence without an implausible one do.
//
//   - The first plausible packet of a quiet channel creates a provisional path, and its
//     audio is delivered at once. After confirmQuiet packets the path is confirmed, and
//     from then on downlink audio is sent to it.
//   - One implausible packet, or one from another address, makes the channel contested
//     for contestedFor. A provisional path then becomes a claim.
//   - A claim in a contested channel needs confirmContestedBits of evidence: five or more
//     packets in sequence. Its audio is held until then and delivered when it is proven,
//     so the genuine device loses nothing. Its first implausible packet ends it.
//   - A confirmed path is alive for aliveFor after its last packet. Until then no claim
//     replaces it, and packets from other addresses are dropped before decryption. The
//     exception are packets that would continue the sequence, as a device sends them
//     behind a NAT that assigns a new port: these are held. Only packets of the path
//     itself advance its window.
//   - A sequence number more than maxJump ahead is also a claim, of the same address
//     (RFC 3550 appendix A.1).
//
// What remains possible: an attacker who also forges the device's source address and
// guesses its sequence numbers can disturb audio while the flood lasts. The window does
// not advance faster than the device speaks (path.mayAdvance), so the disturbance ends with
// the flood. Replaying recorded packets has no effect: no claim starts with sequence
// numbers that were accepted before.
const (
	// maxJump is the largest step of the sequence that a single packet may make.
	maxJump = windowSize

	aliveFor     = time.Second // therefore also the shortest time between two changes of address
	contestedFor = 10 * time.Second
	claimLife    = 5 * time.Second

	// What confirms an address: packets, and bits of evidence among them. 34 bits are five
	// packets of a steady 60 ms stream; a flood of 50,000 packets per second needs at least
	// four days for one successful forgery.
	confirmQuiet         = 3
	confirmQuietBits     = 11
	confirmContestedBits = 34
	confirmJump          = 2 // of a confirmed address that is not contested

	// maxClaims covers the time between two packets of the device in a flood from many
	// ports: 600 plausible packets per second are 36 in 60 ms.
	maxClaims     = 256
	maxHeldFrames = 64        // per claim; a move takes aliveFor and a few packets
	maxHeldBytes  = 256 << 10 // per channel; over twice what one claim can contain

	maxCredit    = 48                    // packets, under windowSize
	defaultFrame = 20 * time.Millisecond // for mayAdvance, if the hello contains no duration
)

// packet is one datagram during admit.
type packet struct {
	header
	iv    *[HeaderSize]byte
	body  []byte // plaintext after open
	from  netip.AddrPort
	local netip.Addr // destination address; zero if the socket has only one
	now   time.Time
	ctr   *ctr
}

// open decrypts p in place and reports whether it is plausible.
func (c *Channel) open(p *packet) bool {
	p.ctr.xor(c.block, p.iv, p.body)
	return c.model.plausible(p.body)
}

// admit verifies one packet of the channel. After Accepted, p.body is plaintext to be
// delivered. A change, which is rare, must be handled before it.
func (c *Channel) admit(p *packet) (Verdict, *change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return UnknownSSRC, nil
	}
	c.datagrams++
	verdict, ch := c.verify(p)
	c.hasAudio = c.hasAudio || verdict == Accepted
	return verdict, ch
}

func (c *Channel) verify(p *packet) (Verdict, *change) {
	if p.sequence == 0 { // the device starts at 1
		return Old, nil
	}
	if c.path.addr.IsValid() && p.from == c.path.addr {
		return c.verifyOwn(p)
	}
	if c.path.confirmed {
		return c.verifyForeign(p)
	}
	if c.path.addr.IsValid() {
		c.demotePath()
		c.contested = p.now
	}
	if !c.open(p) {
		c.refuse(p)
		return Implausible, nil
	}
	if len(c.claims) > 0 || c.isContested(p.now) {
		return c.claim(p, Held)
	}
	c.path = path{addr: p.from, first: p.sequence}
	return Accepted, c.accept(p)
}

// verifyOwn verifies a packet from the path's address.
func (c *Channel) verifyOwn(p *packet) (Verdict, *change) {
	where, step := c.path.window.place(p.sequence)
	switch {
	case where == accepted:
		return Replayed, nil
	case where == below && !c.path.maybeMissed(p.sequence):
		return Old, nil
	}
	if !c.open(p) {
		c.refuse(p)
		if c.path.confirmed {
			c.path.recordForgery(p.now)
		} else {
			c.path = path{}
		}
		return Implausible, nil
	}
	if where == below || step > maxJump || !c.path.mayAdvance(step, p.now, c.model.duration) {
		return c.claim(p, Jump)
	}
	if cl := c.claims[p.from]; cl != nil { // the stream continues at its old position, so the jump was forged
		c.discard(c.drop(cl))
	}
	return Accepted, c.accept(p)
}

// accept adds a packet to the path's window. It returns a change if that confirms the
// path.
func (c *Channel) accept(p *packet) *change {
	c.path.window.accept(p.sequence)
	c.path.first = min(c.path.first, p.sequence)
	c.path.lastReceived = p.now
	if c.path.confirmed {
		return nil
	}
	c.path.proof.add(p.body[0], &c.model)
	if c.path.proof.packets < confirmQuiet || c.path.proof.bits < confirmQuietBits {
		return nil
	}
	c.path.confirmed = true
	c.remote.Store(&endpoint{c.path.addr, p.local})
	return &change{to: c.path.addr}
}

// verifyForeign verifies a packet from another address than the confirmed one.
func (c *Channel) verifyForeign(p *packet) (Verdict, *change) {
	where, step := c.path.window.place(p.sequence)
	next := where == ahead && (step <= maxJump || !c.path.alive(p.now))
	if !next && !(where == below && c.path.maybeMissed(p.sequence)) {
		c.contested = p.now
		return Foreign, nil
	}
	if !c.open(p) {
		c.refuse(p)
		return Implausible, nil
	}
	return c.claim(p, Held)
}

// refuse records an implausible packet, which the device cannot have sent.
func (c *Channel) refuse(p *packet) {
	c.contested = p.now
	if cl := c.claims[p.from]; cl != nil {
		c.discard(c.drop(cl))
	}
}

func (c *Channel) isContested(now time.Time) bool { return now.Sub(c.contested) < contestedFor }

func (c *Channel) discard(frames int) { c.table.stats.Discarded.Add(uint64(frames)) }

// demotePath turns the provisional path into a claim, which keeps its evidence.
func (c *Channel) demotePath() {
	cl := c.newClaim(c.path.addr)
	cl.window, cl.proof, cl.first, cl.lastReceived = c.path.window, c.path.proof, c.path.first, c.path.lastReceived
	c.path = path{}
}

// newClaim creates an empty claim, which replaces a claim of the same address.
func (c *Channel) newClaim(addr netip.AddrPort) *claim {
	if cl := c.claims[addr]; cl != nil {
		c.discard(c.drop(cl))
	}
	if len(c.claims) >= maxClaims {
		c.discard(c.drop(c.weakest()))
	}
	if c.claims == nil {
		c.claims = map[netip.AddrPort]*claim{}
	}
	cl := &claim{addr: addr}
	c.claims[addr] = cl
	return cl
}

// claim adds a plausible packet to the claim of its address, or creates one. It returns
// verdict, or Accepted if the packet proves the address.
func (c *Channel) claim(p *packet, verdict Verdict) (Verdict, *change) {
	cl := c.claims[p.from]
	where, step := ahead, uint32(0)
	if cl != nil {
		where, step = cl.window.place(p.sequence)
	}
	switch {
	case where == accepted:
		return Replayed, nil
	case cl == nil || where == below || step > maxJump: // another stream
		if len(c.claims) > 0 {
			c.contested = p.now
		}
		cl = c.newClaim(p.from)
		cl.first = p.sequence
	}
	cl.window.accept(p.sequence)
	cl.first = min(cl.first, p.sequence)
	cl.lastReceived = p.now
	if where != inside { // only an ascending sequence is evidence
		cl.proof.add(p.body[0], &c.model)
	}
	if c.proven(cl, p.now) {
		return Accepted, c.adopt(cl, p)
	}
	c.discard(c.hold(cl, p))
	return verdict, nil
}

// proven reports whether the claim may become the path.
func (c *Channel) proven(cl *claim, now time.Time) bool {
	contested := c.isContested(now)
	switch {
	case !c.path.confirmed:
	case cl.addr == c.path.addr:
		if !contested {
			return cl.proof.packets >= confirmJump
		}
	case c.path.alive(now):
		return false
	}
	if contested {
		return cl.proof.bits >= confirmContestedBits
	}
	return cl.proof.packets >= confirmQuiet && cl.proof.bits >= confirmQuietBits
}

// adopt makes the claim the path and releases its held frames. It drops all other claims
// with their frames.
func (c *Channel) adopt(cl *claim, p *packet) *change {
	old := c.path
	floor := old.window.high
	next := path{addr: cl.addr, window: cl.window, first: cl.first, confirmed: true, lastReceived: p.now}
	if next.window.high > floor {
		next.window.merge(old.window)
	} else { // back to the sequence numbers below a forged jump
		floor = old.floor
	}
	next.floor = floor
	ch := &change{from: old.addr, to: cl.addr, moved: old.confirmed && old.addr != cl.addr}
	for _, f := range cl.frames {
		if f.sequence > floor {
			ch.released = append(ch.released, f)
		}
	}
	ch.discarded = c.dropClaims() - len(ch.released)
	c.path = next
	c.remote.Store(&endpoint{cl.addr, p.local})
	return ch
}
