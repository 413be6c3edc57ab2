package mcpserver

import (
	"bytes"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"fleetd/internal/jsonspan"
)

// A device's texts reach a language model, which may take them for instructions. They
// are therefore shortened, stripped of invisible characters, and marked as the
// device's own words.

// Limits of a device's texts.
const (
	maxTitle       = 128 // bytes
	maxDescription = 1024
	maxWord        = 256     // bytes of a text in a schema
	maxSchema      = 8 << 10 // bytes
	maxDepth       = 8       // of a schema
	maxMembers     = 64      // of one object or array in it
)

// Metadata keys and the prefix that mark a device's texts.
const (
	metaOriginal  = "fleetd/original_name"
	metaUntrusted = "fleetd/untrusted"
	metaNote      = "fleetd/note"
	untrustedMark = "[in the device's own words] "
)

// clean returns text on one line without invisible characters: control characters,
// marks that change the direction of writing, characters without a glyph. The result
// has at most limit bytes.
func clean(text string, limit int) string {
	var b strings.Builder
	space := true // no space at the beginning, no two in a row
	for _, c := range text {
		switch {
		case unicode.IsSpace(c) || c == '\u2800': // the braille blank
			c = ' '
		case c == utf8.RuneError || invisible(c):
			continue
		}
		if c == ' ' {
			if space {
				continue
			}
			space = true
		} else {
			space = false
		}
		if b.Len()+utf8.RuneLen(c) > limit-len("…") {
			return strings.TrimRight(b.String(), " ") + "…"
		}
		b.WriteRune(c)
	}
	return strings.TrimRight(b.String(), " ")
}

// escapes matches complete terminal escape sequences.
var escapes = regexp.MustCompile("(?s)(?:\x1b\\[|\u009b)[0-?]*[ -/]*[@-~]|(?:\x1b[\\]PX^_]|[\u009d\u0090\u0098\u009e\u009f]).*?(?:\x07|\x1b\\\\|\u009c|$)|\x1b[ -/]*[0-~]")

// cleanText is clean for text of several lines, such as tool results: it keeps lines
// and tabs, and has no limit.
func cleanText(text string) string {
	if strings.IndexFunc(text, func(c rune) bool { return unclean(c) }) < 0 {
		return text
	}
	text = escapes.ReplaceAllString(text, "")
	var b strings.Builder
	b.Grow(len(text))
	for _, c := range strings.ReplaceAll(text, "\r\n", "\n") {
		switch {
		case !unclean(c):
			b.WriteRune(c)
		case unicode.IsSpace(c) && c != '\u0085':
			b.WriteByte(' ')
		}
	}
	return b.String()
}

// maxNested is the depth to which a device's JSON is shown; deeper values become null.
const maxNested = 64

// appendClean appends a device's JSON with all texts cleaned.
func appendClean(dst, raw []byte, depth int) []byte {
	kind := jsonspan.KindOf(raw)
	if depth > maxNested && (kind == jsonspan.KindObject || kind == jsonspan.KindArray) {
		return append(dst, "null"...)
	}
	switch kind {
	case jsonspan.KindString:
		text, _ := jsonspan.String(raw)
		return jsonspan.AppendString(dst, cleanText(text))
	case jsonspan.KindObject:
		dst = append(dst, '{')
		walk := jsonspan.Object(raw)
		for n := 0; walk.Next(); n++ {
			if n > 0 {
				dst = append(dst, ',')
			}
			dst = append(jsonspan.AppendString(dst, cleanText(string(walk.Key()))), ':')
			dst = appendClean(dst, walk.Value(), depth+1)
		}
		return append(dst, '}')
	case jsonspan.KindArray:
		dst = append(dst, '[')
		walk := jsonspan.Array(raw)
		for n := 0; walk.Next(); n++ {
			if n > 0 {
				dst = append(dst, ',')
			}
			dst = appendClean(dst, walk.Value(), depth+1)
		}
		return append(dst, ']')
	}
	return append(dst, bytes.TrimSpace(raw)...)
}

// unclean reports whether cleanText removes or replaces a character.
func unclean(c rune) bool {
	return c == utf8.RuneError || c != '\n' && c != '\t' && invisible(c)
}

// invisible reports whether a character shows nothing by itself. unicode.IsPrint
// excludes formatting and private characters; the others in the list are letters or
// marks in Unicode.
func invisible(c rune) bool {
	switch {
	case !unicode.IsPrint(c):
		return true
	case c >= 0xFE00 && c <= 0xFE0F, c >= 0xE0100 && c <= 0xE01EF: // variation selectors can encode arbitrary bytes
		return true
	case c == 0x034F, c == 0x115F, c == 0x1160, c == 0x17B4, c == 0x17B5, c == 0x3164, c == 0xFFA0, c >= 0x180B && c <= 0x180F:
		return true
	}
	return false
}

// anySchema replaces an unusable schema; the core still checks arguments against the
// original.
const anySchema = `{"type":"object"}`

// cleanSchema returns an input schema that any host can read: a small, shallow object
// without references, its texts cleaned. If that cannot be made from the device's
// schema, it returns anySchema and a note with the reason.
func cleanSchema(raw []byte) (schema []byte, note string) {
	switch {
	case len(raw) == 0:
		return []byte(anySchema), ""
	case len(raw) > maxSchema:
		return []byte(anySchema), "the device's schema is too large to show"
	case jsonspan.KindOf(raw) != jsonspan.KindObject:
		return []byte(anySchema), "the device's schema is not an object"
	}
	out, note := appendSchema(make([]byte, 0, len(raw)), raw, 0)
	if note != "" {
		return []byte(anySchema), note
	}
	if kind, _ := jsonspan.String(jsonspan.Member(out, "type")); kind != "object" {
		return []byte(anySchema), "the device's schema does not describe an object"
	}
	return out, ""
}

// appendSchema appends one value of a schema.
func appendSchema(dst, raw []byte, depth int) (out []byte, note string) {
	if depth > maxDepth {
		return nil, "the device's schema is nested too deeply to show"
	}
	switch jsonspan.KindOf(raw) {
	case jsonspan.KindString:
		text, ok := jsonspan.String(raw)
		if !ok {
			return nil, unreadable
		}
		return jsonspan.AppendString(dst, clean(text, maxWord)), ""
	case jsonspan.KindObject:
		return appendObject(dst, raw, depth)
	case jsonspan.KindArray:
		dst = append(dst, '[')
		walk := jsonspan.Array(raw)
		n := 0
		for ; walk.Next() && n < maxMembers; n++ {
			if n > 0 {
				dst = append(dst, ',')
			}
			if dst, note = appendSchema(dst, walk.Value(), depth+1); note != "" {
				return nil, note
			}
		}
		if walk.Err() != nil || n == maxMembers {
			return nil, unreadable
		}
		return append(dst, ']'), ""
	}
	return append(dst, bytes.TrimSpace(raw)...), ""
}

const unreadable = "the device's schema is too large or cannot be read"

func appendObject(dst, raw []byte, depth int) (out []byte, note string) {
	dst = append(dst, '{')
	seen := map[string]bool{}
	walk := jsonspan.Object(raw)
	for walk.Next() {
		key := string(walk.Key())
		switch {
		case strings.HasPrefix(key, "$"):
			return nil, "the device's schema contains references, which are not supported"
		case seen[key] || len(seen) == maxMembers || key != clean(key, maxWord):
			return nil, unreadable
		case strings.EqualFold(key, "x-mcp-header"): // the device could make hosts send headers of its choice
			continue
		}
		if len(seen) > 0 {
			dst = append(dst, ',')
		}
		seen[key] = true
		dst = append(jsonspan.AppendString(dst, key), ':')
		if dst, note = appendSchema(dst, walk.Value(), depth+1); note != "" {
			return nil, note
		}
	}
	if walk.Err() != nil {
		return nil, unreadable
	}
	return append(dst, '}'), ""
}
