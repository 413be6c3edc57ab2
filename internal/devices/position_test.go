package devices

import "testing"

func TestEventPosition(t *testing.T) {
	for _, tc := range []struct {
		text string
		want EventPosition
		back string
	}{
		{"1042.77", EventPosition{1042, 77}, "1042.77"},
		{"1042", EventPosition{1042, 0}, "1042"}, // of a client of a version with one stream
		{"0.77", EventPosition{0, 77}, "0.77"},
		{"1042.77.5", EventPosition{1042, 77, 5}, "1042.77.5"},
		{"0.0.5", EventPosition{0, 0, 5}, "0.0.5"},
		{"0", EventPosition{}, ""},
		{"1042.0", EventPosition{1042, 0}, "1042"},
		{"18446744073709551615.1", EventPosition{1<<64 - 1, 1}, "18446744073709551615.1"},
	} {
		if got, err := ParseEventPosition(tc.text); err != nil || got != tc.want || got.String() != tc.back {
			t.Errorf("%q: %v, %v, written as %q", tc.text, got, err, got)
		}
	}
	for _, text := range []string{"", ".", "1.", ".1", "1.2.3.4", "-1", "+1", "x", "1 ", "18446744073709551616", "1_0"} {
		if got, err := ParseEventPosition(text); err == nil {
			t.Errorf("%q was parsed as %v", text, got)
		}
	}
}
