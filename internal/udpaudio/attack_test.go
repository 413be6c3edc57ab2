package udpaudio

import (
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	"fleetd/internal/racetest"
)

// forger sends forged packets; next is the sequence number that the device will use next.
type forger struct {
	name  string
	ports int // number of source addresses
	seq   func(w *world, i int, next uint32) uint32
}

var aims = map[string]func(w *world, i int, next uint32) uint32{
	"random":    func(w *world, _ int, _ uint32) uint32 { return w.rng.Uint32() },
	"maximum":   func(*world, int, uint32) uint32 { return math.MaxUint32 },
	"ascending": func(_ *world, i int, _ uint32) uint32 { return uint32(i + 1) },
	"next":      func(w *world, _ int, next uint32) uint32 { return next + w.rng.Uint32N(maxJump) },
	"steady":    func(_ *world, i int, next uint32) uint32 { return next + uint32(i/50)%maxJump },
}

var attacker = netip.MustParseAddr("198.51.100.66")

func (f *forger) flood(w *world, n int, next uint32) {
	for i := range n {
		from := netip.AddrPortFrom(attacker, uint16(1024+w.fed%uint64(f.ports)))
		w.forge(from, f.seq(w, i, next))
	}
	if at := w.c.Remote(); at.Addr() == attacker {
		w.t.Fatalf("downlink is sent to the attacker; %s", w.story())
	}
}

// TestFlood sends 50,000 forged packets per second of simulated time before the device's
// first packet, between all of its packets, in a pause, and while its address changes.
func TestFlood(t *testing.T) {
	const rate = 50_000
	for _, k := range []struct {
		aim   string
		ports int
		frame time.Duration
		full  bool
	}{
		{"random", 1, frame, false}, {"random", 60_000, frame, false},
		{"maximum", 1, frame, false}, {"maximum", 3, frame, false},
		{"ascending", 1, frame, false}, {"ascending", 60_000, frame, false},
		{"next", 1, frame, true}, {"next", 3, frame, false}, {"next", 60_000, frame, true},
		{"steady", 1, frame, false}, {"steady", 5, frame, false},
		{"next", 1, 20 * time.Millisecond, false}, {"next", 60_000, 20 * time.Millisecond, false},
	} {
		t.Run(fmt.Sprintf("%s from %d at %v", k.aim, k.ports, k.frame), func(t *testing.T) {
			w := newWorld(t, Params{FrameDuration: k.frame, Channels: 1})
			f := forger{k.aim, k.ports, aims[k.aim]}
			perFrame := int(rate * k.frame / time.Second)
			frames := uint32(40)
			switch {
			case racetest.Enabled: // which makes everything ten times slower
				perFrame /= 10
			case k.full:
				frames = 180 // over a million forged packets
			}
			say := func(from netip.AddrPort, seq uint32) {
				p := audioFrame(seq)
				if k.frame != frame {
					p[0] = 9 << 3 // SILK 20 ms
				}
				w.feed(from, w.uplink(seq, p))
				w.wait(k.frame)
			}
			before := frames / 4
			for range before {
				f.flood(w, perFrame, 1)
				w.wait(k.frame)
			}
			for seq := uint32(1); seq <= frames; seq++ {
				say(home, seq)
				f.flood(w, perFrame, seq+1)
			}
			if w.c.Remote() != home {
				t.Fatalf("address is %v; %s", w.c.Remote(), w.story())
			}
			w.wait(aliveFor)
			f.flood(w, perFrame*5, frames+1) // the device pauses
			for seq := frames + 1; seq <= 2*frames; seq++ {
				f.flood(w, perFrame, seq)
				say(home, seq)
			}
			last := 2*frames + 80
			for seq := 2*frames + 1; seq <= last; seq++ { // the device's NAT assigns a new port
				f.flood(w, perFrame/10, seq)
				say(away, seq)
			}
			if w.c.Remote() != away {
				t.Errorf("address is %v, not the new one", w.c.Remote())
			}
			wantInOrder(t, w.recorder.frames)
			if got := len(w.recorder.frames); float64(got) < 0.99*float64(last) {
				t.Errorf("%d of %d frames arrived", got, last)
			}
			if w.recorder.noise > 1 {
				t.Errorf("%d forged frames were delivered", w.recorder.noise)
			}
			w.wantCounted()
			t.Logf("%d packets, %d of %d frames, %d noise: %s", w.fed, len(w.recorder.frames), last, w.recorder.noise, w.story())
		})
	}
}

// TestFloodWithForgedSource floods with the device's own source address. Without knowledge
// of the sequence it has no effect. With it, it disturbs audio, but the window stays within
// the device's reach, and the downlink address does not change.
func TestFloodWithForgedSource(t *testing.T) {
	for _, aim := range []string{"random", "maximum"} {
		w := newWorld(t, params60)
		w.start(10)
		for seq := uint32(11); seq <= 100; seq++ {
			for i := range 1000 {
				w.forge(home, aims[aim](w, i, seq))
			}
			w.sendFrame(home, seq)
			w.wait(frame)
		}
		// security: D10
		w.wantFrames(1, 100)
		w.wantCounted()
	}
	w := newWorld(t, params60)
	w.start(10)
	seq := uint32(11)
	for ; seq <= 60; seq++ {
		for i := range 3000 {
			w.forge(home, aims["next"](w, i, w.c.path.window.high))
		}
		w.sendFrame(home, seq)
		w.wait(frame)
	}
	// security: D10
	if ahead := w.c.path.window.high - seq; ahead > windowSize {
		t.Fatalf("the window is %d ahead", ahead)
	}
	delivered := len(w.recorder.frames)
	for range 200 {
		w.sendFrame(home, seq)
		seq++
		w.wait(frame)
	}
	if got := len(w.recorder.frames) - delivered; got < 200-windowSize {
		t.Errorf("%d of 200 frames arrived after the flood; %s", got, w.story())
	}
	// security: D10
	if w.c.Remote() != home {
		t.Errorf("address is %v", w.c.Remote())
	}
}

// TestControlAddressIsPreferred fills the table of claims more than once.
func TestControlAddressIsPreferred(t *testing.T) {
	p := params60
	p.Remote = home.Addr()
	w := newWorld(t, p)
	w.forge(netip.AddrPortFrom(attacker, 1), 1)
	for seq := uint32(1); seq <= 20; seq++ {
		w.sendFrame(home, seq)
		for i := range 2 * maxClaims { // all of them plausible
			w.feed(netip.AddrPortFrom(attacker, uint16(1000*seq)+uint16(i)), w.uplink(seq, []byte{11 << 3, 1}))
		}
		w.wait(frame)
	}
	// security: D10
	w.wantFrames(1, 20)
	// security: D10
	if w.c.Remote() != home {
		t.Errorf("address is %v; %s", w.c.Remote(), w.story())
	}
}
