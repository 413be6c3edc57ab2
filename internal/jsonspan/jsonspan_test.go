package jsonspan

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

func TestWalkObject(t *testing.T) {
	w := Object([]byte(" {\"a\" : 1, \"b\\u0063\":[1,{\"x\":\"}\"}] ,\"d\":\"\\\"\"} \n"))
	var got []string
	for w.Next() {
		got = append(got, string(w.Key())+"="+string(w.Value()))
	}
	if err := w.Err(); err != nil {
		t.Fatal(err)
	}
	if want := `a=1 bc=[1,{"x":"}"}] d="\""`; strings.Join(got, " ") != want {
		t.Errorf("got %q, want %q", strings.Join(got, " "), want)
	}
}

func TestErrors(t *testing.T) {
	for _, c := range []struct {
		text string
		want error
	}{
		{``, ErrSyntax}, {`{`, ErrSyntax}, {`{}x`, ErrSyntax}, {`{"a"}`, ErrSyntax}, {`{"a":}`, ErrSyntax},
		{`{"a":1,}`, ErrSyntax}, {`{,}`, ErrSyntax}, {`{"a":01}`, ErrSyntax}, {`{"a":[1,]}`, ErrSyntax},
		{`{"a":[1}`, ErrSyntax}, {`{"a":tru}`, ErrSyntax}, {"{\"a\":\"\n\"}", ErrSyntax}, {`{"a":"\x"}`, ErrSyntax},
		{"{\"a\":\"\xff\"}", ErrUTF8}, {`[]`, ErrType}, {`null`, ErrType}, {`nul`, ErrSyntax},
		{`{"a":` + strings.Repeat("[", 10000) + strings.Repeat("]", 10000) + `}`, ErrDepth},
		{`{"error":{"message":"no "film" left"}}`, ErrSyntax},
	} {
		w := Object([]byte(c.text))
		for w.Next() {
			_ = w.Value()
		}
		if !errors.Is(w.Err(), c.want) {
			t.Errorf("%.40q: got %v, want %v", c.text, w.Err(), c.want)
		}
	}
}

// Every document that is one byte away from a valid one is judged as by
// encoding/json.
func TestOneByteAway(t *testing.T) {
	const bytes = "{}[]\",:\\/abefgtu019.-+ \t\n\x00\x1f\x7f"
	for _, text := range []string{`{"a":[1,{"b":[{},[]]}],"c":{"d":[[{"e":null}]]}}`, `["twelve bytes","\u00Fa\n","",true,false,null]`, `[-0,0.5,1e9,-1.25E-3,10]`, `{ "a" : { } , "b" : [ ] }`} {
		for i := range len(text) {
			variants := []string{text[:i] + text[i+1:]}
			for _, c := range []byte(bytes) {
				variants = append(variants, text[:i]+string(c)+text[i+1:], text[:i]+string(c)+text[i:])
			}
			for _, v := range variants {
				if _, err := Value([]byte(v)); (err == nil) != json.Valid([]byte(v)) {
					t.Errorf("%q: %v", v, err)
				}
			}
		}
	}
}

func TestDepth(t *testing.T) {
	for depth, want := range map[int]error{MaxDepth: nil, MaxDepth + 1: ErrDepth} {
		if _, err := Value([]byte(strings.Repeat("[", depth) + strings.Repeat("]", depth))); !errors.Is(err, want) {
			t.Errorf("%d levels: %v", depth, err)
		}
	}
}

func TestInt(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "-1": -1, "2147483647": 2147483647, "999999999999999999": 999999999999999999, "1.0": 1, "1e3": 1000} {
		if n, ok := Int([]byte(text)); !ok || n != want {
			t.Errorf("Int(%s) = %d, %v", text, n, ok)
		}
	}
	for _, text := range []string{`"1"`, "1.5", "99999999999999999999", "9999999999999999999", "-9999999999999999999", "null", "1e16", "-1e16", "1e40", ""} {
		if n, ok := Int([]byte(text)); ok {
			t.Errorf("Int(%s) = %d, want refusal", text, n)
		}
	}
}

func TestNoAllocation(t *testing.T) {
	msg := []byte(`{"session_id":"s","type":"mcp","payload":{"jsonrpc":"2.0","id":7,"result":{"content":[{"type":"text","text":"true"}],"isError":false}}}`)
	var n int
	if got := testing.AllocsPerRun(100, func() {
		w := Object(msg)
		for w.Next() {
			if string(w.Key()) == "payload" {
				n += len(w.Value())
			}
		}
	}); got != 0 {
		t.Errorf("%v allocations per walk, want none", got)
	}
}

func TestMember(t *testing.T) {
	for _, c := range []struct{ object, name, want string }{
		{`{"a":1,"b":"x"}`, "b", `"x"`},
		{`{"a":1,"a":2}`, "a", `1`},
		{`{"\u0061":1}`, "a", `1`},
		{`{"a":1,"b":`, "a", `1`},
		{`{"a":1,"b":`, "b", ``},
		{`{"b":{"a":1}}`, "a", ``},
		{`["a"]`, "a", ``},
		{``, "a", ``},
	} {
		if got := string(Member([]byte(c.object), c.name)); got != c.want {
			t.Errorf("%s: %s is %q, want %q", c.object, c.name, got, c.want)
		}
	}
}

func TestWithString(t *testing.T) {
	for _, c := range []struct{ object, want string }{
		{``, `{"id":"n\"w"}`},
		{`{}`, `{"id":"n\"w"}`},
		{`{"type":"tts", "deep":{"id":1}}`, `{"id":"n\"w","type":"tts","deep":{"id":1}}`},
		{`{"a":1,"id":"old","b":[],"id":2}`, `{"id":"n\"w","a":1,"b":[]}`},
		{`{"a":1,"b":tru}`, `{"id":"n\"w","a":1}`},
	} {
		if got := string(WithString([]byte(c.object), "id", `n"w`)); got != c.want {
			t.Errorf("%s: %s, want %s", c.object, got, c.want)
		}
	}
}

func TestWithout(t *testing.T) {
	for _, c := range []struct{ object, want string }{
		{``, `{}`},
		{`{}`, `{}`},
		{`{"id":1}`, `{}`},
		{`{"a\u0062":1, "\u0069d":{"id":1},"deep":{"id":1},"id":2}`, `{"a\u0062":1,"deep":{"id":1}}`},
		{`{"a":1,"b":tru}`, `{"a":1}`},
	} {
		if got := string(Without([]byte(c.object), "id")); got != c.want {
			t.Errorf("%s: %s, want %s", c.object, got, c.want)
		}
	}
}
