package database

import (
	"encoding/json"
	"strings"
	"unicode/utf8"
)

// DecodeLabels parses stored labels; invalid text, as after a manual edit, gives none.
func DecodeLabels(text string) map[string]string {
	if text == "" || text == "{}" {
		return nil
	}
	if labels, ok := plainLabels(text); ok {
		return labels
	}
	var labels map[string]string
	if json.Unmarshal([]byte(text), &labels) != nil {
		return nil
	}
	return labels
}

// plainLabels parses an object of strings in the form that the ledger writes, without escapes:
// lists do it a hundred times for each page.
func plainLabels(text string) (labels map[string]string, ok bool) {
	rest, opens := strings.CutPrefix(text, "{")
	escaped := func(r rune) bool { return r < ' ' || r == '\\' || r == utf8.RuneError }
	if !opens || strings.ContainsFunc(rest, escaped) {
		return nil, false
	}
	labels = make(map[string]string, strings.Count(rest, `":"`))
	for {
		var key, value string
		if key, rest, ok = cutString(rest); !ok {
			return nil, false
		}
		if rest, ok = strings.CutPrefix(rest, ":"); !ok {
			return nil, false
		}
		if value, rest, ok = cutString(rest); !ok {
			return nil, false
		}
		if labels[key] = value; rest == "}" {
			return labels, true
		}
		if rest, ok = strings.CutPrefix(rest, ","); !ok {
			return nil, false
		}
	}
}

// cutString cuts a quoted string without escapes from the start of a text.
func cutString(text string) (value, rest string, ok bool) {
	rest, ok = strings.CutPrefix(text, `"`)
	if !ok {
		return "", text, false
	}
	return strings.Cut(rest, `"`)
}
