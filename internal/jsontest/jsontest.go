// Package jsontest reads JSON with encoding/json in the detail that fuzz
// targets need: their second reader, to which the product's own is compared. It
// compares answers with the OpenAPI document, too. Only tests import it.
package jsontest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// Member is one member of an object or, without a key, one element of an array.
type Member struct{ Key, Value string }

// Members lists the members of an object or the elements of an array in their
// order, duplicates included. Values are the bytes they occupy. Anything else,
// or text after it, is an error.
func Members(data []byte) (list []Member, err error) {
	if !json.Valid(data) {
		return nil, fmt.Errorf("%q is not valid", data)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	start, err := d.Token()
	if err != nil || start != json.Delim('{') && start != json.Delim('[') {
		return nil, fmt.Errorf("%q is not an object or array: %w", data, err)
	}
	for d.More() {
		var m Member
		if start == json.Delim('{') {
			key, err := d.Token()
			if err != nil {
				return nil, err
			}
			m.Key = key.(string)
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil, err
		}
		m.Value = strings.Trim(string(raw), " \t\r\n")
		list = append(list, m)
	}
	return list, nil
}

// ObjectMembers is Members of an object, an error for an array.
func ObjectMembers(data []byte) ([]Member, error) {
	if !bytes.HasPrefix(bytes.TrimLeft(data, " \t\r\n"), []byte("{")) {
		return nil, fmt.Errorf("%q is not an object", data)
	}
	return Members(data)
}

// Text is the text of a value that is a string.
func (m Member) Text() (text string, ok bool) {
	return text, strings.HasPrefix(m.Value, `"`) && json.Unmarshal([]byte(m.Value), &text) == nil
}

// Depth is the deepest nesting of valid JSON.
func Depth(data []byte) (deepest int) {
	d := json.NewDecoder(bytes.NewReader(data))
	for depth := 0; ; {
		token, err := d.Token()
		if err != nil {
			return deepest
		}
		switch token {
		case json.Delim('{'), json.Delim('['):
			depth++
			deepest = max(deepest, depth)
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
	}
}
