package database

import (
	"encoding/json"
	"maps"
	"testing"
)

// Labels are what encoding/json reads, in the form that is written and in others.
func FuzzDecodeLabels(f *testing.F) {
	for _, text := range []string{"", "{}", `{"a":"b"}`, `{"a":"b","c":""}`, `{"":""}`, `{"a":"é","b":"{,}:"}`, `{"a":"\\u0041\""}`, `{ "a" : "b" }`, `{"a":1}`, `{"a":"b"`,
		`{"a":"b",}`, `{"a":"b"}}`, `{"a""b"}`, `["a"]`, `null`, `{"a":"b","a":"c"}`, "{\"a\":\"\n\"}", "{\"a\":\"\xff\"}"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var want map[string]string
		if json.Unmarshal([]byte(text), &want) != nil {
			want = nil
		}
		if got := DecodeLabels(text); !maps.Equal(got, want) {
			t.Errorf("%q: %q, encoding/json reads %q", text, got, want)
		}
	})
}
