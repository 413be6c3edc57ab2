package selector

import (
	"cmp"
	"math"
	"strings"
)

// Versions are compared as in the firmware (main/ota.cc:394-419): the text is split at dots; std::stoi parses each
// part: it accepts leading white space, a sign and digits, and ignores the rest; the first different part decides;
// if there is none, the version with more parts is newer. A part without a number, or with one that does not fit
// 32 bits, makes the firmware abort: it cannot parse that version. No part follows a dot at the end.

// keyDigits is the width of a part in a key: 4294967295.
const keyDigits = 10

// VersionKey returns text that sorts byte by byte like versions in the firmware: ten decimal digits for each part,
// with an offset of 2^31, so that negative numbers come first. Digits sort alike under every collation. ok is false
// for the empty version, and for one that the firmware cannot parse.
func VersionKey(version string) (key string, ok bool) {
	if version == "" {
		return "", false
	}
	b := make([]byte, 0, keyDigits*(1+strings.Count(version, ".")))
	for version != "" {
		var n int64
		if n, version, ok = versionPart(version); !ok {
			return "", false
		}
		n -= math.MinInt32
		var digits [keyDigits]byte
		for i := keyDigits - 1; i >= 0; i-- {
			digits[i] = '0' + byte(n%10)
			n /= 10
		}
		b = append(b, digits[:]...)
	}
	return string(b), true
}

// CompareVersions returns -1, 0 or +1 if a is older than, equal to or newer than b, in the order of the firmware. ok
// is false if one of them is empty, or the firmware cannot parse it.
func CompareVersions(a, b string) (order int, ok bool) {
	if a == "" || b == "" {
		return 0, false
	}
	for a != "" || b != "" { // to the end of both: the rest may be invalid
		m, n := int64(math.MinInt64), int64(math.MinInt64) // less than any part
		if a != "" {
			if m, a, ok = versionPart(a); !ok {
				return 0, false
			}
		}
		if b != "" {
			if n, b, ok = versionPart(b); !ok {
				return 0, false
			}
		}
		if order == 0 {
			order = cmp.Compare(m, n)
		}
	}
	return order, true
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
