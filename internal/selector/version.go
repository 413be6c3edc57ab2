package selector

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Versions are compared as in the firmware (main/ota.cc:394-419): the text is split at dots; std::stoi parses each
// part: it accepts leading white space, a sign and digits, and ignores the rest; the first different part decides;
// if there is none, the version with more parts is newer. A part without a number, or with one that does not fit
// 32 bits, makes the firmware abort: it cannot parse that version. No part follows a dot at the end.

// VersionKey returns text that sorts byte by byte like versions in the firmware: ten decimal digits for each part,
// with an offset of 2^31, so that negative numbers come first. Digits sort alike under every collation. ok is false
// for the empty version, and for one that the firmware cannot parse.
func VersionKey(version string) (key string, ok bool) {
	if version == "" {
		return "", false
	}
	var b []byte
	var room [8]int
	parts, ok := AppendVersion(room[:0], version)
	for _, n := range parts {
		b = fmt.Appendf(b, "%010d", int64(n)-math.MinInt32)
	}
	if !ok {
		return "", false
	}
	return string(b), true
}

// CompareVersions returns -1, 0 or +1 if a is older than, equal to or newer than b, in the order of the firmware. ok
// is false if one of them is empty, or the firmware cannot parse it.
func CompareVersions(a, b string) (order int, ok bool) {
	var room [2][8]int
	m, okA := AppendVersion(room[0][:0], a)
	n, okB := AppendVersion(room[1][:0], b)
	if !okA || !okB || a == "" || b == "" {
		return 0, false
	}
	return slices.Compare(m, n), true
}

// AppendVersion appends the parts of a version. ok is false if the firmware cannot parse it; the empty version has no parts.
func AppendVersion(parts []int, version string) (all []int, ok bool) {
	for version != "" {
		var n int64 // of 32 bits: an int holds it on every machine
		if n, version, ok = versionPart(version); !ok {
			return nil, false
		}
		parts = append(parts, int(n))
	}
	return parts, true
}

// versionPart parses the first part of a version that is not empty, and returns the text after its dot.
func versionPart(version string) (n int64, rest string, ok bool) {
	part, rest, _ := strings.Cut(version, ".")
	part = strings.TrimLeft(part, " \t\n\v\f\r")
	negative := false
	if part != "" && (part[0] == '+' || part[0] == '-') {
		negative = part[0] == '-'
		part = part[1:]
	}
	if part == "" || part[0] < '0' || part[0] > '9' {
		return 0, rest, false
	}
	for _, c := range []byte(part) {
		if c < '0' || c > '9' {
			break
		}
		if n = n*10 + int64(c-'0'); n > math.MaxInt32+1 {
			return 0, rest, false
		}
	}
	if negative {
		n = -n
	}
	return n, rest, n <= math.MaxInt32
}
