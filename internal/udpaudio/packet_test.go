package udpaudio

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"strings"
	"sync"
	"testing"

	"fleetd/internal/opus"
)

func newBlock(t testing.TB, key []byte) cipher.Block {
	t.Helper()
	block, err := aes.NewCipher(key)
	if err != nil {
		t.Fatal(err)
	}
	return block
}

func TestVectors(t *testing.T) {
	var v struct {
		Key     string `json:"server_hello_key_hex"`
		Packets []struct {
			Dir                 string
			Timestamp, Sequence uint32
			Plaintext           string `json:"plaintext_hex"`
			Header              string `json:"header_is_iv_hex"`
			Packet              string `json:"packet_hex"`
		}
	}
	vector(t, "udp_audio", &v)
	block := newBlock(t, unhex(t, v.Key))
	var c ctr
	for i, p := range v.Packets {
		packet, plain := unhex(t, p.Packet), unhex(t, p.Plaintext)
		want := header{ssrc: 0xc0ffee01, timestamp: p.Timestamp, sequence: p.Sequence}
		if p.Dir == "server->device" {
			want.flags, want.ssrc = flagDownlink, want.ssrc|ssrcDownlink
		}
		var sealed [maxPacket]byte
		if n := seal(&sealed, block, want, plain, &c); !bytes.Equal(sealed[:n], packet) {
			t.Errorf("packet %d: sealed to %x, want %x", i, sealed[:n], packet)
		}
		if !bytes.Equal(sealed[:HeaderSize], unhex(t, p.Header)) {
			t.Errorf("packet %d: header %x, want %s", i, sealed[:HeaderSize], p.Header)
		}
		got, verdict := parse(packet)
		if verdict != Accepted || got != want {
			t.Errorf("packet %d: parsed to %+v, %v, want %+v", i, got, verdict, want)
		}
		c.xor(block, (*[HeaderSize]byte)(packet), packet[HeaderSize:])
		if !bytes.Equal(packet[HeaderSize:], plain) {
			t.Errorf("packet %d: opened to %x, want %x", i, packet[HeaderSize:], plain)
		}
	}
}

// TestMalformedVectors receives the invalid packets of the vectors, as uplink.
func TestMalformedVectors(t *testing.T) {
	var v struct {
		Cases []struct {
			Packet string `json:"packet_hex"`
			Reason string `json:"reject_reason"`
		}
	}
	vector(t, "udp_audio_malformed", &v)
	want := map[string]Verdict{ // by the beginning of the reason
		"15 bytes": Short, "empty": Short, "type byte": BadType, "payload_len": BadLength, "trailing": BadLength,
		"sequence 0": Old, "exact duplicate": BadFlags, "header only": Empty,
		"VALID for HEAD": Implausible, // its Opus is not valid
		"NOT detectable": BadFlags,    // a downlink packet, which devices do not send
	}
	for _, k := range v.Cases {
		w := newWorld(t, params60)
		got := w.feed(home, unhex(t, k.Packet))
		for prefix, verdict := range want {
			if strings.HasPrefix(k.Reason, prefix) && got != verdict {
				t.Errorf("%s: got %v, want %v", k.Reason, got, verdict)
			}
		}
		if got == Accepted {
			t.Errorf("%s: accepted", k.Reason)
		}
	}
}

func TestCTRMatchesStandardLibrary(t *testing.T) {
	block := newBlock(t, []byte("key must be 16 b"))
	var c ctr
	iv := [HeaderSize]byte{8: 255, 9: 255, 10: 255, 11: 255, 12: 255, 13: 255, 14: 255, 15: 250} // carries into the high half
	for n := range 600 {
		got := make([]byte, n)
		_, _ = rand.Read(got) // never fails
		want := bytes.Clone(got)
		c.xor(block, &iv, got)
		cipher.NewCTR(block, iv[:]).XORKeyStream(want, want)
		if !bytes.Equal(got, want) {
			t.Fatalf("%d bytes differ", n)
		}
	}
}

func TestOverlapVector(t *testing.T) {
	var v struct {
		Key  string `json:"key_hex"`
		Seq1 string `json:"zeros_seq1_ts0_hex"`
		Seq2 string `json:"zeros_seq2_ts0_hex"`
	}
	vector(t, "udp_keystream_overlap", &v)
	block := newBlock(t, unhex(t, v.Key))
	var c ctr
	stream := func(want string, h header) []byte {
		var b [maxPacket]byte
		n := seal(&b, block, h, make([]byte, len(want)/2), &c)
		return b[HeaderSize:n]
	}
	// The vector does not contain ssrc; the fact that it shows holds for any.
	one := stream(v.Seq1, header{ssrc: 1, sequence: 1})
	two := stream(v.Seq2, header{ssrc: 1, sequence: 2})
	if !bytes.Equal(one[16:], two[:len(two)-16]) {
		t.Fatal("equal timestamps no longer overlap: the test below proves nothing")
	}
	two = stream(v.Seq2, header{ssrc: 1, timestamp: 1, sequence: 2})
	if bytes.Equal(one[16:32], two[:16]) {
		t.Error("an advanced timestamp does not separate the streams")
	}
}

// TestDownlinkBlocksNeverMeet encrypts under hostile timestamps and compares all counter
// blocks, including those of an uplink with equal numbers.
func TestDownlinkBlocksNeverMeet(t *testing.T) {
	c := &Channel{ssrc: 0x40ffee01}
	type counter struct{ hi, lo uint64 }
	used := map[counter]uint32{}
	claim := func(h header, bytes int) {
		hi := uint64(packetType)<<56 | uint64(h.flags)<<48 | uint64(bytes)<<32 | uint64(h.ssrc)
		lo := uint64(h.timestamp)<<32 | uint64(h.sequence)
		for i := range uint64(bytes+15) / 16 {
			// security: D14
			if before, ok := used[counter{hi, lo + i}]; ok {
				t.Fatalf("packets %d and %d share a counter block", before, h.sequence)
			}
			used[counter{hi, lo + i}] = h.sequence
		}
	}
	stamps := []uint32{0, 0, 0, 60, 120, 120, 60, 0xffffffff, 0xffffffff, 0, 0x7fffffff, 0xffffffff, 5, 1 << 20, 3_600_000, 7_200_000}
	for i := range 5_000 {
		h, err := c.next(stamps[i%len(stamps)] * uint32(1+i/len(stamps)%7))
		if err != nil {
			t.Fatal(err)
		}
		if h.sequence != uint32(i+1) || h.ssrc != 0x41ffee01 || h.flags != 0x80 {
			t.Fatalf("header %d is %+v", i, h)
		}
		claim(h, MaxPayload)
		h.flags, h.ssrc = 0, c.ssrc // what the device may send
		claim(h, MaxPayload)
	}
}

// Concurrent senders get different sequence numbers.
func TestNextConcurrently(t *testing.T) {
	c := &Channel{}
	const senders, each = 4, 500
	var all sync.WaitGroup
	numbers := make(chan uint32, senders*each)
	for range senders {
		all.Go(func() {
			for range each {
				h, err := c.next(0)
				if err != nil {
					t.Error(err)
				}
				numbers <- h.sequence
			}
		})
	}
	all.Wait()
	close(numbers)
	seen := map[uint32]bool{}
	for n := range numbers {
		seen[n] = true
	}
	if len(seen) != senders*each {
		t.Errorf("%d packets have %d numbers", senders*each, len(seen))
	}
}

func TestDownlinkTimestamps(t *testing.T) {
	c := &Channel{}
	for i, k := range []struct{ in, want uint32 }{
		{4_000_000_000, 4_000_000_000}, // any start
		{4_000_000_060, 4_000_000_060},
		{4_000_000_060, 4_000_000_061},
		{0, 4_000_000_062},
		{4_000_000_120, 4_000_000_120},
		{4_000_000_120 + maxTimestampStep + 1, 4_000_000_121},
		{4_000_000_121 + maxTimestampStep, 4_000_000_121 + maxTimestampStep},
	} {
		if h, err := c.next(k.in); err != nil || h.timestamp != k.want {
			t.Errorf("%d: %d became %d, %v, want %d", i, k.in, h.timestamp, err, k.want)
		}
	}
	c.travel = maxTimestampTravel - 10
	last := c.timestamp
	if h, _ := c.next(last + 11); h.timestamp != last+1 {
		t.Errorf("timestamp advanced by %d beyond what may be used", h.timestamp-last)
	}
	c.sequence = maxSequence - 1
	if _, err := c.next(0); err != nil {
		t.Error(err)
	}
	for range 2 {
		if _, err := c.next(0); err != ErrExhausted {
			t.Errorf("got %v, want ErrExhausted", err)
		}
	}
}

func FuzzOpen(f *testing.F) {
	block := newBlock(f, []byte("key must be 16 b"))
	var c ctr
	var b [maxPacket]byte
	n := seal(&b, block, header{ssrc: 0xc0ffee01, sequence: 1}, audioFrame(1), &c)
	f.Add(b[:n])
	f.Add(b[:HeaderSize])
	f.Add([]byte{})
	f.Add([]byte{1, 0, 0, 1, 0xc0, 0xff, 0xee, 1, 0, 0, 0, 0, 255, 255, 255, 255, 0})
	f.Fuzz(func(t *testing.T, p []byte) {
		h, verdict := parse(p)
		if verdict != Accepted {
			return
		}
		if len(p) != HeaderSize+int(binary.BigEndian.Uint16(p[2:])) || len(p) > maxPacket || len(p) == HeaderSize {
			t.Fatalf("accepted %d bytes", len(p))
		}
		opened := bytes.Clone(p)
		c.xor(block, (*[HeaderSize]byte)(opened), opened[HeaderSize:])
		if n := seal(&b, block, h, opened[HeaderSize:], &c); !bytes.Equal(b[:n], p) {
			t.Fatalf("%x seals back to %x", p, b[:n])
		}
		opus.Inspect(opened[HeaderSize:])
		w := newWorld(t, Params{})
		w.feed(home, p)
		w.feed(home, bytes.Clone(opened))
	})
}
