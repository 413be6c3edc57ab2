package opus

import (
	"bytes"
	"testing"
	"time"
)

func TestFrameDuration(t *testing.T) {
	for i, want := range []float64{ // RFC 6716 table 2, ms
		10, 20, 40, 60, 10, 20, 40, 60, 10, 20, 40, 60, 10, 20, 10, 20,
		2.5, 5, 10, 20, 2.5, 5, 10, 20, 2.5, 5, 10, 20, 2.5, 5, 10, 20,
	} {
		if got := FrameDuration(byte(i << 3)); got != time.Duration(want*float64(time.Millisecond)) {
			t.Errorf("config %d: %v, want %v ms", i, got, want)
		}
	}
}

func TestInspect(t *testing.T) {
	pad := func(n int, head ...byte) []byte { return append(head, make([]byte, n)...) }
	const (
		ms60 = 11 << 3 // SILK 60 ms
		ms20 = 9 << 3  // SILK 20 ms
		ms2  = 16 << 3 // CELT 2.5 ms
	)
	for _, k := range []struct {
		name string
		p    []byte
		ms   float64 // 0: refused
	}{
		{"R1 nothing", nil, 0},
		{"DTX, first byte only", []byte{ms60}, 60},
		{"DTX of two bytes", []byte{ms60, 0}, 60},
		{"code 0", pad(50, ms60), 60},
		{"R2 longest frame", pad(1275, ms60), 60},
		{"R2 frame too long", pad(1276, ms60), 0},
		{"code 1 empty frames", []byte{ms60 | 1}, 120},
		{"code 1", pad(50, ms20|1), 40},
		{"R3 odd", pad(51, ms20|1), 0},
		{"R2 in code 1", pad(2552, ms20|1), 0},
		{"code 2 without length", []byte{ms20 | 2}, 0},
		{"code 2 empty frames", []byte{ms20 | 2, 0}, 40},
		{"code 2 second frame empty", pad(5, ms20|2, 5), 40},
		{"R4 first frame over the end", pad(4, ms20|2, 5), 0},
		{"code 2 two length bytes", pad(252, ms20|2, 252, 0), 40},
		{"code 2 two length bytes, longest", pad(1275+1275, ms20|2, 255, 255), 40},
		{"R2 in code 2", pad(1275+1276, ms20|2, 255, 255), 0},
		{"code 2 length cut off", []byte{ms20 | 2, 252}, 0},
		{"code 3 without count", []byte{ms20 | 3}, 0},
		{"R5 no frame", pad(10, ms20|3, 0), 0},
		{"code 3 constant", pad(30, ms20|3, 3), 60},
		{"code 3 constant, all empty", []byte{ms20 | 3, 3}, 60},
		{"R6 not a multiple", pad(31, ms20|3, 3), 0},
		{"R5 120 ms", pad(6, ms20|3, 6), 120},
		{"R5 over 120 ms", pad(7, ms20|3, 7), 0},
		{"R5 48 of 2.5 ms", pad(48, ms2|3, 48), 120},
		{"R5 49 of 2.5 ms", pad(49, ms2|3, 49), 0},
		{"R6 padding", pad(30+4, ms20|3, 0x43, 4), 60},
		{"R6 padding is all", pad(4, ms20|3, 0x43, 4), 60},
		{"R6 padding too long", pad(3, ms20|3, 0x43, 4), 0},
		{"R6 padding length missing", []byte{ms20 | 3, 0x43}, 0},
		{"R6 padding of 254+1", pad(255+30, ms20|3, 0x43, 255, 1), 60},
		{"R6 padding of 254+1, cut", pad(254, ms20|3, 0x43, 255, 1), 0},
		{"R6 padding length cut off", []byte{ms20 | 3, 0x43, 255}, 0},
		{"R2 in code 3 constant", pad(3*1276, ms20|3, 3), 0},
		{"code 3 variable", pad(1+2+9, ms20|3, 0x83, 1, 2), 60},
		{"code 3 variable, last empty", pad(3, ms20|3, 0x83, 1, 2), 60},
		{"R7 lengths over the end", pad(2, ms20|3, 0x83, 1, 2), 0},
		{"R7 lengths missing", []byte{ms20 | 3, 0x83, 1}, 0},
		{"R7 two-byte length cut off", []byte{ms20 | 3, 0x82, 252}, 0},
		{"R2 in code 3 variable", pad(1+1276, ms20|3, 0x82, 1), 0},
		{"code 3 variable with padding", pad(3+5+7, ms20|3, 0xc2, 7, 3), 40},
		{"R7 padding eats a frame", pad(9, ms20|3, 0xc2, 7, 3), 0},
		{"code 3 one frame", pad(20, ms60|3, 1), 60},
	} {
		d, stereo, ok := Inspect(k.p)
		if ok != (k.ms > 0) || ok && d != time.Duration(k.ms*float64(time.Millisecond)) || stereo {
			t.Errorf("%s: got %v, stereo %v, %v, want %v ms", k.name, d, stereo, ok, k.ms)
		}
	}
	if _, stereo, ok := Inspect([]byte{ms60 | 4}); !stereo || !ok {
		t.Error("stereo bit is not read")
	}
}

// FuzzInspect compares the reader of RFC 6716 with one that follows libopus.
func FuzzInspect(f *testing.F) {
	f.Add([]byte{11 << 3, 1, 2})
	f.Add([]byte{9<<3 | 3, 0xc2, 255, 1, 3, 0})
	f.Add([]byte{9<<3 | 2, 252, 0, 1, 2})
	f.Add(append([]byte{9<<3 | 2, 253, 0}, make([]byte, 252)...)) // a byte less than the first frame has
	f.Add([]byte{16<<3 | 7, 48})
	f.Add([]byte{9<<3 | 3, 0x43, 255, 0, 1, 2, 3})
	f.Add(append([]byte{11 << 3}, make([]byte, 1276)...))
	f.Fuzz(func(t *testing.T, p []byte) {
		duration, stereo, ok := Inspect(p)
		samples, valid := parseLibopus(p)
		if want := time.Duration(samples) * time.Second / 48000; ok != valid || ok && (duration != want || stereo != (p[0]&4 != 0)) {
			t.Fatalf("%x: %v, %t; libopus finds %v, %t", p, duration, ok, want, valid)
		}
	})
}

// parseLibopus is opus_packet_parse_impl of libopus (src/opus.c) with
// opus_packet_get_samples_per_frame, step by step: the samples at 48 kHz of all
// frames, or false for OPUS_INVALID_PACKET.
func parseLibopus(data []byte) (samples int, ok bool) {
	if len(data) == 0 {
		return 0, false
	}
	toc := data[0]
	var size int
	switch {
	case toc&0x80 != 0:
		size = (48000 << (toc >> 3 & 3)) / 400
	case toc&0x60 == 0x60:
		if size = 48000 / 100; toc&0x08 != 0 {
			size = 48000 / 50
		}
	case toc>>3&3 == 3:
		size = 48000 * 60 / 1000
	default:
		size = (48000 << (toc >> 3 & 3)) / 100
	}
	data = data[1:]
	length, last := len(data), len(data)
	parseSize := func() (n, bytes int) {
		switch {
		case length < 1:
			return -1, -1
		case data[0] < 252:
			return int(data[0]), 1
		case length < 2:
			return -1, -1
		}
		return 4*int(data[1]) + int(data[0]), 2
	}
	count := 1
	switch toc & 3 {
	case 1:
		count = 2
		if length&1 != 0 {
			return 0, false
		}
		last = length / 2
	case 2:
		count = 2
		n, bytes := parseSize()
		length -= bytes
		if n < 0 || n > length {
			return 0, false
		}
		last = length - n
	case 3:
		if length < 1 {
			return 0, false
		}
		ch := data[0]
		data = data[1:]
		if count = int(ch & 0x3f); count <= 0 || size*count > 5760 {
			return 0, false
		}
		length--
		if ch&0x40 != 0 {
			for more := true; more; {
				if length <= 0 {
					return 0, false
				}
				p := int(data[0])
				data = data[1:]
				length--
				if more = p == 255; more {
					p = 254
				}
				length -= p
			}
		}
		if length < 0 {
			return 0, false
		}
		if ch&0x80 != 0 {
			last = length
			for range count - 1 {
				n, bytes := parseSize()
				length -= bytes
				if n < 0 || n > length {
					return 0, false
				}
				data = data[bytes:]
				last -= bytes + n
			}
			if last < 0 {
				return 0, false
			}
		} else if last = length / count; last*count != length {
			return 0, false
		}
	}
	return size * count, last <= 1275
}

func TestPad(t *testing.T) {
	for _, p := range [][]byte{{0xb8}, {0xb8, 1}, {0xb8, 1, 2, 3, 4, 5, 6}, {0xb9}, {0xb9, 1, 2}, {0xba, 0}, {0xba, 1, 7, 8, 9}, {0xba, 1, 7, 8, 9, 1, 2},
		{0xbb, 3}, {0xbb, 3, 1, 2, 3}, {0xbb, 1, 1, 2, 3, 4, 5}, {0xbb, 0x82, 1, 1, 2}, {0xbb, 0x41, 0}, {0xbb, 0x41, 2, 5, 0, 0}, {0xbb, 0xc2, 1, 1, 7, 8, 0}} {
		want, stereo, ok := Inspect(p)
		if !ok {
			t.Fatalf("%x is not valid", p)
		}
		for size := range 20 {
			got := Pad(p, size)
			duration, isStereo, ok := Inspect(got)
			if !ok || duration != want || isStereo != stereo || len(got) < size || len(got) > max(size, len(p))+2 {
				t.Errorf("%x padded to %d is %x", p, size, got)
			}
			if padding := int(got[min(2, len(got)-1)]); len(p) < size && !bytes.Equal(bytes.TrimRight(got[:len(got)-padding], "\x00"), bytes.TrimRight(got, "\x00")) {
				t.Errorf("%x padded to %d is %x: padding of %d bytes", p, size, got, padding)
			}
		}
	}
}
