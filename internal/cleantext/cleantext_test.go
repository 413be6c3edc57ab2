package cleantext_test

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"fleetd/internal/cleantext"
)

func TestShort(t *testing.T) {
	for text, want := range map[string]string{
		"Sets the volume.":                    "Sets the volume.",
		"  two\n\nlines\t and  blanks ":       "two lines and blanks",
		"right\u202eto\u202cleft":             "righttoleft",
		"zero\u200bwidth\u2060\ufeff":         "zerowidth",
		"tags\U000E0049\U000E0067":            "tags",
		"selectors\ufe01\U000E0101":           "selectors",
		"bell\a\x1b[31mred\x7f":               "bellred",
		"title\x1b]0;mine\x07 of a window":    "title of a window",
		"eight bits\u009b2Jof it":             "eight bitsof it",
		"filler\u3164\u115f\u2800x":           "filler x",
		"broken\xff\xfe":                      "broken",
		"Lautstärke einstellen: 音量を設定する 🔊":    "Lautstärke einstellen: 音量を設定する 🔊",
		"private\ue000\U000F0000 use":         "private use",
		strings.Repeat("a", 140):              strings.Repeat("a", 97) + "…",
		strings.Repeat("音", 40):               strings.Repeat("音", 32) + "…",
		"soft\u00adhyphen\u00a0nbsp\u2028sep": "softhyphen nbsp sep",
	} {
		// security: H5
		if got := cleantext.Short(text, 100); got != want {
			t.Errorf("%q is %q, not %q", text, got, want)
		}
	}
}

func TestLines(t *testing.T) {
	for text, want := range map[string]string{
		"a\tb\nc":                 "a\tb\nc",
		"a\r\nb\rc":               "a\nb c",
		"\x1b[31mred\x1b[0m\nend": "red\nend",
		"\x1b]0;no end":           "]0;no end",
		"nul\x00 and next\u0085":  "nul and next",
	} {
		if got := cleantext.Lines(text); got != want {
			t.Errorf("%q is %q, not %q", text, got, want)
		}
	}
}

func TestIsFormula(t *testing.T) {
	for _, text := range []string{"=1+1", "+1", "-1", "@a", "\t=1", "\r=1", "\n=1", " =1", "\u200b=1", "＝1", "\n＋1", "－1", "＠a", "\x00=1"} {
		if !cleantext.IsFormula(text) {
			t.Errorf("%q is no formula", text)
		}
	}
	for _, text := range []string{"", "a=1", "1-1", "küche", "'=1"} {
		if cleantext.IsFormula(text) {
			t.Errorf("%q is a formula", text)
		}
	}
}

func FuzzLines(f *testing.F) {
	f.Add("a\x1b[31mb\u202e\xff")
	f.Fuzz(func(t *testing.T, text string) {
		for _, clean := range []string{cleantext.Lines(text), cleantext.Line(text), cleantext.Short(text, 16)} {
			// security: H5
			if !utf8.ValidString(clean) || strings.IndexFunc(clean, cleantext.IsUnclean) >= 0 {
				t.Fatalf("%q leaves %q", text, clean)
			}
		}
		if line := cleantext.Line(text); strings.ContainsFunc(line, func(c rune) bool { return c != ' ' && unicode.IsSpace(c) }) {
			t.Fatalf("%q is not one line: %q", text, line)
		}
		if short := cleantext.Short(text, 16); len(short) > 16 {
			t.Fatalf("%q is %d bytes: %q", text, len(short), short)
		}
	})
}
