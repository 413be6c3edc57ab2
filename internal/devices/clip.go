package devices

import (
	"strings"
	"unicode/utf8"
)

// Clip cuts text that a device reported about itself to maxReportedText bytes.
func Clip(text string) string { return Cut(text, maxReportedText) }

// Cut returns the beginning of a text that has at most so many bytes, without the character that would be cut.
func Cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.Clone(strings.ToValidUTF8(text[:most], ""))
}

const maxReportedText = 128

// MaxToolName is the longest name of a tool, in bytes; the longest of stock firmware has 31.
const MaxToolName = 256

// IsToolName reports whether a device reads the name of a tool as fleetd does: it ends names at the first NUL and expects
// text.
func IsToolName(name string) bool {
	for _, c := range name {
		if c < ' ' || c == 0x7f || c == utf8.RuneError {
			return false
		}
	}
	return name != "" && len(name) <= MaxToolName
}
