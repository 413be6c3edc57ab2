package udpaudio

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"fleetd/internal/envelope"
	"fleetd/internal/racetest"
)

func listen(t testing.TB, addr string) *Table {
	t.Helper()
	table, err := Listen(addr, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(table.Close)
	return table
}

// peer is a socket that exchanges packets with a table.
type peer struct {
	t    testing.TB
	conn *net.UDPConn
	ctr  ctr
}

func dial(t testing.TB, table *Table) *peer {
	t.Helper()
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(table.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &peer{t: t, conn: conn}
}

func (p *peer) addr() netip.AddrPort { return p.conn.LocalAddr().(*net.UDPAddr).AddrPort() }

func (p *peer) send(b []byte) {
	p.t.Helper()
	if _, err := p.conn.Write(b); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) sendFrame(c *Channel, seq uint32) {
	p.t.Helper()
	if err := p.trySend(c, seq); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) trySend(c *Channel, seq uint32) error {
	var b [maxPacket]byte
	n := seal(&b, c.block, header{ssrc: c.ssrc, sequence: seq}, audioFrame(seq), &p.ctr)
	_, err := p.conn.Write(b[:n])
	return err
}

// receive returns the header and plaintext of the next downlink packet.
func (p *peer) receive(c *Channel) (header, []byte) {
	p.t.Helper()
	var b [2048]byte
	_ = p.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	n, err := p.conn.Read(b[:])
	if err != nil {
		p.t.Fatal(err)
	}
	h, verdict := parse(b[:n])
	if verdict != Accepted {
		p.t.Fatalf("downlink packet is %v", verdict)
	}
	p.ctr.xor(c.block, (*[HeaderSize]byte)(b[:]), b[HeaderSize:n])
	return h, b[HeaderSize:n]
}

// total returns the number of datagrams that the table has read.
func total(table *Table) (n uint64) {
	for v := range Verdicts {
		n += table.Stats().Packets(v)
	}
	return n
}

// settle waits until the table has read n datagrams.
func settle(t testing.TB, table *Table, n uint64) {
	t.Helper()
	tick := time.NewTicker(20 * time.Microsecond) // a busy loop would keep the scheduler from polling the sockets
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); total(table) < n; <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d datagrams were read", total(table), n)
		}
	}
}

func open(t testing.TB, table *Table, r Receiver) *Channel {
	t.Helper()
	p := params60
	p.Receiver = r
	c, err := table.Open(p)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestConversation(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0", ":0"} {
		t.Run(addr, func(t *testing.T) {
			if addr == "[::1]:0" {
				probe, err := net.ListenPacket("udp6", addr)
				if err != nil {
					t.Skip("NOT RUN: this machine has no IPv6")
				}
				_ = probe.Close()
			}
			table, ear := listen(t, addr), &recorder{}
			c := open(t, table, ear)
			if err := c.SendAudio(envelope.Frame{Opus: audioFrame(1)}); !errors.Is(err, ErrNoAddress) {
				t.Errorf("got %v, want ErrNoAddress", err)
			}
			device := dial(t, table)
			device.send(nil)
			for seq := uint32(1); seq <= 5; seq++ {
				device.sendFrame(c, seq)
			}
			settle(t, table, 6)
			if got, want := ear.frames, 5; len(got) != want {
				t.Fatalf("%d frames, want %d; %s", len(got), want, story(table.Stats()))
			}
			local := netip.AddrPortFrom(device.addr().Addr().Unmap(), device.addr().Port())
			if c.Remote() != local {
				t.Fatalf("address is %v, want %v", c.Remote(), local)
			}
			nonce := c.Nonce()
			for i := range uint32(20) {
				if err := c.SendAudio(envelope.Frame{Timestamp: 60 * i, Opus: audioFrame(i)}); err != nil {
					t.Fatal(err)
				}
				h, opus := device.receive(c)
				if h.flags != flagDownlink || h.sequence != i+1 || h.timestamp != 60*i || h.ssrc != binary.BigEndian.Uint32(nonce[4:])|ssrcDownlink {
					t.Errorf("header %+v", h)
				}
				if string(opus) != string(audioFrame(i)) {
					t.Errorf("packet %d is %x", i, opus)
				}
			}
			for _, k := range []struct {
				n    int
				want error
			}{{0, ErrEmpty}, {MaxPayload, nil}, {MaxPayload + 1, ErrTooLong}} {
				if err := c.SendAudio(envelope.Frame{Opus: make([]byte, k.n)}); !errors.Is(err, k.want) {
					t.Errorf("%d bytes: got %v, want %v", k.n, err, k.want)
				}
			}
			c.Close()
			c.Close()
			if err := c.SendAudio(envelope.Frame{Opus: audioFrame(1)}); !errors.Is(err, ErrClosed) {
				t.Errorf("got %v, want ErrClosed", err)
			}
			device.sendFrame(c, 6)
			settle(t, table, 7)
			if n := table.Stats().Packets(UnknownSSRC); n != 1 {
				t.Errorf("%d packets for the closed channel", n)
			}
			if n := table.Stats().Channels.Load(); n != 0 {
				t.Errorf("%d channels are open", n)
			}
		})
	}
}

func TestNonceAndKeysDiffer(t *testing.T) {
	table := listen(t, "127.0.0.1:0")
	keys, nonces := map[[16]byte]bool{}, map[[16]byte]bool{}
	for range 1000 {
		c := open(t, table, &recorder{})
		n := c.Nonce()
		if n[0] != 1 || n[4]&1 != 0 || n != [16]byte{0: 1, 4: n[4], 5: n[5], 6: n[6], 7: n[7]} {
			t.Fatalf("nonce %x", n)
		}
		keys[c.Key()], nonces[n] = true, true
	}
	// security: D14
	if len(keys) != 1000 || len(nonces) != 1000 {
		t.Errorf("%d keys, %d nonces", len(keys), len(nonces))
	}
}

func TestTooManyChannels(t *testing.T) {
	table := listen(t, "127.0.0.1:0")
	table.stats.Channels.Store(MaxChannels)
	if _, err := table.Open(params60); !errors.Is(err, ErrTooMany) {
		t.Errorf("got %v, want ErrTooMany", err)
	}
	if n := table.stats.Channels.Load(); n != MaxChannels {
		t.Errorf("%d channels are counted after one that was refused", n)
	}
	table.stats.Channels.Store(0)
	table.Close()
	if _, err := table.Open(params60); !errors.Is(err, ErrClosed) || table.stats.Channels.Load() != 0 {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

// crowd is several sockets that flood one channel without overrunning the receive buffer, so
// that only the table drops packets.
type crowd struct {
	t     *testing.T
	table *Table
	peers []*peer
	rng   *rand.Rand
	sent  uint64
}

func (a *crowd) flood(c *Channel, n int, seq func(i int) uint32) {
	a.t.Helper()
	const inFlight = 256
	var b [HeaderSize + 90]byte
	for i := range n {
		forgery(b[:], c.ssrc, seq(i), a.rng)
		a.peers[i%len(a.peers)].send(b[:])
		if a.sent++; a.sent%inFlight == 0 {
			settle(a.t, a.table, a.sent)
		}
	}
	settle(a.t, a.table, a.sent)
}

// TestFloodOverSockets is the attack with real datagrams, as fast as the table reads them.
func TestFloodOverSockets(t *testing.T) {
	table, ear := listen(t, "127.0.0.1:0"), &recorder{}
	c := open(t, table, ear)
	device := dial(t, table)
	a := &crowd{t: t, table: table, rng: rand.New(rand.NewPCG(3, 4))}
	for range 4 {
		a.peers = append(a.peers, dial(t, table))
	}
	perFrame, frames := 1000, uint32(150)
	if racetest.Enabled {
		perFrame = 100
	}
	next := uint32(1)
	aims := []func(i int) uint32{
		func(int) uint32 { return a.rng.Uint32() },
		func(int) uint32 { return 1<<32 - 1 },
		func(int) uint32 { return next + a.rng.Uint32N(maxJump) },
	}
	say := func(n uint32) {
		for range n {
			a.flood(c, perFrame, aims[next%3])
			device.sendFrame(c, next)
			a.sent++
			next++
		}
		settle(t, table, a.sent)
	}
	begun := time.Now()
	a.flood(c, 20*perFrame, aims[0])
	say(frames)
	if c.Remote() != device.addr() {
		t.Fatalf("address is %v; %s", c.Remote(), story(table.Stats()))
	}
	for i := range uint32(50) {
		if err := c.SendAudio(envelope.Frame{Timestamp: i, Opus: audioFrame(i)}); err != nil {
			t.Fatal(err)
		}
		if h, _ := device.receive(c); h.sequence != i+1 {
			t.Fatalf("downlink packet %d has sequence %d", i, h.sequence)
		}
	}
	for pause := time.Now(); time.Since(pause) < aliveFor+aliveFor/10; { // the path is no longer alive
		a.flood(c, perFrame, aims[2])
	}
	say(frames)
	t.Logf("%d datagrams in %v: %s", a.sent, time.Since(begun), story(table.Stats()))
	wantInOrder(t, ear.frames)
	if got := len(ear.frames); float64(got) < 0.99*float64(2*frames) || ear.noise > 1 {
		t.Errorf("%d of %d frames, %d noise", got, 2*frames, ear.noise)
	}
	if c.Remote() != device.addr() || table.Stats().Moves.Load() != 0 {
		t.Errorf("address is %v", c.Remote())
	}
	for _, p := range a.peers { // packets sent over the loopback have arrived
		_ = p.conn.SetReadDeadline(time.Now().Add(time.Millisecond))
		if n, err := p.conn.Read(make([]byte, 2048)); err == nil {
			t.Errorf("an attacker received %d bytes", n)
		}
	}
}

func TestUnknownFlood(t *testing.T) {
	table, ear := listen(t, "127.0.0.1:0"), &recorder{}
	c := open(t, table, ear)
	device := dial(t, table)
	a := &crowd{t: t, table: table, peers: []*peer{dial(t, table)}, rng: rand.New(rand.NewPCG(5, 6))}
	wrong := &Channel{ssrc: c.ssrc ^ 1}
	a.flood(wrong, 10_000, func(i int) uint32 { return uint32(i) })
	for seq := uint32(1); seq <= 10; seq++ {
		device.sendFrame(c, seq)
	}
	settle(t, table, a.sent+10)
	if n := table.Stats().Packets(UnknownSSRC); n != 10_000 || len(ear.frames) != 10 {
		t.Errorf("%d unknown, %d frames", n, len(ear.frames))
	}
}

// TestDeadPeer sends to a closed port: the ICMP error must not end anything.
func TestDeadPeer(t *testing.T) {
	table, ear := listen(t, "127.0.0.1:0"), &recorder{}
	c := open(t, table, ear)
	device := dial(t, table)
	for seq := uint32(1); seq <= 3; seq++ {
		device.sendFrame(c, seq)
	}
	settle(t, table, 3)
	_ = device.conn.Close()
	for range 100 {
		_ = c.SendAudio(envelope.Frame{Opus: audioFrame(1)}) // the system decides whether it is refused
	}
	if s := table.Stats(); s.Sent.Load()+s.SendErrors.Load() != 100 {
		t.Errorf("%d sent, %d errors", s.Sent.Load(), s.SendErrors.Load())
	}
	other := open(t, table, ear)
	late := dial(t, table)
	for seq := uint32(4); seq <= 6; seq++ {
		late.sendFrame(other, seq)
	}
	settle(t, table, 6)
	if len(ear.frames) != 6 {
		t.Errorf("%d frames", len(ear.frames))
	}
}

func TestSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := newTable(slog.New(slog.DiscardHandler))
		table.tasks.Go(table.sweeper)
		mute, forged, withAudio, gone := &recorder{}, &recorder{}, &recorder{}, &recorder{}
		open(t, table, mute)
		bad, good, closed := open(t, table, forged), open(t, table, withAudio), open(t, table, gone)
		r := &reader{table: table}
		var c ctr
		var b [maxPacket]byte
		for seq := uint32(1); seq <= 7; seq++ {
			n := seal(&b, good.block, header{ssrc: good.ssrc, sequence: seq}, audioFrame(seq), &c)
			r.handle(b[:n], home, time.Now())
			n = seal(&b, bad.block, header{ssrc: bad.ssrc, sequence: seq}, []byte{0xff, 0xff}, &c)
			r.handle(b[:n], home, time.Now())
		}
		closed.Close()
		time.Sleep(10*time.Second - time.Millisecond) // what the documents say
		synctest.Wait()
		for _, e := range []*recorder{mute, forged} {
			if calls, _ := e.silentCalls(); calls != 0 {
				t.Error("reported too early")
			}
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, k := range []struct {
			name  string
			ear   *recorder
			calls int
			tried uint64
		}{{"mute", mute, 1, 0}, {"forged", forged, 1, 7}, {"withAudio", withAudio, 0, 0}, {"closed", gone, 0, 0}} {
			if calls, tried := k.ear.silentCalls(); calls != k.calls || tried != k.tried {
				t.Errorf("%s: %d calls, %d tried", k.name, calls, tried)
			}
		}
		table.stop()
		table.tasks.Wait()
	})
}

// A table that listens reports silent channels by itself.
func TestSilentOverSockets(t *testing.T) {
	table := listen(t, "127.0.0.1:0")
	mute := &recorder{}
	c := open(t, table, mute)
	c.mu.Lock()
	c.opened = time.Now().Add(-SilentAfter)
	c.mu.Unlock()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if calls, _ := mute.silentCalls(); calls == 1 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("silence is not reported")
		}
	}
}

// TestConcurrently opens, closes, sends and receives concurrently, and closes the table
// meanwhile.
func TestConcurrently(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	table, err := Listen("127.0.0.1:0", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	var tasks sync.WaitGroup
	for range 4 {
		device := dial(t, table)
		tasks.Go(func() {
			for i := uint32(0); ; i++ {
				p := params60
				p.Receiver = &recorder{}
				c, err := table.Open(p)
				if errors.Is(err, ErrClosed) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				for seq := uint32(1); seq <= 6; seq++ {
					_ = device.trySend(c, seq)                             // fails once the table is closed
					_ = c.SendAudio(envelope.Frame{Opus: audioFrame(seq)}) // the address may not be known yet
					c.Remote()
				}
				table.sweep(c, time.Now())
				if i%3 != 0 {
					c.Close()
				}
				if i == 300 {
					table.Close()
				}
			}
		})
	}
	tasks.Wait()
	table.Close()
	table.Close()
	if n := table.Stats().Channels.Load(); n != 0 {
		t.Errorf("%d channels are open after Close", n)
	}
	goleak.VerifyNone(t, ignore)
}

func TestListenRefuses(t *testing.T) {
	table := listen(t, "127.0.0.1:0")
	if _, err := Listen(table.Addr().String(), slog.New(slog.DiscardHandler)); err == nil {
		t.Error("it listens twice on the same port")
	}
}
