package selector

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Value is the value of a term.
type Value struct {
	Text string // of a literal
	// Parts are the texts between the stars of a glob, at least two; the first and the last may be empty. A
	// literal has none.
	Parts []string
}

// Match reports whether the value matches the whole text.
func (v *Value) Match(text string) bool {
	if v.Parts == nil {
		return text == v.Text
	}
	last := len(v.Parts) - 1
	if len(text) < len(v.Parts[0])+len(v.Parts[last]) || !strings.HasPrefix(text, v.Parts[0]) || !strings.HasSuffix(text, v.Parts[last]) {
		return false
	}
	text = text[len(v.Parts[0]) : len(text)-len(v.Parts[last])]
	for _, part := range v.Parts[1:last] { // the earliest match of each part leaves the most text for the next
		i := strings.Index(text, part)
		if i < 0 {
			return false
		}
		text = text[i+len(part):]
	}
	return true
}

// appendTo appends the value in the syntax of Parse, in quotes if necessary.
func (v *Value) appendTo(b []byte) []byte {
	parts := v.Parts
	if parts == nil {
		parts = []string{v.Text}
	}
	if len(parts) == 1 && parts[0] == "" || strings.ContainsAny(parts[0][:min(1, len(parts[0]))], operatorBytes) || slices.ContainsFunc(parts, needsQuotes) {
		b = append(b, '"')
		for i, part := range parts {
			if i > 0 {
				b = append(b, '*')
			}
			b = appendQuoted(b, part)
		}
		return append(b, '"')
	}
	return append(b, strings.Join(parts, "*")...)
}

func (v *Value) compare(w *Value) int {
	return strings.Compare(string(v.appendTo(nil)), string(w.appendTo(nil)))
}

// operatorBytes may not start a value without quotes: `firmware=>2` is an error.
const operatorBytes = "<>!"

// delimiter reports whether a byte ends a value without quotes.
func delimiter(c byte) bool {
	return strings.IndexByte(" \t\r\n,()=\"\\", c) >= 0
}

func needsQuotes(text string) bool {
	for i, r := range text {
		if r < utf8.RuneSelf && (delimiter(byte(r)) || r == '*') || !printable(text[i:], r) {
			return true
		}
	}
	return false
}

// printable reports whether r, the first rune of text, is shown without an escape.
func printable(text string, r rune) bool {
	if r == utf8.RuneError {
		_, size := utf8.DecodeRuneInString(text)
		return size > 1
	}
	return unicode.IsPrint(r)
}

const hexDigits = "0123456789abcdef"

func appendQuoted(b []byte, text string) []byte {
	for text != "" {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case r == '"' || r == '\\' || r == '*':
			b = append(b, '\\', byte(r))
		case printable(text, r):
			b = append(b, text[:size]...)
		default:
			for _, c := range []byte(text[:size]) {
				b = append(b, '\\', 'x', hexDigits[c>>4], hexDigits[c&15])
			}
		}
		text = text[size:]
	}
	return b
}

// normalID returns the canonical form of a device id: twelve hex digits in pairs, with `:`, `-` or nothing between
// them, are a MAC address; in other ids ASCII letters become lower case.
func normalID(id string) string {
	if mac, ok := MAC(id); ok {
		return mac
	}
	return lowerASCII(id)
}

// MAC returns the canonical form of a MAC address in one of its three notations, but no mixture of them: with `:`, `-` or nothing
// between its pairs of hex digits.
func MAC(text string) (address string, ok bool) {
	step := 3
	switch len(text) {
	case 12:
		step = 2
	case 17:
		if sep := text[2]; sep != ':' && sep != '-' {
			return "", false
		}
	default:
		return "", false
	}
	var out [17]byte
	for pair := range 6 {
		at := pair * step
		if step == 3 && pair > 0 && text[at-1] != text[2] {
			return "", false
		}
		for k := range 2 {
			c := text[at+k] | 0x20
			if text[at+k] >= '0' && text[at+k] <= '9' {
				c = text[at+k]
			} else if c < 'a' || c > 'f' {
				return "", false
			}
			out[pair*3+k] = c
		}
		if pair < 5 {
			out[pair*3+2] = ':'
		}
	}
	return string(out[:]), true
}

func lowerASCII(text string) string {
	b := []byte(text)
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}
