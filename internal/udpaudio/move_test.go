package udpaudio

import (
	"net/netip"
	"testing"
	"time"
)

// TestTwoClaimsContest has two addresses continue an inactive path.
func TestTwoClaimsContest(t *testing.T) {
	w := newWorld(t, params60)
	w.start(10)
	w.wait(time.Minute)
	w.sendFrame(away, 11)
	w.sendFrame(netip.AddrPortFrom(attacker, 1), 11)
	for seq := uint32(12); seq <= 15; seq++ {
		if v, want := w.sendFrame(away, seq), seq == 15; (v == Accepted) != want {
			t.Errorf("packet %d: %v", seq, v)
		}
	}
	w.wantFrames(1, 15)
}

// TestReplaysAcrossAMove replays packets of the old address from the new one.
func TestReplaysAcrossAMove(t *testing.T) {
	w := newWorld(t, params60)
	w.start(50)
	w.wait(time.Minute)
	for seq := uint32(51); seq <= 53; seq++ {
		w.sendFrame(away, seq)
	}
	if w.c.Remote() != away {
		t.Fatalf("address is %v", w.c.Remote())
	}
	for seq := uint32(1); seq <= 53; seq++ {
		if v := w.sendFrame(away, seq); v != Replayed {
			t.Errorf("replay of %d: %v", seq, v)
		}
	}
	w.wantFrames(1, 53)
}

func TestRebinding(t *testing.T) {
	for _, k := range []struct {
		name string
		gap  time.Duration // before the new address
		lost uint32        // packets meanwhile
	}{{"in mid-sentence", 0, 0}, {"after a pause", time.Minute, 0}, {"while out of reach", 5 * time.Second, 83}} {
		t.Run(k.name, func(t *testing.T) {
			w := newWorld(t, params60)
			w.start(50)
			w.wait(k.gap)
			moved := time.Time{}
			for seq := 51 + k.lost; seq <= 150; seq++ {
				w.sendFrame(away, seq)
				if moved.IsZero() && w.c.Remote() == away {
					moved = w.now
				}
				w.wait(frame)
			}
			wantInOrder(t, w.recorder.frames)
			if n := len(w.recorder.frames); n != 150-int(k.lost) || w.recorder.noise != 0 {
				t.Errorf("%d frames of %d", n, 150-k.lost)
			}
			if w.c.Remote() != away || w.table.stats.Moves.Load() != 1 || w.table.stats.Discarded.Load() != 0 {
				t.Errorf("address %v, %s", w.c.Remote(), w.story())
			}
			if d := moved.Sub(w.c.opened.Add(50*frame + k.gap)); d > aliveFor+frame {
				t.Errorf("moved after %v", d)
			}
			if w.c.claims != nil || w.c.heldBytes != 0 {
				t.Error("held frames are not freed")
			}
		})
	}
}

// TestFlipFlop alternates addresses with each packet: the first one keeps the channel, and
// none of its packets is lost.
func TestFlipFlop(t *testing.T) {
	w := newWorld(t, params60)
	w.start(10)
	for seq := uint32(11); seq <= 210; seq++ {
		from := home
		if seq%2 == 0 {
			from = away
		}
		if v := w.sendFrame(from, seq); (v == Accepted) != (from == home) {
			t.Fatalf("packet %d from %v: %v", seq, from, v)
		}
		w.wait(frame)
	}
	if n := len(w.c.claims[away].frames); n != maxHeldFrames {
		t.Errorf("%d frames are held", n)
	}
	if cl := w.c.claims[away]; cl.bytes != w.c.heldBytes {
		t.Errorf("the channel counts %d bytes, its one claim holds %d", w.c.heldBytes, cl.bytes)
	}
	if w.c.Remote() != home || w.table.stats.Moves.Load() != 0 {
		t.Errorf("address %v, %s", w.c.Remote(), w.story())
	}
	for seq := uint32(211); seq < 400; seq++ { // both become silent in turn
		from := home
		if seq/40%2 == 0 {
			from = away
		}
		w.sendFrame(from, seq)
		w.wait(frame)
	}
	wantInOrder(t, w.recorder.frames)
	if n := len(w.recorder.frames); n != 10+100+189 {
		t.Errorf("%d frames", n)
	}
	if moves := w.table.stats.Moves.Load(); moves != 4 {
		t.Errorf("%d moves", moves)
	}
	w.wantCounted()
}

func TestMovesAtMostOnceASecond(t *testing.T) {
	w := newWorld(t, params60)
	w.start(10)
	var last time.Time
	remote := home
	for seq := uint32(11); seq <= 2000; seq++ { // a new address every 7 packets, far faster than real speech
		from := netip.AddrPortFrom(home.Addr(), uint16(5000+seq/7))
		w.sendFrame(from, seq)
		if now := w.c.Remote(); now != remote {
			// security: D10
			if w.now.Sub(last) < aliveFor {
				t.Fatalf("moved after %v", w.now.Sub(last))
			}
			last, remote = w.now, now
		}
		w.wait(150 * time.Millisecond)
	}
	if w.table.stats.Moves.Load() == 0 {
		t.Error("never moved")
	}
}
