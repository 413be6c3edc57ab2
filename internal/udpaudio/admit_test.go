package udpaudio

import (
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"
)

const frame = 60 * time.Millisecond

// start sends the device's first packets, up to sequence number last.
func (w *world) start(last uint32) {
	w.t.Helper()
	for seq := uint32(1); seq <= last; seq++ {
		if v := w.sendFrame(home, seq); v != Accepted {
			w.t.Fatalf("packet %d: %v", seq, v)
		}
		w.wait(frame)
	}
	if last >= confirmQuiet && w.c.Remote() != home {
		w.t.Fatalf("address is %v after %d packets", w.c.Remote(), last)
	}
}

func TestFirstPacketIsDelivered(t *testing.T) {
	w := newWorld(t, params60)
	for seq := uint32(1); seq <= 4; seq++ {
		if v := w.sendFrame(home, seq); v != Accepted || len(w.recorder.frames) != int(seq) {
			t.Errorf("packet %d: %v, %d frames", seq, v, len(w.recorder.frames))
		}
		if got := w.c.Remote().IsValid(); got != (seq >= confirmQuiet) {
			t.Errorf("packet %d: address known %v", seq, got)
		}
	}
	w.wantFrames(1, 4)
}

func TestBadInput(t *testing.T) {
	genuine := func(w *world) []byte { return w.uplink(4, audioFrame(4)) }
	for _, k := range []struct {
		name string
		make func(w *world) []byte
		want Verdict
	}{
		{"length too high", func(w *world) []byte { return genuine(w)[:100] }, BadLength},
		{"length too low", func(w *world) []byte { return append(genuine(w), 0) }, BadLength},
		{"longest", func(w *world) []byte { return w.uplink(4, append(audioFrame(4), make([]byte, 1186)...)) }, Accepted},
		{"over MaxPayload", func(w *world) []byte { b := make([]byte, maxPacket+1); b[0] = 1; return b }, TooLong},
		{"downlink sent back", func(w *world) []byte { b := genuine(w); b[1] = flagDownlink; return b }, BadFlags},
		{"other ssrc", func(w *world) []byte { b := genuine(w); b[7]++; return b }, UnknownSSRC},
		{"downlink ssrc", func(w *world) []byte { b := genuine(w); b[4] |= 1; return b }, UnknownSSRC},
		{"sequence 0", func(w *world) []byte { return w.uplink(0, audioFrame(4)) }, Old},
		{"duplicate", func(w *world) []byte { return w.uplink(3, audioFrame(3)) }, Replayed},
		{"timestamp changed", func(w *world) []byte { b := genuine(w); b[8]++; return b }, Implausible},
		{"stereo", func(w *world) []byte { return w.uplink(4, []byte{11<<3 | 4, 1}) }, Implausible},
		{"20 ms", func(w *world) []byte { return w.uplink(4, []byte{9 << 3, 1}) }, Implausible},
	} {
		w := newWorld(t, params60)
		w.start(3)
		if v := w.feed(home, k.make(w)); v != k.want {
			t.Errorf("%s: %v, want %v", k.name, v, k.want)
		}
		if v := w.sendFrame(home, 5); v != Accepted {
			t.Errorf("%s: the next packet is %v", k.name, v)
		}
	}
	w := newWorld(t, params60)
	w.start(3)
	for n := range HeaderSize + 1 {
		want := Short
		if n == HeaderSize {
			want = Empty
		}
		b := genuine(w)[:n]
		if n == HeaderSize {
			b[2], b[3] = 0, 0
		}
		if v := w.feed(home, b); v != want {
			t.Errorf("%d bytes: %v, want %v", n, v, want)
		}
	}
	w.wantCounted()
}

func TestReordering(t *testing.T) {
	for distance := uint32(1); distance <= 64; distance++ {
		w := newWorld(t, params60)
		w.start(3)
		const late = 4
		for seq := late + uint32(1); seq <= late+distance; seq++ {
			if v := w.sendFrame(home, seq); v != Accepted {
				t.Fatalf("distance %d: packet %d is %v", distance, seq, v)
			}
		}
		if v := w.sendFrame(home, late); v != Accepted {
			t.Fatalf("%d packets late: %v", distance, v)
		}
		for _, seq := range []uint32{late, late + distance} {
			if v := w.sendFrame(home, seq); v != Replayed {
				t.Fatalf("distance %d: duplicate of %d is %v", distance, seq, v)
			}
		}
		if got := w.recorder.frames[len(w.recorder.frames)-1]; got != late {
			t.Fatalf("distance %d: last frame is %d", distance, got)
		}
	}
	w := newWorld(t, params60)
	w.start(3)
	w.sendFrame(home, 64)
	w.sendFrame(home, 69)
	if v := w.sendFrame(home, 4); v != Old {
		t.Errorf("65 packets late: %v", v)
	}
}

func TestReorderedFromTheStart(t *testing.T) {
	w := newWorld(t, params60)
	for _, seq := range []uint32{64, 2, 1, 63, 30, 65} {
		if v := w.sendFrame(home, seq); v != Accepted {
			t.Errorf("packet %d: %v", seq, v)
		}
	}
	if w.c.Remote() != home {
		t.Error("not confirmed")
	}
}

// TestReplays replays a recorded conversation from the device's address and from others,
// during it and after it.
func TestReplays(t *testing.T) {
	for _, from := range []netip.AddrPort{home, away, netip.MustParseAddrPort("203.0.113.9:1")} {
		w := newWorld(t, params60)
		w.start(200)
		for range 3 {
			for seq := uint32(1); seq <= 200; seq++ {
				// security: D10
				if v := w.sendFrame(from, seq); v == Accepted || v == Held || v == Jump {
					t.Fatalf("replay of %d from %v: %v", seq, from, v)
				}
			}
			w.wait(time.Minute)
		}
		w.wantFrames(1, 200)
		// security: D10
		if w.c.Remote() != home {
			t.Errorf("replays moved the address to %v", w.c.Remote())
		}
		w.wantCounted()
	}
}

// TestOneMaximumSequence is GW-5 of the peers: one forged packet with the device's own
// address that happens to be plausible blocks nothing.
func TestOneMaximumSequence(t *testing.T) {
	for _, n := range []uint32{1, 3, 30} { // packets before it
		for _, from := range []netip.AddrPort{home, away} {
			w := newWorld(t, params60)
			w.start(n)
			if v := w.feed(from, w.uplink(math.MaxUint32, []byte{11 << 3, 1, 2, 3})); v == Accepted {
				t.Errorf("after %d from %v: accepted", n, from)
			}
			for seq := n + 1; seq <= n+20; seq++ {
				w.sendFrame(home, seq)
				w.wait(frame)
			}
			w.wantFrames(1, n+20)
			if w.recorder.noise != 0 || w.c.Remote() != home {
				t.Errorf("after %d from %v: %d noise, address %v", n, from, w.recorder.noise, w.c.Remote())
			}
		}
	}
	w := newWorld(t, params60) // as the very first packet it is delivered, without further effect
	w.feed(away, w.uplink(math.MaxUint32, []byte{11 << 3, 1, 2, 3}))
	for seq := uint32(1); seq <= 20; seq++ {
		w.sendFrame(home, seq)
		w.wait(frame)
	}
	w.wantFrames(1, 20)
	if w.recorder.noise != 1 || w.c.Remote() != home {
		t.Errorf("%d noise, address %v", w.recorder.noise, w.c.Remote())
	}
}

func TestJump(t *testing.T) {
	w := newWorld(t, params60)
	w.start(10)
	if v := w.sendFrame(home, 10+maxJump); v != Accepted {
		t.Errorf("gap of %d: %v", maxJump, v)
	}
	if v := w.sendFrame(home, 1000); v != Jump {
		t.Errorf("jump: %v", v)
	}
	if v := w.sendFrame(home, 1001); v != Accepted { // the device was unreachable for a minute
		t.Errorf("packet after the jump: %v", v)
	}
	n := len(w.recorder.frames)
	if n != 13 || w.recorder.frames[11] != 1000 || w.table.stats.Moves.Load() != 0 {
		t.Errorf("frames %v, %s", w.recorder.frames, w.story())
	}
	for _, seq := range []uint32{10, 74, 1000, 1001} {
		if v := w.sendFrame(home, seq); v == Accepted {
			t.Errorf("replay of %d is accepted", seq)
		}
	}
}

func TestJumpNeedsSecondPacket(t *testing.T) {
	w := newWorld(t, params60)
	w.start(10)
	for seq := uint32(11); seq <= 30; seq++ { // the stream continues, so the jump was forged
		if v := w.sendFrame(home, 1000+seq); v != Jump {
			t.Fatalf("packet %d: %v", 1000+seq, v)
		}
		if v := w.sendFrame(home, seq); v != Accepted {
			t.Fatalf("packet %d: %v", seq, v)
		}
	}
	w.wantFrames(1, 30)
}

// TestContested sends a forged packet between the device's second and third packet: the
// device's evidence and frames are kept.
func TestContested(t *testing.T) {
	w := newWorld(t, params60)
	w.start(2)
	w.feed(netip.AddrPortFrom(attacker, 1), w.uplink(7, []byte{0xff, 0xff}))
	for _, k := range []struct {
		seq  uint32
		want Verdict
	}{{1, Replayed}, {2, Replayed}, {3, Held}, {4, Held}, {5, Accepted}, {4, Replayed}, {6, Accepted}} {
		if v := w.sendFrame(home, k.seq); v != k.want {
			t.Errorf("packet %d: %v, want %v", k.seq, v, k.want)
		}
	}
	w.wantFrames(1, 6)
	if w.c.Remote() != home {
		t.Error("not confirmed")
	}
}

// TestEvidence counts the packets that are needed for a proof.
func TestEvidence(t *testing.T) {
	for _, k := range []struct {
		ms               time.Duration
		tocs             []byte
		quiet, contested int
	}{
		{60, []byte{11 << 3}, 3, 5},
		{60, []byte{11 << 3, 7 << 3}, 3, 8}, // modes alternate
		{20, []byte{9 << 3}, 3, 6},
		{20, []byte{9 << 3, 31 << 3}, 8, 27},
		{0, []byte{9 << 3}, 3, 7},
	} {
		for _, contested := range []bool{false, true} {
			w := newWorld(t, Params{FrameDuration: k.ms * time.Millisecond, Channels: 1})
			want := k.quiet
			if contested {
				want = k.contested
				w.feed(netip.AddrPortFrom(attacker, 1), w.uplink(1, []byte{0xff, 0xff}))
			}
			seq := uint32(1)
			for ; !w.c.Remote().IsValid() && seq < 100; seq++ {
				w.feed(home, w.uplink(seq, []byte{k.tocs[int(seq)%len(k.tocs)], 1, 2}))
			}
			if int(seq-1) != want || w.recorder.noise != want {
				t.Errorf("%d ms, %x, contested %v: %d packets, %d delivered, want %d", k.ms, k.tocs, contested, seq-1, w.recorder.noise, want)
			}
		}
	}
	w := newWorld(t, params60)
	w.feed(netip.AddrPortFrom(attacker, 1), w.uplink(1, []byte{0xff, 0xff}))
	for seq := uint32(65); seq > 1; seq-- {
		w.sendFrame(home, seq)
	}
	if w.c.Remote().IsValid() {
		t.Error("a descending sequence was accepted as evidence")
	}
}

// TestReplayBelowNewWindow replays a packet that arrived late and has just left the
// window.
func TestReplayBelowNewWindow(t *testing.T) {
	for _, contested := range []bool{false, true} {
		w := newWorld(t, params60)
		if contested {
			w.feed(netip.AddrPortFrom(attacker, 1), w.uplink(1, []byte{0xff, 0xff}))
		}
		w.sendFrame(home, 64)
		w.sendFrame(home, 1)
		for seq := uint32(65); seq <= 128; seq++ {
			w.sendFrame(home, seq)
		}
		if n := len(w.recorder.frames); n != 66 {
			t.Errorf("contested %v: %d frames", contested, n)
		}
		if v := w.sendFrame(home, 1); v != Old {
			t.Errorf("contested %v: replay is %v", contested, v)
		}
	}
}

// TestForgedJumpIsUndone makes a forged packet with the device's address succeed: the
// window jumps, and returns to the device without accepting replays.
func TestForgedJumpIsUndone(t *testing.T) {
	w := newWorld(t, params60)
	w.start(100)
	for seq := uint32(1 << 30); seq < 1<<30+2; seq++ {
		w.feed(home, w.uplink(seq, []byte{11 << 3, 1, 2, 3}))
	}
	if w.recorder.noise != 2 {
		t.Fatal("the jump was not accepted: the test proves nothing")
	}
	for seq := uint32(1); seq <= 100; seq++ {
		// security: D10
		if v := w.sendFrame(home, seq); v != Old {
			t.Fatalf("replay of %d: %v", seq, v)
		}
	}
	for seq := uint32(101); seq <= 300; seq++ {
		w.sendFrame(home, seq)
		w.wait(frame)
	}
	// security: D10
	w.wantFrames(1, 300)
	w.wantCounted()
}

func TestMappedAddressIsTheSame(t *testing.T) {
	w := newWorld(t, params60)
	mapped := netip.AddrPortFrom(netip.AddrFrom16(home.Addr().As16()), home.Port())
	for seq := uint32(1); seq <= 6; seq++ {
		from := home
		if seq%2 == 0 {
			from = mapped
		}
		if v := w.sendFrame(from, seq); v != Accepted {
			t.Errorf("packet %d: %v", seq, v)
		}
	}
	if w.c.Remote() != home {
		t.Errorf("address is %v", w.c.Remote())
	}
}

// TestHeldIsBounded sends genuine packets from many addresses.
func TestHeldIsBounded(t *testing.T) {
	for _, size := range []int{1, 90, 1270} {
		t.Run(fmt.Sprint(size, " bytes"), func(t *testing.T) { testHeld(t, append([]byte{11 << 3}, make([]byte, size-1)...)) })
	}
}

func testHeld(t *testing.T, opus []byte) {
	w := newWorld(t, params60)
	w.start(10)
	for i := range uint32(5000) {
		w.feed(netip.AddrPortFrom(away.Addr(), uint16(1+i%700)), w.uplink(11+i%60, opus))
		if w.c.heldBytes > maxHeldBytes || len(w.c.claims) > maxClaims {
			t.Fatalf("%d bytes of %d claims", w.c.heldBytes, len(w.c.claims))
		}
	}
	sum := 0
	for _, cl := range w.c.claims {
		bytes := 0
		for _, f := range cl.frames {
			bytes += len(f.frame.Opus)
		}
		if bytes != cl.bytes || len(cl.frames) > maxHeldFrames {
			t.Fatalf("claim counts %d bytes of %d, %d frames", cl.bytes, bytes, len(cl.frames))
		}
		sum += bytes
	}
	if sum != w.c.heldBytes || sum == 0 {
		t.Errorf("channel counts %d bytes, claims hold %d", w.c.heldBytes, sum)
	}
	w.wait(claimLife)
	w.table.sweep(w.c, w.now)
	if len(w.c.claims) != 0 || w.c.heldBytes != 0 {
		t.Errorf("%d claims, %d bytes after %v", len(w.c.claims), w.c.heldBytes, claimLife)
	}
	if s := w.table.Stats(); s.Discarded.Load() != s.Packets(Held) {
		t.Errorf("not every held frame was counted as discarded: %s", w.story())
	}
	w.wantCounted()
}

func TestUnknownDuration(t *testing.T) {
	w := newWorld(t, Params{})
	w.start(20)
	w.forge(away, 21)
	for seq := uint32(21); seq <= 60; seq++ {
		w.sendFrame(away, seq)
		w.wait(frame)
	}
	w.wantFrames(1, 60)
	if w.c.Remote() != away {
		t.Errorf("address is %v", w.c.Remote())
	}
}
