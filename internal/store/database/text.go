package database

import (
	"strings"
	"unicode/utf8"
)

// IsText reports whether both databases accept s as text: Postgres refuses NUL and invalid UTF-8.
func IsText(s string) bool { return strings.IndexByte(s, 0) < 0 && utf8.ValidString(s) }

// Clean replaces what Postgres refuses by U+FFFD.
func Clean(s string) string {
	if IsText(s) {
		return s
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}
