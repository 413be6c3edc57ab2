package database

import (
	"strings"
	"time"
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

// Micros returns a time as stored in the tables.
func Micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// Instant is the inverse of Micros.
func Instant(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}
