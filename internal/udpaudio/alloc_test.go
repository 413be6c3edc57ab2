package udpaudio

import (
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"fleetd/internal/envelope"
	"fleetd/internal/racetest"
)

type sink struct{ frames int }

func (d *sink) HandleAudio(envelope.Frame) { d.frames++ }
func (d *sink) ReportNoAudio(uint64)       {}

// confirmed returns a channel without a socket whose path is confirmed.
func confirmed(tb testing.TB) (*reader, *Channel, *sink) {
	tb.Helper()
	table, d := newTable(slog.New(slog.DiscardHandler)), &sink{}
	c := open(tb, table, d)
	r := &reader{table: table}
	for seq := uint32(1); seq <= confirmQuiet; seq++ {
		var b [maxPacket]byte
		var x ctr
		n := seal(&b, c.block, header{ssrc: c.ssrc, sequence: seq}, audioFrame(seq), &x)
		r.handle(b[:n], home, c.opened)
	}
	if !c.Remote().IsValid() {
		tb.Fatal("path is not confirmed")
	}
	return r, c, d
}

func TestReceivingAllocatesNothing(t *testing.T) {
	r, c, d := confirmed(t)
	var b [maxPacket]byte
	var x ctr
	seq, opus := uint32(confirmQuiet), audioFrame(0)
	now := c.opened
	if n := testing.AllocsPerRun(1000, func() {
		seq++
		now = now.Add(frame)
		n := seal(&b, c.block, header{ssrc: c.ssrc, sequence: seq}, opus, &x)
		r.handle(b[:n], home, now)
		r.handle(b[:n], home, now) // replayed
		r.handle(b[:n], away, now) // foreign
		b[7]++
		r.handle(b[:n], home, now) // unknown
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if d.frames < 1000 {
		t.Errorf("only %d frames were accepted", d.frames)
	}
}

// echo sends the frame back from within the call.
type echo struct {
	c    *Channel
	sent int
}

func (e *echo) HandleAudio(f envelope.Frame) {
	if e.c.SendAudio(f) == nil {
		e.sent++
	}
}
func (e *echo) ReportNoAudio(uint64) {}

func TestSocketsAllocateNothing(t *testing.T) {
	if racetest.Enabled {
		t.Log("sync.Pool drops items under the race detector; run the allocation tests without it")
		return
	}
	for _, addr := range []string{"127.0.0.1:0", ":0"} { // one address family, both
		table, e := listen(t, addr), &echo{}
		e.c = open(t, table, e)
		device := dial(t, table)
		seq, opus := uint32(0), audioFrame(0)
		var b [maxPacket]byte
		say := func() {
			seq++
			n := seal(&b, e.c.block, header{ssrc: e.c.ssrc, sequence: seq}, opus, &device.ctr)
			device.send(b[:n])
		}
		_ = device.conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		for range confirmQuiet - 1 {
			say()
		}
		if n := testing.AllocsPerRun(500, func() {
			say()
			if _, err := device.conn.Read(b[:]); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations per packet in and out", addr, n)
		}
		settle(t, table, uint64(seq))
		if e.sent != 501 || table.Stats().Sent.Load() != 501 {
			t.Errorf("%s: %d answers; %s", addr, e.sent, story(table.Stats()))
		}
	}
}

func BenchmarkReceive(b *testing.B) {
	r, c, _ := confirmed(b)
	var packet [maxPacket]byte
	var x ctr
	opus := audioFrame(0)
	now := time.Now()
	sealed := func(seq uint32) []byte {
		n := seal(&packet, c.block, header{ssrc: c.ssrc, sequence: seq}, opus, &x)
		return packet[:n]
	}
	b.Run("accepted, and sealed", func(b *testing.B) {
		b.ReportAllocs()
		for seq := c.path.window.high + 1; b.Loop(); seq++ {
			r.handle(sealed(seq), home, now)
		}
	})
	b.Run("replayed", func(b *testing.B) {
		p := sealed(c.path.window.high)
		b.ReportAllocs()
		for b.Loop() {
			r.handle(p, home, now)
		}
	})
	b.Run("foreign", func(b *testing.B) {
		p := sealed(c.path.window.high)
		b.ReportAllocs()
		for b.Loop() {
			r.handle(p, away, now)
		}
	})
	b.Run("forged next", func(b *testing.B) {
		var p [HeaderSize + 90]byte
		rng := rand.New(rand.NewPCG(1, 2))
		b.ReportAllocs()
		for b.Loop() { // most of the time is spent on making the forgery
			forgery(p[:], c.ssrc, c.path.window.high+1, rng)
			r.handle(p[:], away, now)
		}
	})
	b.Run("unknown", func(b *testing.B) {
		p := sealed(1)
		p[7]++
		b.ReportAllocs()
		for b.Loop() {
			r.handle(p, home, now)
		}
	})
}

func BenchmarkSocket(b *testing.B) {
	table, d := listen(b, "127.0.0.1:0"), &sink{}
	c := open(b, table, d)
	device := dial(b, table)
	opus := audioFrame(0)
	var p [maxPacket]byte
	var seq uint32
	b.ReportAllocs()
	for b.Loop() {
		seq++
		n := seal(&p, c.block, header{ssrc: c.ssrc, sequence: seq}, opus, &device.ctr)
		device.send(p[:n])
		if seq%256 == 0 {
			settle(b, table, uint64(seq))
		}
	}
}

func BenchmarkSend(b *testing.B) {
	table, d := listen(b, "127.0.0.1:0"), &sink{}
	c := open(b, table, d)
	device := dial(b, table)
	for seq := uint32(1); seq <= confirmQuiet; seq++ {
		device.sendFrame(c, seq)
	}
	settle(b, table, confirmQuiet)
	opus := audioFrame(0)
	b.ReportAllocs()
	for b.Loop() {
		_ = c.SendAudio(envelope.Frame{Opus: opus}) // errors are counted
	}
}
