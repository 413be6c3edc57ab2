package jsonspan

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

func TestTextFault(t *testing.T) {
	for _, c := range []struct {
		value, pointer string
		fault          TextFault
		repaired       string
	}{
		{`{"a":"\ud83d\ude00 \\ud83d \uD83D\uDE00 \n"}`, "", TextOK, ""},
		{`"\ud83d"`, "", LoneSurrogate, `"\ufffd"`},
		{`"\ude00\ud83d"`, "", LoneSurrogate, `"\ufffd\ufffd"`},
		{`"\ud83d\ud83d\ude00"`, "", LoneSurrogate, `"\ufffd\ud83d\ude00"`},
		{`"\ud83d\u0041"`, "", LoneSurrogate, `"\ufffd\u0041"`},
		{`"\uDBFF\\uDC00"`, "", LoneSurrogate, `"\ufffd\\uDC00"`},
		{`"\\\u0000"`, "", NUL, `"\\\ufffd"`},
		{`{"a":1,"b":[{},["x","\u0000"]]}`, "/b/1/1", NUL, `{"a":1,"b":[{},["x","\ufffd"]]}`},
		{`{"a/b~":{"c\u0000d":"x"}}`, "/a~1b~0/c\uFFFDd", NUL, `{"a/b~":{"c\ufffdd":"x"}}`},
		{` { "a" : [ "\udfff" ] } `, "/a/0", LoneSurrogate, ` { "a" : [ "\ufffd" ] } `},
	} {
		before := strings.Clone(c.value)
		pointer, fault := FindTextFault([]byte(c.value))
		if pointer != c.pointer || fault != c.fault {
			t.Errorf("%s: %q, fault %d", c.value, pointer, fault)
		}
		want := c.repaired
		if want == "" {
			want = c.value
		}
		if got := string(RepairText([]byte(c.value))); got != want || c.value != before {
			t.Errorf("%s is repaired to %s", before, got)
		}
	}
}

// FuzzTextFault checks that a valid value without faults has only whole text, and
// that a repaired one has no fault and is otherwise the same.
func FuzzTextFault(f *testing.F) {
	for _, s := range []string{`1E700`, `{"a":"\ud83d"}`, `["\u0000","\\u0000"]`, `"\ud83d\ud83d\ude00"`, `"\u00`, `\`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		_, fault := FindTextFault(data) // must not fail on anything
		repaired := RepairText(data)
		if _, err := Value(data); err != nil {
			return
		}
		if _, left := FindTextFault(repaired); left != TextOK || len(repaired) != len(data) {
			t.Fatalf("%q becomes %q", data, repaired)
		}
		// Numbers stay text: a float64 holds no 1E700.
		decode := func(text []byte) (value any, err error) {
			d := json.NewDecoder(bytes.NewReader(text))
			d.UseNumber()
			err = d.Decode(&value)
			return value, err
		}
		before, err := decode(data)
		after, errAfter := decode(repaired)
		if err != nil || errAfter != nil {
			t.Fatalf("%q becomes %q: %v, %v", data, repaired, err, errAfter)
		}
		b, _ := json.Marshal(before)
		a, _ := json.Marshal(after)
		if fault == TextOK && string(a) != string(b) {
			t.Errorf("%q becomes %q", data, repaired)
		}
	})
}
