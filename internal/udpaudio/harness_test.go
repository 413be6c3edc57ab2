package udpaudio

import (
	"bytes"
	"crypto/aes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"fleetd/internal/envelope"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func vector(t *testing.T, name string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "testdata", "vectors", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var (
	params60 = Params{FrameDuration: 60 * time.Millisecond, Channels: 1}
	home     = netip.MustParseAddrPort("192.0.2.1:4000")
	away     = netip.MustParseAddrPort("192.0.2.1:5000")
)

// marker is the beginning of genuine test frames, after the TOC.
var marker = []byte("genuine!")

// audioFrame returns frame number n, a mono packet of 60 ms of 90 bytes.
func audioFrame(n uint32) []byte {
	p := make([]byte, 90)
	p[0] = 11 << 3 // SILK, wideband, 60 ms, code 0
	copy(p[1:], marker)
	binary.BigEndian.PutUint32(p[9:], n)
	return p
}

// recorder collects the frames and calls of a channel.
type recorder struct {
	mu     sync.Mutex
	frames []uint32 // genuine, by number
	noise  int
	silent int
	tried  uint64
}

func (e *recorder) HandleAudio(f envelope.Frame) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(f.Opus) >= 13 && bytes.Equal(f.Opus[1:9], marker) {
		e.frames = append(e.frames, binary.BigEndian.Uint32(f.Opus[9:]))
		return
	}
	e.noise++
}

func (e *recorder) ReportNoAudio(tried uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.silent++
	e.tried = tried
}

// silentCalls returns the calls of ReportNoAudio.
func (e *recorder) silentCalls() (calls int, tried uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.silent, e.tried
}

// world is one channel without a socket, its device, and a clock.
type world struct {
	t        *testing.T
	table    *Table
	c        *Channel
	recorder *recorder
	reader   *reader
	ctr      ctr
	now      time.Time
	rng      *rand.Rand
	fed      uint64
}

func newWorld(t *testing.T, p Params) *world {
	w := &world{t: t, table: newTable(slog.New(slog.DiscardHandler)), recorder: &recorder{}, rng: rand.New(rand.NewPCG(1, 2))}
	p.Receiver = w.recorder
	c, err := w.table.Open(p)
	if err != nil {
		t.Fatal(err)
	}
	c.key = [16]byte([]byte("key must be 16 b")) // the same plaintexts of forgeries in every run
	if c.block, err = aes.NewCipher(c.key[:]); err != nil {
		t.Fatal(err)
	}
	w.table.remove(c)
	c.ssrc = 0xc0ffee01
	w.table.stats.Channels.Add(1)
	if _, err := w.table.add(c); err != nil {
		t.Fatal(err)
	}
	w.c, w.reader, w.now = c, &reader{table: w.table}, c.opened
	return w
}

// uplink builds a genuine packet.
func (w *world) uplink(seq uint32, opus []byte) []byte {
	var b [maxPacket]byte
	n := seal(&b, w.c.block, header{ssrc: w.c.ssrc, sequence: seq}, opus, &w.ctr)
	return b[:n]
}

// sendFrame sends genuine frame number seq with that sequence number.
func (w *world) sendFrame(from netip.AddrPort, seq uint32) Verdict {
	return w.feed(from, w.uplink(seq, audioFrame(seq)))
}

func (w *world) feed(from netip.AddrPort, b []byte) Verdict {
	var before [Verdicts]uint64
	for v := range Verdicts {
		before[v] = w.table.stats.Packets(v)
	}
	w.fed++
	w.reader.handle(b, from, w.now)
	for v := range Verdicts {
		if w.table.stats.Packets(v) != before[v] {
			return v
		}
	}
	w.t.Fatal("packet was not counted")
	return Verdicts
}

// forge sends random bytes with the channel's ssrc.
func (w *world) forge(from netip.AddrPort, seq uint32) {
	var b [HeaderSize + 90]byte
	forgery(b[:], w.c.ssrc, seq, w.rng)
	w.fed++
	w.reader.handle(b[:], from, w.now)
}

func forgery(b []byte, ssrc, seq uint32, rng *rand.Rand) {
	b[0], b[1] = packetType, 0
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)-HeaderSize))
	binary.BigEndian.PutUint32(b[4:], ssrc)
	binary.BigEndian.PutUint32(b[8:], 0)
	binary.BigEndian.PutUint32(b[12:], seq)
	for i := HeaderSize; i < len(b); i++ {
		b[i] = byte(rng.Uint32())
	}
}

func (w *world) wait(d time.Duration) { w.now = w.now.Add(d) }

// wantFrames checks that exactly the frames first..last were delivered, in order.
func (w *world) wantFrames(first, last uint32) {
	w.t.Helper()
	wantInOrder(w.t, w.recorder.frames)
	if n := len(w.recorder.frames); n != int(last-first+1) || w.recorder.frames[0] != first || w.recorder.frames[n-1] != last {
		w.t.Errorf("got %d frames %v, want %d to %d", n, w.recorder.frames, first, last)
	}
}

func wantInOrder(t *testing.T, frames []uint32) {
	t.Helper()
	for i := 1; i < len(frames); i++ {
		if frames[i] <= frames[i-1] {
			t.Fatalf("frame %d was delivered after %d", frames[i], frames[i-1])
		}
	}
}

// wantCounted checks that every packet got one verdict, and that every held frame was
// released, discarded or is still held.
func (w *world) wantCounted() {
	w.t.Helper()
	var sum uint64
	for v := range Verdicts {
		sum += w.table.stats.Packets(v)
	}
	if sum != w.fed {
		w.t.Errorf("%d verdicts for %d packets", sum, w.fed)
	}
	s, held := w.table.Stats(), uint64(0)
	for _, cl := range w.c.claims {
		held += uint64(len(cl.frames))
	}
	if s.Packets(Held)+s.Packets(Jump) != s.Released.Load()+s.Discarded.Load()+held {
		w.t.Errorf("%d frames are held; %s", held, w.story())
	}
}

func (w *world) story() string { return story(w.table.Stats()) }

func story(s *Stats) string {
	counts := map[string]uint64{
		"released": s.Released.Load(), "discarded": s.Discarded.Load(), "moves": s.Moves.Load(),
	}
	for v := range Verdicts {
		counts[v.String()] = s.Packets(v)
	}
	text, _ := json.Marshal(counts)
	return string(text)
}
