// Package opus reads the structure of an Opus packet (RFC 6716, section 3)
// without decoding it: its duration, and whether it is valid.
package opus

import "time"

// Limits of an Opus packet (section 3.4).
const (
	maxFrame    = 1275                   // bytes, R2
	MaxDuration = 120 * time.Millisecond // R5
)

// FrameDuration returns the length of one frame, given by the first byte of the packet
// (section 3.1, table 2).
func FrameDuration(toc byte) time.Duration {
	switch config := toc >> 3; {
	case config < 12: // SILK
		return [...]time.Duration{10, 20, 40, 60}[config&3] * time.Millisecond
	case config < 16: // hybrid
		return [...]time.Duration{10, 20}[config&1] * time.Millisecond
	default: // CELT
		return 2500 * time.Microsecond << (config & 3)
	}
}

// Inspect reads the structure of an Opus packet: the duration of all its
// frames and whether it is stereo. It reports false if the packet breaks one
// of the rules R1 to R7 of section 3.4.
func Inspect(p []byte) (duration time.Duration, stereo, ok bool) {
	if len(p) == 0 { // R1
		return 0, false, false
	}
	toc, rest := p[0], p[1:]
	frames := 1
	switch toc & 3 {
	case 0:
		ok = len(rest) <= maxFrame
	case 1: // two frames of equal length, R3
		frames = 2
		ok = len(rest)%2 == 0 && len(rest)/2 <= maxFrame
	case 2: // two frames, the first one's length is given, R4
		frames = 2
		n, used := frameLength(rest)
		last := len(rest) - used - n
		ok = used > 0 && last >= 0 && last <= maxFrame
	case 3:
		frames, ok = inspectMany(rest)
	}
	duration = time.Duration(frames) * FrameDuration(toc)
	return duration, toc&4 != 0, ok && duration <= MaxDuration
}

// inspectMany checks a packet of code 3 after its first byte: R5 to R7.
func inspectMany(p []byte) (frames int, ok bool) {
	if len(p) == 0 { // R6, R7: at least two bytes
		return 0, false
	}
	count := p[0]
	p = p[1:]
	frames = int(count & 0x3f)
	if frames == 0 {
		return 0, false
	}
	if count&0x40 != 0 { // padding: 255 stands for 254 and another length byte
		padding := 0
		for more := true; more; {
			if len(p) == 0 {
				return 0, false
			}
			n := int(p[0])
			p = p[1:]
			if more = n == 255; more {
				n = 254
			}
			padding += n
		}
		if padding > len(p) {
			return 0, false
		}
		p = p[:len(p)-padding]
	}
	if count&0x80 == 0 { // constant bit rate
		return frames, len(p)%frames == 0 && len(p)/frames <= maxFrame
	}
	total := 0
	for range frames - 1 {
		n, used := frameLength(p)
		if used == 0 {
			return 0, false
		}
		p = p[used:]
		total += n
	}
	last := len(p) - total
	return frames, last >= 0 && last <= maxFrame
}

// frameLength decodes a frame length of one or two bytes (section
// 3.2.1). used is 0 if p ends before it does.
func frameLength(p []byte) (n, used int) {
	switch {
	case len(p) >= 1 && p[0] < 252:
		return int(p[0]), 1
	case len(p) >= 2:
		return int(p[1])*4 + int(p[0]), 2
	}
	return 0, 0
}

// Pad makes a valid packet at least that many bytes long, at most 254 longer, by
// padding that decoders ignore: a packet of code 3 (section 3.2.5). It returns the
// packet itself if that is long enough.
func Pad(p []byte, size int) []byte {
	if len(p) >= size {
		return p
	}
	out := make([]byte, 0, size+2)
	switch code := p[0] & 3; {
	case code == 3 && p[1]&0x40 != 0: // padded already, and too short for a second byte of its length
		out = append(out, p...)
		out[2] += byte(size - len(p))
	case code == 3:
		out = append(out, p[0], p[1]|0x40, byte(max(0, size-len(p)-1)))
		out = append(out, p[2:]...)
	default:
		count := [...]byte{1, 2, 2 | 0x80}[code] // frames of equal length, or the first one's is given
		out = append(out, p[0]|3, count|0x40, byte(max(0, size-len(p)-2)))
		out = append(out, p[1:]...)
	}
	if padding := size - len(out); padding > 0 {
		out = append(out, make([]byte, padding)...)
	}
	return out
}
