package selector

import (
	"cmp"
	"math"
	"strings"
)

// Versions are compared as the firmware does (main/ota.cc:394-419): the text is
// split at dots, each part goes through std::stoi, which reads leading white
// space, a sign and digits and ignores the rest, and the first part that
// differs decides; if none does, the version with more parts is newer. A part
// without a number, or with one that does not fit 32 bits, makes the firmware
// abort: it cannot read that version. A dot at the end begins no part.

// keyDigits is the width of a part in a key: 4294967295.
const keyDigits = 10

// VersionKey returns a text that sorts among those of other versions, compared
// byte by byte, as the firmware sorts the versions: ten decimal digits for each
// part, with an offset of 2^31, so that negative numbers come first. Digits
// alone sort the same under every collation. It is false for the empty version,
// and for one that the firmware cannot read.
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

// CompareVersions returns -1, 0 or +1 if a is older than b, equal to it or
// newer, in the order of the firmware. It is false if one of them is empty, or
// the firmware cannot read it.
func CompareVersions(a, b string) (order int, ok bool) {
	if a == "" || b == "" {
		return 0, false
	}
	for a != "" || b != "" { // to the end of both: what follows may be unreadable
		m, n := int64(math.MinInt64), int64(math.MinInt64) // no part is less than any
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

// versionPart reads the first part of a version that is not empty, and returns
// what follows its dot.
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
