package selector

import (
	"cmp"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A port of main/ota.cc:394-419, statement by statement, against which the
// functions of this package are compared.

var errAbort = errors.New("the device aborts")

// stoi is std::stoi on a chip with 32-bit long: strtol, then the checks.
func stoi(s string) (int32, error) {
	i := 0
	for i < len(s) && strings.IndexByte(" \t\n\v\f\r", s[i]) >= 0 {
		i++
	}
	start := i
	if i < len(s) && (s[i] == '+' || s[i] == '-') {
		i++
	}
	digits := i
	for i < len(s) && s[i] >= '0' && s[i] <= '9' {
		i++
	}
	if i == digits {
		return 0, errAbort // std::invalid_argument
	}
	n, err := strconv.ParseInt(s[start:i], 10, 32)
	if err != nil {
		return 0, errAbort // std::out_of_range
	}
	return int32(n), nil
}

// getline is std::getline(stream, segment, '.'): false at the end of the stream.
func getline(stream *string, segment *string) bool {
	if *stream == "" {
		return false
	}
	*segment, *stream, _ = strings.Cut(*stream, ".")
	return true
}

func parseVersion(version string) (numbers []int32, err error) {
	for segment := ""; getline(&version, &segment); {
		n, err := stoi(segment)
		if err != nil {
			return nil, err
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

func isNewVersionAvailable(currentVersion, newVersion string) (bool, error) {
	current, err := parseVersion(currentVersion)
	if err != nil {
		return false, err
	}
	newer, err := parseVersion(newVersion)
	if err != nil {
		return false, err
	}
	for i := 0; i < min(len(current), len(newer)); i++ {
		if newer[i] > current[i] {
			return true, nil
		} else if newer[i] < current[i] {
			return false, nil
		}
	}
	return len(newer) > len(current), nil
}

// The cases of docs on the firmware: what it reads, and what it aborts at.
func TestVersionOrder(t *testing.T) {
	ascending := []string{"-2147483648", "-1", "0", "0.0", "1.9.4", "2", "2.0.3", "2.2.6", "2.4", "2.4.2", "2.4.2.1", "2.5.0-rc1", "2.10", "2.10.0", "3", "2147483647"}
	for i, a := range ascending {
		for j, b := range ascending {
			if order, ok := CompareVersions(a, b); !ok || order != cmp.Compare(i, j) {
				t.Errorf("%q and %q: %d, %v", a, b, order, ok)
			}
			ka, oka := VersionKey(a)
			kb, okb := VersionKey(b)
			if !oka || !okb || strings.Compare(ka, kb) != cmp.Compare(i, j) {
				t.Errorf("keys of %q and %q: %s, %s", a, b, ka, kb)
			}
			if newer, err := isNewVersionAvailable(a, b); err != nil || newer != (j > i) {
				t.Errorf("the port on %q and %q: %v, %v", a, b, newer, err)
			}
		}
	}
	for _, same := range [][2]string{{"2.4.2", "2.4.2"}, {"2.5.0-rc1", "2.5.0"}, {"2.4", "2.4."}, {" 2.+4", "2.4"}, {"02.4", "2.004"}, {"2.4.2-3-gabc", "2.4.2"}, {"-0", "0"}, {"2_4", "2"}} {
		ka, _ := VersionKey(same[0])
		kb, _ := VersionKey(same[1])
		if order, ok := CompareVersions(same[0], same[1]); !ok || order != 0 || ka != kb {
			t.Errorf("%q: %d, %v, %s, %s", same, order, ok, ka, kb)
		}
	}
	for _, unreadable := range []string{"", "v2.5.0", "2..1", "latest", ".", ".2", "2.x", "2147483648", "-2147483649", "2.99999999999999999999999", "2. ", "2.-", "+-2", "v2.4.2-3-gabc", "\u00a02"} {
		if key, ok := VersionKey(unreadable); ok || key != "" {
			t.Errorf("%q has the key %s", unreadable, key)
		}
		for _, readable := range []string{"2", "0.0.0.0.0", "9"} {
			if order, ok := CompareVersions(unreadable, readable); ok || order != 0 {
				t.Errorf("%q and %q: %d", unreadable, readable, order)
			}
			if order, ok := CompareVersions(readable, unreadable); ok || order != 0 {
				t.Errorf("%q and %q: %d", readable, unreadable, order)
			}
		}
	}
}

// A version that the firmware cannot read matches no comparison, whatever it is
// compared with.
func TestUnreadableVersionsMatchNothing(t *testing.T) {
	for _, firmware := range []string{"v2.5", "2..1", "2.x", ""} {
		for _, text := range []string{"firmware<3", "firmware<=3", "firmware>1", "firmware>=1", "firmware<-5", "firmware>-5"} {
			if parse(t, text).Match(&Device{ID: "d", Firmware: firmware}, now) {
				t.Errorf("%s selects %q", text, firmware)
			}
		}
	}
}

func randomVersion(r *rand.Rand) string {
	parts := []string{"0", "1", "2", "2", "10", "9", "02", "-1", "+2", " 2", "2-rc1", "2147483647", "-2147483648"}
	rare := []string{"", "x", "v2", "2147483648", "-", "99999999999", "-2147483649", "\v3", "2\x00"}
	var version []string
	for range r.IntN(5) {
		if r.IntN(20) == 0 {
			version = append(version, rare[r.IntN(len(rare))])
		} else {
			version = append(version, parts[r.IntN(len(parts))])
		}
	}
	return strings.Join(version, ".")
}

// agree fails unless this package orders two versions as the firmware does.
func agree(t *testing.T, a, b string) {
	t.Helper()
	newer, err := isNewVersionAvailable(a, b)
	older, _ := isNewVersionAvailable(b, a)
	readable := err == nil && a != "" && b != ""
	ka, oka := VersionKey(a)
	kb, okb := VersionKey(b)
	order, ok := CompareVersions(a, b)
	if ok != readable || (oka && okb) != readable {
		t.Fatalf("%q and %q: readable %v, compared %v, keys %v, %v", a, b, readable, ok, oka, okb)
	}
	if !ok {
		return
	}
	if (order < 0) != newer || (order > 0) != older || strings.Compare(ka, kb) != order {
		t.Fatalf("%q and %q: newer %v, older %v, order %d, keys %s and %s", a, b, newer, older, order, ka, kb)
	}
}

func TestVersionsAgreeWithTheFirmware(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 100_000 {
		agree(t, randomVersion(r), randomVersion(r))
	}
}

func FuzzVersion(f *testing.F) {
	f.Add("2.4.2", "2.10")
	f.Add("2.5.0-rc1", "v2")
	f.Add("2.", "-2147483648."+strconv.Itoa(math.MaxInt32))
	f.Fuzz(agree)
}

func TestCompareVersionsDoesNotAllocate(t *testing.T) {
	if n := testing.AllocsPerRun(100, func() { CompareVersions("2.4.2-rc1", "2.4.10") }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestGlobs(t *testing.T) {
	// All texts of a small alphabet against all globs of it, with a second
	// implementation that tries every way.
	var match func(glob, text string) bool
	match = func(glob, text string) bool {
		switch {
		case glob == "":
			return text == ""
		case glob[0] == '*':
			return match(glob[1:], text) || text != "" && match(glob, text[1:])
		}
		return text != "" && text[0] == glob[0] && match(glob[1:], text[1:])
	}
	words := func(alphabet string, longest int) []string {
		all := []string{""}
		for from := 0; longest > 0; longest-- {
			to := len(all)
			for _, word := range all[from:to] {
				for _, c := range alphabet {
					all = append(all, word+string(c))
				}
			}
			from = to
		}
		return all
	}
	for _, glob := range words("ab*", 5) {
		v := newValue(strings.Split(glob, "*"))
		if (v.Parts == nil) == strings.Contains(glob, "*") || slices.Contains(v.Parts[min(1, len(v.Parts)):max(1, len(v.Parts))-1], "") {
			t.Fatalf("%q has the parts %q", glob, v.Parts)
		}
		for _, text := range words("ab", 6) {
			if got := v.Match(text); got != match(glob, text) {
				t.Fatalf("%q on %q: %v", glob, text, got)
			}
		}
	}
}
