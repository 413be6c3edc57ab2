package udpaudio

import (
	"net/netip"
	"time"
)

// How an address is believed. A forger who knows ssrc but not the key can only
// send packets that decrypt to random bytes. Of those about 1.2 % look like a
// mono Opus packet of 60 ms, more for shorter frames, so one plausible packet
// proves nothing; several in a row without a miss do.
//
//   - The first plausible packet of a quiet channel founds a provisional path:
//     its audio is delivered at once. After confirmQuiet packets it is
//     confirmed, and only then does downlink audio go there.
//   - One implausible packet, or another address, and the channel is contested
//     for contestedFor. A provisional path is no more than a claim then.
//   - A claim needs confirmContestedBits of evidence then: five or more packets
//     in a row. Its audio is held meanwhile and delivered when it is proven, so
//     the genuine device loses nothing. Its first implausible packet ends it.
//   - A confirmed path is alive for aliveFor after its last packet. Until then
//     no claim replaces it, and other addresses' packets are dropped, before
//     decryption unless they would continue the sequence, which is what a
//     device behind a rebinding NAT sends: those are held. Only packets of the
//     path itself advance its window.
//   - A sequence more than maxJump ahead is a claim too, of the same address
//     (RFC 3550 appendix A.1).
//
// Left to an attacker: one who also forges the device's source address and
// guesses its sequences can spoil audio while the flood lasts. The window does
// not run away with it (path.afford), so it ends with the flood. Replaying
// recorded packets gains nothing: no claim is founded on taken sequences.
const (
	// maxJump is the farthest step that is believed from a single packet.
	maxJump = windowSize

	aliveFor     = time.Second // so also between two changes of address, at least
	contestedFor = 10 * time.Second
	claimLife    = 5 * time.Second

	// What confirms an address: packets, and bits of evidence among them. 34
	// bits are five packets of a steady 60 ms stream, and to a flood of 50,000
	// packets per second at least four days for one lucky forgery.
	confirmQuiet         = 3
	confirmQuietBits     = 11
	confirmContestedBits = 34
	confirmJump          = 2 // of a confirmed address, not contested

	// maxClaims outlasts the gap between two packets of the device in a flood
	// from many ports: 600 plausible packets per second are 36 in 60 ms.
	maxClaims     = 256
	maxHeldFrames = 64        // per claim; a move takes aliveFor and a few packets
	maxHeldBytes  = 256 << 10 // per channel; over twice what one claim can hold

	maxCredit    = 48                    // packets, under windowSize
	defaultFrame = 20 * time.Millisecond // for afford, if the hello told none
)

// packet is one datagram on its way through admit.
type packet struct {
	header
	iv    *[HeaderSize]byte
	body  []byte // plaintext after open
	from  netip.AddrPort
	local netip.Addr // that it was sent to; zero if the socket has only one
	now   time.Time
	ctr   *ctr
}

// open decrypts p in place and reports whether it is plausible.
func (c *Channel) open(p *packet) bool {
	p.ctr.xor(c.block, p.iv, p.body)
	return c.speech.plausible(p.body)
}

// admit judges one packet of the channel. After Accepted p.body is plaintext
// and to be delivered; a change, which is rare, comes before it.
func (c *Channel) admit(p *packet) (Verdict, *change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return UnknownSSRC, nil
	}
	c.tried++
	verdict, ch := c.judge(p)
	c.heard = c.heard || verdict == Accepted
	return verdict, ch
}

func (c *Channel) judge(p *packet) (Verdict, *change) {
	if p.sequence == 0 { // the device starts at 1
		return Old, nil
	}
	if c.path.addr.IsValid() && p.from == c.path.addr {
		return c.judgeOwn(p)
	}
	if c.path.confirmed {
		return c.judgeForeign(p)
	}
	if c.path.addr.IsValid() {
		c.demote()
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

// judgeOwn judges a packet from the path's address.
func (c *Channel) judgeOwn(p *packet) (Verdict, *change) {
	where, step := c.path.window.place(p.sequence)
	switch {
	case where == taken:
		return Replayed, nil
	case where == behind && !c.path.missed(p.sequence):
		return Old, nil
	}
	if !c.open(p) {
		c.refuse(p)
		if c.path.confirmed {
			c.path.suspect(p.now)
		} else {
			c.path = path{}
		}
		return Implausible, nil
	}
	if where == behind || step > maxJump || !c.path.afford(step, p.now, c.speech.duration) {
		return c.claim(p, Jump)
	}
	if cl := c.claims[p.from]; cl != nil { // the stream goes on where it was: the jump was none
		c.discard(c.drop(cl))
	}
	return Accepted, c.accept(p)
}

// accept takes a packet into the path's window. It returns a change when that
// confirms the path.
func (c *Channel) accept(p *packet) *change {
	c.path.window.take(p.sequence)
	c.path.first = min(c.path.first, p.sequence)
	c.path.heard = p.now
	if c.path.confirmed {
		return nil
	}
	c.path.proof.add(p.body[0], &c.speech)
	if c.path.proof.packets < confirmQuiet || c.path.proof.bits < confirmQuietBits {
		return nil
	}
	c.path.confirmed = true
	c.remote.Store(&endpoint{c.path.addr, p.local})
	return &change{to: c.path.addr}
}

// judgeForeign judges a packet from another address than the confirmed one.
func (c *Channel) judgeForeign(p *packet) (Verdict, *change) {
	where, step := c.path.window.place(p.sequence)
	next := where == ahead && (step <= maxJump || !c.path.alive(p.now))
	if !next && !(where == behind && c.path.missed(p.sequence)) {
		c.contested = p.now
		return Foreign, nil
	}
	if !c.open(p) {
		c.refuse(p)
		return Implausible, nil
	}
	return c.claim(p, Held)
}

// refuse notes an implausible packet: whoever sent it is not the device.
func (c *Channel) refuse(p *packet) {
	c.contested = p.now
	if cl := c.claims[p.from]; cl != nil {
		c.discard(c.drop(cl))
	}
}

func (c *Channel) isContested(now time.Time) bool { return now.Sub(c.contested) < contestedFor }

func (c *Channel) discard(frames int) { c.table.stats.Discarded.Add(uint64(frames)) }

// demote turns the provisional path into a claim, which keeps what it proved.
func (c *Channel) demote() {
	cl := c.found(c.path.addr)
	cl.window, cl.proof, cl.first, cl.heard = c.path.window, c.path.proof, c.path.first, c.path.heard
	c.path = path{}
}

// found makes an empty claim in place of any other of the same address.
func (c *Channel) found(addr netip.AddrPort) *claim {
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

// claim adds a plausible packet to its address's claim, or founds one. The
// verdict is verdict, or Accepted if that proves the address.
func (c *Channel) claim(p *packet, verdict Verdict) (Verdict, *change) {
	cl := c.claims[p.from]
	where, step := ahead, uint32(0)
	if cl != nil {
		where, step = cl.window.place(p.sequence)
	}
	switch {
	case where == taken:
		return Replayed, nil
	case cl == nil || where == behind || step > maxJump: // another stream
		if len(c.claims) > 0 {
			c.contested = p.now
		}
		cl = c.found(p.from)
		cl.first = p.sequence
	}
	cl.window.take(p.sequence)
	cl.first = min(cl.first, p.sequence)
	cl.heard = p.now
	if where != inside { // only an ascending sequence proves something
		cl.proof.add(p.body[0], &c.speech)
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

// adopt makes the claim the path and releases what it held. Every other claim
// is dropped with its frames.
func (c *Channel) adopt(cl *claim, p *packet) *change {
	old := c.path
	floor := old.window.high
	next := path{addr: cl.addr, window: cl.window, first: cl.first, confirmed: true, heard: p.now}
	if next.window.high > floor {
		next.window.merge(old.window)
	} else { // back to what a forged jump left behind
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
