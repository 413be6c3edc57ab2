package audit

import (
	"encoding/hex"
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/jsonspan"
)

// Limits of one line.
const (
	maxText      = 512  // bytes of a member
	maxArguments = 4096 // bytes of kept arguments, redacted
)

// appendTime appends "2006-01-02T15:04:05.000000Z", with microseconds as in the database. The standard
// formatter is fast only for RFC 3339, which has no fixed number of digits; this runs for every call.
func appendTime(dst []byte, t time.Time) []byte {
	dst = t.UTC().AppendFormat(append(dst, '"'), time.RFC3339)
	micros := t.Nanosecond() / 1000
	digits := [...]byte{'.', 0, 0, 0, 0, 0, 0, 'Z', '"'}
	for i := 6; i > 0; i-- {
		digits[i] = '0' + byte(micros%10)
		micros /= 10
	}
	return append(dst[:len(dst)-1], digits[:]...) // replaces the Z
}

// appendLine appends an entry as one line of JSON. Hashes cover this form: its bytes never change.
func appendLine(dst []byte, seq int64, e *Entry) []byte {
	dst = strconv.AppendInt(append(dst, `{"seq":`...), seq, 10)
	dst = appendTime(append(dst, `,"at":`...), e.At)
	dst = appendMember(dst, `,"kind":`, string(e.Kind))
	dst = appendMember(dst, `,"call":`, e.Call)
	dst = appendMember(dst, `,"action":`, e.Action)
	dst = appendMember(dst, `,"device":`, e.Device)
	dst = appendMember(dst, `,"key":`, e.Key)
	dst = appendMember(dst, `,"name":`, e.Name)
	dst = appendMember(dst, `,"via":`, e.Via)
	dst = appendMember(dst, `,"from":`, e.From)
	dst = appendMember(dst, `,"through":`, e.Through)
	if e.Digest != (Hash{}) {
		dst = append(hex.AppendEncode(append(dst, `,"digest":"`...), e.Digest[:]), '"')
	}
	if len(e.Arguments) > 0 {
		start := len(dst)
		dst = Redact(append(dst, `,"arguments":`...), e.Arguments)
		if len(dst)-start > maxArguments {
			dst = append(dst[:start], `,"arguments_cut":true`...)
		}
	}
	dst = appendMember(dst, `,"outcome":`, e.Outcome)
	dst = appendMember(dst, `,"rule":`, e.Rule)
	dst = appendMember(dst, `,"detail":`, e.Detail)
	dst = appendMember(dst, `,"held":`, e.Held)
	if e.Duration > 0 {
		dst = strconv.AppendInt(append(dst, `,"duration_ns":`...), int64(e.Duration), 10)
	}
	if e.Count > 0 {
		dst = strconv.AppendInt(append(dst, `,"count":`...), e.Count, 10)
	}
	return append(dst, "}\n"...)
}

func appendMember(dst []byte, name, text string) []byte {
	if text == "" {
		return dst
	}
	return jsonspan.AppendString(append(dst, name...), text[:min(len(text), maxText)])
}

// Line is a parsed entry.
type Line struct {
	Run  string `json:"run"`
	Node string `json:"node"`
	Seq  int64  `json:"seq"`
	Entry
}

// Redacted replaces a secret.
const Redacted = "[redacted]"

// IsSecret reports whether values of this name must not be recorded: if it contains password, token,
// secret or key.
func IsSecret(name string) bool {
	for i := range len(name) {
		for _, word := range [...]string{"password", "token", "secret", "key"} {
			if len(name)-i >= len(word) && strings.EqualFold(name[i:i+len(word)], word) {
				return true
			}
		}
	}
	return false
}

// Redact appends a JSON value without white space, and with Redacted in place of every member with a
// name of a secret, at any level. Invalid JSON becomes null.
func Redact(dst []byte, value json.RawMessage) []byte {
	start := len(dst)
	dst, ok := redact(dst, value)
	if !ok {
		return append(dst[:start], "null"...)
	}
	return dst
}

func redact(dst, value []byte) ([]byte, bool) {
	value, err := jsonspan.Value(value)
	if err != nil {
		return dst, false
	}
	var walk jsonspan.Walk
	end, object := byte(']'), false
	switch jsonspan.KindOf(value) {
	case jsonspan.KindObject:
		walk, end, object = jsonspan.Object(value), '}', true
	case jsonspan.KindArray:
		walk = jsonspan.Array(value)
	default:
		return append(dst, value...), true
	}
	dst = append(dst, value[0])
	for first := true; walk.Next(); first = false {
		if !first {
			dst = append(dst, ',')
		}
		if object {
			name := string(walk.Key())
			dst = append(jsonspan.AppendString(dst, name), ':')
			if IsSecret(name) {
				dst = jsonspan.AppendString(dst, Redacted)
				continue
			}
		}
		var ok bool
		if dst, ok = redact(dst, walk.Value()); !ok {
			return dst, false
		}
	}
	return append(dst, end), walk.Err() == nil
}
