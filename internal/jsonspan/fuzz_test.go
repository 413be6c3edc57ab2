package jsonspan

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"unicode/utf8"

	"fleetd/internal/jsontest"
)

// The targets below compare this package with encoding/json, whose result is
// the right one. The differences that are meant: this package limits the depth
// and refuses invalid UTF-8, and Int takes a literal of at most 18 characters.

// membersOf lists what encoding/json finds in an object or array.
func membersOf(t *testing.T, data []byte) []jsontest.Member {
	list, err := jsontest.Members(data)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// compareWalk walks an object or array and expects the members in list. Arrays
// in it are entered every other time, and left after their first element.
func compareWalk(t *testing.T, walk Walk, list []jsontest.Member) {
	for i, want := range list {
		if !walk.NextKey() {
			t.Fatalf("the walk ends before %q: %v", want, walk.Err())
		}
		if i%2 == 0 && want.Value[0] == '[' {
			inner := walk.Enter()
			inner.Next()
			walk.Leave(&inner)
		} else {
			walk.Skip()
		}
		if got := (jsontest.Member{Key: string(walk.Key()), Value: string(walk.Value())}); got != want {
			t.Fatalf("member %d is %q, encoding/json finds %q", i, got, want)
		}
	}
	if walk.Next() || walk.Err() != nil {
		t.Fatalf("the walk goes on to %q after %q, error %v", walk.Value(), list, walk.Err())
	}
}

// compareValue compares one value, and those within it, with what encoding/json
// makes of the same bytes.
func compareValue(t *testing.T, span []byte) {
	decoder := json.NewDecoder(bytes.NewReader(span))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil {
		t.Fatalf("%q: %v", span, err)
	}
	kind := KindNull
	switch v := value.(type) {
	case bool:
		if kind = KindFalse; v {
			kind = KindTrue
		}
	case string:
		kind = KindString
		text, ok := String(span)
		if raw, rawOK := StringBytes(span); !ok || !rawOK || text != v || string(raw) != v {
			t.Errorf("%q is %q and %q, encoding/json reads %q", span, text, raw, v)
		}
	case json.Number:
		kind = KindNumber
		compareInt(t, span)
	case []any:
		kind = KindArray
		list := membersOf(t, span)
		compareWalk(t, Array(span), list)
		for _, m := range list {
			compareValue(t, []byte(m.Value))
		}
	case map[string]any:
		kind = KindObject
		list := membersOf(t, span)
		compareWalk(t, Object(span), list)
		compareWalk(t, CheckedObject(span), list)
		compareMembers(t, span, list)
		for _, m := range list {
			compareValue(t, []byte(m.Value))
		}
	}
	if KindOf(span) != kind {
		t.Errorf("%q is of kind %q, want %q", span, KindOf(span), kind)
	}
	if _, ok := String(span); ok != (kind == KindString) {
		t.Errorf("%q: String reports %t", span, ok)
	}
	if _, ok := Int(span); ok && kind != KindNumber {
		t.Errorf("%q is taken for a number", span)
	}
}

func compareInt(t *testing.T, literal []byte) {
	got, ok := Int(literal)
	var exact int64
	var f float64
	integer := json.Unmarshal(literal, &exact) == nil
	number := json.Unmarshal(literal, &f) == nil
	switch {
	case len(bytes.TrimPrefix(literal, []byte("-"))) > 18:
		if ok {
			t.Errorf("%s has more than 18 characters and is taken", literal)
		}
	case integer:
		if !ok || got != exact {
			t.Errorf("%s is %d, %t", literal, got, ok)
		}
	default: // a fraction or an exponent
		if want := number && f == math.Trunc(f) && math.Abs(f) <= 1e15; ok != want || ok && float64(got) != f {
			t.Errorf("%s is %d, %t; encoding/json reads %v", literal, got, ok, f)
		}
	}
}

// compareMembers looks each member up, and replaces one.
func compareMembers(t *testing.T, object []byte, list []jsontest.Member) {
	first := map[string]string{}
	for _, m := range list {
		if _, seen := first[m.Key]; !seen {
			first[m.Key] = m.Value
		}
	}
	for key, want := range first {
		if got := string(Member(object, key)); got != want {
			t.Errorf("%q in %s is %s, want %s", key, object, got, want)
		}
	}
	name := "new"
	if len(list) > 0 {
		name = list[len(list)/2].Key
	}
	want := []jsontest.Member{{Key: name, Value: `"text"`}}
	for _, m := range list {
		if m.Key != name {
			want = append(want, m)
		}
	}
	got := membersOf(t, WithString(object, name, "text"))
	if len(got) != len(want) {
		t.Fatalf("%s with %q has %q", object, name, got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%s with %q has %q, want %q", object, name, got[i], want[i])
		}
	}
}

func FuzzValue(f *testing.F) {
	for _, s := range []string{`{"a":[1,2.5e-3,"x\u00e9",null,true,{}]}`, `[]`, `"\ud83d"`, `-0`, `{"a":1,"a":2}`, ` [ ] `, `1 2`, "\"\xff\"",
		strings.Repeat("[", MaxDepth) + strings.Repeat("]", MaxDepth), strings.Repeat("[", MaxDepth+1) + strings.Repeat("]", MaxDepth+1), `{"\u0061":{"b\n":1}}`, `[false,-1.50E+1,1000000000000000000,"\"\\\/\b\f\n\r\t"]`, `{"a":[[],{}],"b":[1,[2]]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		span, err := Value(data)
		valid := json.Valid(data)
		switch {
		case err == nil:
			if !valid || !utf8.Valid(data) || jsontest.Depth(data) > MaxDepth {
				t.Fatalf("accepted %q", data)
			}
			if want := bytes.Trim(data, " \t\r\n"); !bytes.Equal(span, want) {
				t.Fatalf("%q is the value of %q", span, data)
			}
			compareValue(t, span)
		case errors.Is(err, ErrDepth):
			if valid && jsontest.Depth(data) <= MaxDepth {
				t.Errorf("%q is not that deep", data)
			}
		case errors.Is(err, ErrUTF8):
			if utf8.Valid(data) {
				t.Errorf("%q is valid UTF-8", data)
			}
		case valid:
			t.Errorf("refused %q: %v", data, err)
		}
	})
}

// FuzzChecked walks anything as an object and as an array, quickly and
// thoroughly: a walk ends without an error exactly where Value accepts the same
// bytes, and the quick one stays within them whatever they are. A walk does not
// count its own level, so it takes what is one level too deep for Value.
func FuzzChecked(f *testing.F) {
	for _, s := range []string{`{"a":[1,"]\\\"",{"b":"}"}],"c":-1.5e3 ,"d":true}`, `{}`, `{"a":"\\"}`, `{"a":[[],{}]}`, `{"a`, ` [1 , [2,{}] ]`, `[{"a":"b"},]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		span, err := Value(data)
		valid := err == nil
		object := valid && span[0] == '{'
		array := valid && span[0] == '['
		for _, c := range []struct {
			name  string
			walk  Walk
			valid bool
		}{{"object", Object(data), object}, {"array", Array(data), array}} {
			for c.walk.Next() {
				if !json.Valid(c.walk.Value()) {
					t.Fatalf("%s %q: value %q", c.name, data, c.walk.Value())
				}
			}
			if (c.walk.Err() == nil) != c.valid && !errors.Is(err, ErrDepth) {
				t.Fatalf("%s %q: %v, as a value %v", c.name, data, c.walk.Err(), err)
			}
		}
		quick := CheckedObject(data)
		if object {
			compareWalk(t, quick, membersOf(t, span))
		}
		for seen := 0; quick.Next(); seen++ {
			if seen > len(data) {
				t.Fatalf("%q: the quick walk does not end", data)
			}
		}
	})
}

func FuzzAppendString(f *testing.F) {
	f.Add("plain")
	f.Add("\"\\\n\x00\u2028é\xff<&>\x7f")
	f.Fuzz(func(t *testing.T, text string) {
		out := AppendString([]byte("before"), text)
		literal, found := bytes.CutPrefix(out, []byte("before"))
		var read string
		if err := json.Unmarshal(literal, &read); !found || err != nil || read != string([]rune(text)) { // a rune of each invalid byte
			t.Fatalf("%q became %q, which encoding/json reads as %q: %v", text, out, read, err)
		}
		if got, ok := String(literal); !ok || got != read {
			t.Errorf("%q became %q, read back as %q", text, literal, got)
		}
	})
}
