package mcpserver

import (
	"bytes"
	"strings"

	"fleetd/internal/cleantext"
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
		return jsonspan.AppendString(dst, cleantext.Lines(text))
	case jsonspan.KindObject:
		dst = append(dst, '{')
		walk := jsonspan.Object(raw)
		for n := 0; walk.Next(); n++ {
			if n > 0 {
				dst = append(dst, ',')
			}
			dst = append(jsonspan.AppendString(dst, cleantext.Lines(string(walk.Key()))), ':')
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
		return jsonspan.AppendString(dst, cleantext.Short(text, maxWord)), ""
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
		case seen[key] || len(seen) == maxMembers || key != cleantext.Short(key, maxWord):
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
