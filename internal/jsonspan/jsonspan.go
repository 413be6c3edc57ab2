// Package jsonspan reads JSON without copying it: it walks the members of one
// object or the elements of one array and hands each value out as the span of
// bytes it occupies. Everything it skips is checked against RFC 8259, including
// UTF-8 and the nesting limit, so a walk that ends without an error has read a
// valid document.
//
// It exists because the device path needs three things at once that the
// standard library does not give together: values kept byte for byte (tool
// lists are named by their hash), the first of duplicate keys (as the
// firmware's own reader, cJSON, takes it), and no allocation per message.
package jsonspan

import (
	"encoding/json"
	"errors"
	"fmt"
)

// MaxDepth is the deepest nesting accepted. The firmware's messages need six.
const MaxDepth = 64

// Errors of a walk.
var (
	ErrSyntax = errors.New("not valid JSON")
	ErrDepth  = fmt.Errorf("JSON nested deeper than %d levels", MaxDepth)
	ErrUTF8   = errors.New("JSON text is not valid UTF-8")
	ErrType   = errors.New("JSON value is of another type")
)

// Walk is a position in one object or array. It is a value: copy it to
// store a position. The zero Walk is empty.
type Walk struct {
	data    []byte
	pos     int
	end     byte // '}' or ']'
	first   bool
	done    bool
	checked bool // data is valid: skip values without checks
	nested  bool // what follows the end belongs to an outer walk
	key     []byte
	value   []byte
	err     error
}

// Object starts a walk over the members of the object in data, which may have
// white space around it and nothing else.
func Object(data []byte) Walk { return open(data, '{', '}') }

// Array starts a walk over the elements of the array in data.
func Array(data []byte) Walk { return open(data, '[', ']') }

// CheckedObject is Object for data that a walk has already checked: it finds the ends of
// values without checking them again. For other data its results are undefined, but within
// the data.
func CheckedObject(data []byte) Walk {
	w := Walk{data: data, pos: space(data, 0), end: '}', first: true, checked: true}
	if w.pos >= len(data) || data[w.pos] != '{' {
		w.err = ErrType
	}
	w.pos++
	return w
}

func open(data []byte, start, end byte) Walk {
	w := Walk{data: data, pos: space(data, 0), end: end, first: true}
	switch {
	case w.pos >= len(data):
		w.err = ErrSyntax
	case data[w.pos] != start:
		w.err = ErrType
		if _, err := Value(data); err != nil {
			w.err = err
		}
	}
	w.pos++
	return w
}

// Next moves to the next member or element. It returns false at the end and
// at the first error; Err returns it.
func (w *Walk) Next() bool {
	if !w.NextKey() {
		return false
	}
	w.Skip()
	return w.err == nil
}

// Skip skips the value at which NextKey stopped; Value returns it.
func (w *Walk) Skip() {
	var end int
	var err error
	if w.checked {
		end, err = skipEnd(w.data, w.pos)
	} else {
		end, err = valueEnd(w.data, w.pos)
	}
	if err != nil {
		w.fail(err)
		return
	}
	w.value = w.data[w.pos:end]
	w.pos = end
}

// Enter starts a walk over the elements of the array that NextKey stopped at,
// so that they are scanned only once. Leave must follow.
func (w *Walk) Enter() Walk {
	inner := Walk{data: w.data, pos: w.pos + 1, end: ']', first: true, checked: w.checked, nested: true}
	if w.pos >= len(w.data) || w.data[w.pos] != '[' {
		inner.err = ErrType
	}
	return inner
}

// Leave continues after the inner walk of Enter, wherever that stopped.
func (w *Walk) Leave(inner *Walk) {
	for inner.Next() {
		continue
	}
	if inner.err != nil {
		w.fail(inner.err)
		return
	}
	w.value = w.data[w.pos:inner.pos]
	w.pos = inner.pos
}

// NextKey is Next up to the value itself: Skip or Enter must follow.
func (w *Walk) NextKey() bool {
	if w.err != nil || w.done || w.data == nil {
		return false
	}
	w.pos = space(w.data, w.pos)
	if w.pos >= len(w.data) {
		return w.fail(ErrSyntax)
	}
	if w.data[w.pos] == w.end {
		if trailing := space(w.data, w.pos+1); !w.nested && trailing != len(w.data) {
			return w.fail(ErrSyntax)
		}
		w.pos++
		w.done = true
		return false
	}
	if !w.first {
		if w.data[w.pos] != ',' {
			return w.fail(ErrSyntax)
		}
		w.pos = space(w.data, w.pos+1)
	}
	w.first = false
	if w.end == '}' {
		end, err := stringEnd(w.data, w.pos)
		if err != nil {
			return w.fail(err)
		}
		w.key = w.data[w.pos:end]
		w.pos = space(w.data, end)
		if w.pos >= len(w.data) || w.data[w.pos] != ':' {
			return w.fail(ErrSyntax)
		}
		w.pos = space(w.data, w.pos+1)
	}
	return true
}

func (w *Walk) fail(err error) bool {
	w.err = err
	return false
}

// Err is nil after a walk that reached the end of a valid document.
func (w *Walk) Err() error { return w.err }

// Value is the current value's bytes, without white space around it. It
// points into the data of the walk.
func (w *Walk) Value() []byte { return w.value }

// Key is the current member's name, unescaped. It points into the data unless
// the name has escapes.
func (w *Walk) Key() []byte { return unquote(w.key) }

// Value checks that data is one JSON value with white space around it at most,
// and returns it without that.
func Value(data []byte) ([]byte, error) {
	start := space(data, 0)
	end, err := valueEnd(data, start)
	if err != nil {
		return nil, err
	}
	if space(data, end) != len(data) {
		return nil, ErrSyntax
	}
	return data[start:end], nil
}

// Kind is the first byte of a value of each JSON type.
type Kind byte

// Kinds.
const (
	KindNone   Kind = 0
	KindObject Kind = '{'
	KindArray  Kind = '['
	KindString Kind = '"'
	KindNumber Kind = '0'
	KindTrue   Kind = 't'
	KindFalse  Kind = 'f'
	KindNull   Kind = 'n'
)

// KindOf returns the type of a value returned by a walk; KindNone for no bytes.
func KindOf(value []byte) Kind {
	if len(value) == 0 {
		return KindNone
	}
	if c := value[0]; c != '-' && (c < '0' || c > '9') {
		return Kind(c)
	}
	return KindNumber
}

// String returns the text of a string value; ok is false for other types.
func String(value []byte) (text string, ok bool) {
	if KindOf(value) != KindString {
		return "", false
	}
	return string(unquote(value)), true
}

// StringBytes is String without a copy where the text has no escapes.
func StringBytes(value []byte) (text []byte, ok bool) {
	if KindOf(value) != KindString {
		return nil, false
	}
	return unquote(value), true
}

// Int returns an integer value within 18 digits; ok is false for anything
// else. A fraction or exponent that leaves an integer is accepted (1.0, 1e3),
// since devices with other software send integers in this form.
func Int(value []byte) (n int64, ok bool) {
	if KindOf(value) != KindNumber {
		return 0, false
	}
	digits := value
	negative := digits[0] == '-'
	if negative {
		digits = digits[1:]
	}
	if len(digits) > 18 {
		return 0, false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return slowInt(value)
		}
		n = n*10 + int64(c-'0')
	}
	if negative {
		n = -n
	}
	return n, true
}

func slowInt(value []byte) (int64, bool) {
	var f float64
	if json.Unmarshal(value, &f) != nil || f != float64(int64(f)) || f > 1e15 || f < -1e15 {
		return 0, false
	}
	return int64(f), true
}

// unquote decodes a checked string literal.
func unquote(literal []byte) []byte {
	if len(literal) < 2 {
		return nil
	}
	inner := literal[1 : len(literal)-1]
	for _, c := range inner {
		if c == '\\' {
			var text string
			if json.Unmarshal(literal, &text) != nil {
				return nil
			}
			return []byte(text)
		}
	}
	return inner
}

// AppendString appends text as a JSON string. Invalid UTF-8 becomes U+FFFD.
func AppendString(dst []byte, text string) []byte {
	for i := 0; i < len(text); i++ {
		if c := text[i]; c < 0x20 || c >= 0x7f || c == '"' || c == '\\' {
			quoted, err := json.Marshal(text)
			if err != nil { // cannot fail for a string
				return append(dst, `""`...)
			}
			return append(dst, quoted...)
		}
	}
	dst = append(dst, '"')
	dst = append(dst, text...)
	return append(dst, '"')
}

// Member is the first value of that name in an object, nil if there is none or
// the object is invalid before it.
func Member(object []byte, name string) []byte {
	walk := Object(object)
	for walk.Next() {
		if string(walk.Key()) == name {
			return walk.Value()
		}
	}
	return nil
}

// WithString is the object with that string member in front, in place of any it
// has of the name. What follows a fault in the object is left out.
func WithString(object []byte, name, text string) []byte {
	out := make([]byte, 0, len(object)+len(name)+len(text)+8)
	out = AppendString(append(AppendString(append(out, '{'), name), ':'), text)
	walk := Object(object)
	for walk.Next() {
		if string(walk.Key()) == name {
			continue
		}
		out = append(AppendString(append(out, ','), string(walk.Key())), ':')
		out = append(out, walk.Value()...)
	}
	return append(out, '}')
}

// Without is the object without its members of that name. What follows a fault in the object is left out.
func Without(object []byte, name string) []byte {
	out := append(make([]byte, 0, len(object)), '{')
	for walk := Object(object); walk.Next(); {
		if string(walk.Key()) == name {
			continue
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(append(out, walk.key...), ':'), walk.Value()...)
	}
	return append(out, '}')
}
