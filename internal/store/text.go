package store

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"
	"unicode/utf8"

	"fleetd/internal/devices"
)

// isText reports whether both databases take s as text: Postgres refuses NUL
// and invalid UTF-8.
func isText(s string) bool { return strings.IndexByte(s, 0) < 0 && utf8.ValidString(s) }

// clean puts U+FFFD in place of what Postgres refuses.
func clean(s string) string {
	if isText(s) {
		return s
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// micros is a time as the tables hold it.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// instant is the opposite of micros.
func instant(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}

// quote is s as a JSON string, the same for a stored label and for a search.
func quote(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	// A string can always be encoded, and a Buffer always written.
	_ = enc.Encode(s)
	return strings.TrimSuffix(b.String(), "\n")
}

// encodeLabels is the one form in which labels are stored: keys sorted, no
// spaces, so that `"key":"value"` can be searched as text.
func encodeLabels(labels map[string]string) string {
	if len(labels) == 0 {
		return "{}"
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(labels) // as in quote
	return strings.TrimSuffix(b.String(), "\n")
}

// labelPattern is the text that labels matching `key` or `key=value` contain.
// Labels with quotes and commas in their keys may contain it without matching:
// hasLabel decides.
func labelPattern(filter string) string {
	key, value, exact := strings.Cut(filter, "=")
	if exact {
		return quote(key) + ":" + quote(value)
	}
	return quote(key) + ":"
}

// hasLabel reports whether labels match `key` or `key=value`.
func hasLabel(labels map[string]string, filter string) bool {
	key, value, exact := strings.Cut(filter, "=")
	got, ok := labels[key]
	return ok && (!exact || got == value)
}

// Encodings of catalogs.tools.
const (
	encodingText   = "text"
	encodingBase64 = "base64"
)

// encodeTools makes text of a tool list without losing a byte.
func encodeTools(tools json.RawMessage) (text, encoding string) {
	if s := string(tools); isText(s) {
		return s, encodingText
	}
	return base64.StdEncoding.EncodeToString(tools), encodingBase64
}

func decodeTools(text, encoding string) (json.RawMessage, error) {
	if encoding == encodingBase64 {
		return base64.StdEncoding.DecodeString(text)
	}
	return json.RawMessage(text), nil
}

// before orders the pairs that fence presence.
func before(a, b *devices.Presence) bool {
	return a.Epoch < b.Epoch || a.Epoch == b.Epoch && a.Seq < b.Seq
}
