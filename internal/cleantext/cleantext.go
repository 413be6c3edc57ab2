// Package cleantext makes text of devices and strangers safe to show: on a terminal, in a spreadsheet, and to a language
// model. It removes what is not visible: control characters, terminal escape sequences, marks that change the direction
// of writing, and characters without a glyph.
package cleantext

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Line returns text as one line: white space becomes single blanks, and there is none at either end.
func Line(text string) string { return strings.Join(strings.Fields(Lines(text)), " ") }

// Short is Line with at most limit bytes. Text that was cut ends with an ellipsis.
func Short(text string, limit int) string {
	text = Line(text)
	if len(text) <= limit {
		return text
	}
	const ellipsis = "…"
	end := limit - len(ellipsis)
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return strings.TrimRight(text[:max(end, 0)], " ") + ellipsis
}

// escapes matches complete terminal escape sequences. Of one without an end only the first character is removed, so that it
// hides nothing after it.
var escapes = regexp.MustCompile("(?s)(?:\x1b\\[|\u009b)[0-?]*[ -/]*[@-~]|(?:\x1b[\\]PX^_]|[\u009d\u0090\u0098\u009e\u009f]).*?(?:\x07|\x1b\\\\|\u009c)|\x1b[ -/]*[0-OQ-WYZ\\x5c\\x60-~]")

// Lines returns text with its lines and tabs.
func Lines(text string) string {
	if strings.IndexFunc(text, IsUnclean) < 0 {
		return text
	}
	text = escapes.ReplaceAllString(text, "")
	var b strings.Builder
	b.Grow(len(text))
	for _, c := range strings.ReplaceAll(text, "\r\n", "\n") {
		switch {
		case c == '\u2800' || IsUnclean(c) && unicode.IsSpace(c) && c != '\u0085': // the braille blank is empty
			b.WriteByte(' ')
		case !IsUnclean(c):
			b.WriteRune(c)
		}
	}
	return b.String()
}

// IsUnclean reports whether Lines removes or replaces a character.
func IsUnclean(c rune) bool {
	switch {
	case c == '\n', c == '\t':
		return false
	case c == utf8.RuneError, c == '\u2800', !unicode.IsPrint(c): // IsPrint excludes formatting and private characters
		return true
	case c >= 0xFE00 && c <= 0xFE0F, c >= 0xE0100 && c <= 0xE01EF: // variation selectors can encode arbitrary bytes
		return true
	case c == 0x034F, c == 0x115F, c == 0x1160, c == 0x17B4, c == 0x17B5, c == 0x3164, c == 0xFFA0, c >= 0x180B && c <= 0x180F:
		return true // letters and marks without a glyph
	}
	return false
}

// IsFormula reports whether a spreadsheet may take text for a formula: programs differ in what they skip before it, and in
// whether they take full-width characters for the usual ones.
func IsFormula(text string) bool {
	if strings.HasPrefix(text, "\t") || strings.HasPrefix(text, "\r") {
		return true
	}
	text = strings.TrimLeftFunc(text, func(c rune) bool { return unicode.IsSpace(c) || IsUnclean(c) })
	first, _ := utf8.DecodeRuneInString(text)
	return strings.ContainsRune("=+-@＝＋－＠", first)
}
