package firmware

import (
	"bytes"
	"errors"
	"math"
	"strconv"
)

// The device reads JSON with cJSON 1.7.19. This file follows cJSON.c, not RFC 8259, because a server is judged by what
// the device makes of its text: keys match without regard to case, the first duplicate wins, text after the first value
// is ignored, any byte up to 0x20 is white space, and a NUL escape ends a string.

// maxDepth is CJSON_NESTING_LIMIT.
const maxDepth = 1000

var errJSON = errors.New("not JSON to cJSON")

type jsonKind uint8

const (
	jsonNull jsonKind = iota
	jsonFalse
	jsonTrue
	jsonNumber
	jsonString
	jsonArray
	jsonObject
)

// jsonNode is one value. Children form a list through next, as in cJSON; index 0 is the root, so 0 also means "none".
type jsonNode struct {
	kind  jsonKind
	key   []byte
	text  []byte
	num   float64
	child int32
	next  int32
}

// jsonDoc is a parsed text. It is reusable and refers to the text it was given, so it dies with that buffer. One
// goroutine at a time.
type jsonDoc struct {
	nodes []jsonNode
	src   []byte
	pos   int
	depth int
	side  []byte
}

// value is a node of a document; the zero value stands for cJSON's null pointer, and every question to it answers no.
type value struct {
	doc *jsonDoc
	at  int32
}

// parse reads one value from src and returns it. Trailing text is ignored, as cJSON_ParseWithLength does.
func (d *jsonDoc) parse(src []byte) (value, error) {
	d.nodes = d.nodes[:0]
	d.side = d.side[:0]
	d.src, d.pos, d.depth = src, 0, 0
	if bytes.HasPrefix(src, []byte("\xef\xbb\xbf")) {
		d.pos = 3
	}
	d.space()
	if _, err := d.value(nil); err != nil {
		return value{}, err
	}
	return value{doc: d, at: 0}, nil
}

// reset drops references to the caller's buffer and returns memory that one unusually big text made it grow to.
func (d *jsonDoc) reset() {
	clear(d.nodes)
	d.src = nil
	if cap(d.nodes) > 256 {
		d.nodes = nil
	}
	if cap(d.side) > 16<<10 {
		d.side = nil
	}
}

func (d *jsonDoc) space() {
	for d.pos < len(d.src) && d.src[d.pos] <= ' ' {
		d.pos++
	}
}

func (d *jsonDoc) add(n jsonNode) int32 {
	d.nodes = append(d.nodes, n)
	return int32(len(d.nodes) - 1)
}

func (d *jsonDoc) value(key []byte) (int32, error) {
	rest := d.src[d.pos:]
	switch {
	case bytes.HasPrefix(rest, []byte("null")):
		d.pos += 4
		return d.add(jsonNode{kind: jsonNull, key: key}), nil
	case bytes.HasPrefix(rest, []byte("false")):
		d.pos += 5
		return d.add(jsonNode{kind: jsonFalse, key: key}), nil
	case bytes.HasPrefix(rest, []byte("true")):
		d.pos += 4
		return d.add(jsonNode{kind: jsonTrue, key: key}), nil
	case len(rest) == 0:
		return 0, errJSON
	case rest[0] == '"':
		text, err := d.string()
		if err != nil {
			return 0, err
		}
		return d.add(jsonNode{kind: jsonString, key: key, text: text}), nil
	case rest[0] == '-' || (rest[0] >= '0' && rest[0] <= '9'):
		num, err := d.number()
		if err != nil {
			return 0, err
		}
		return d.add(jsonNode{kind: jsonNumber, key: key, num: num}), nil
	case rest[0] == '[':
		return d.container(key, jsonArray, ']')
	case rest[0] == '{':
		return d.container(key, jsonObject, '}')
	}
	return 0, errJSON
}

func (d *jsonDoc) container(key []byte, kind jsonKind, end byte) (int32, error) {
	if d.depth >= maxDepth {
		return 0, errJSON
	}
	d.depth++
	self := d.add(jsonNode{kind: kind, key: key})
	d.pos++
	d.space()
	if d.pos < len(d.src) && d.src[d.pos] == end {
		d.pos++
		d.depth--
		return self, nil
	}
	last := int32(0)
	for {
		var name []byte
		if kind == jsonObject {
			d.space()
			if d.pos >= len(d.src) || d.src[d.pos] != '"' {
				return 0, errJSON
			}
			var err error
			if name, err = d.string(); err != nil {
				return 0, err
			}
			d.space()
			if d.pos >= len(d.src) || d.src[d.pos] != ':' {
				return 0, errJSON
			}
			d.pos++
		}
		d.space()
		item, err := d.value(name)
		if err != nil {
			return 0, err
		}
		if last == 0 {
			d.nodes[self].child = item
		} else {
			d.nodes[last].next = item
		}
		last = item
		d.space()
		if d.pos >= len(d.src) {
			return 0, errJSON
		}
		switch d.src[d.pos] {
		case ',':
			d.pos++
		case end:
			d.pos++
			d.depth--
			return self, nil
		default:
			return 0, errJSON
		}
	}
}

// number takes the longest prefix strtod accepts out of the run of number characters.
func (d *jsonDoc) number() (float64, error) {
	end := d.pos
	for end < len(d.src) {
		c := d.src[end]
		if (c < '0' || c > '9') && c != '+' && c != '-' && c != 'e' && c != 'E' && c != '.' {
			break
		}
		end++
	}
	if n := numberPrefix(d.src[d.pos:end]); n > 0 {
		f, err := strconv.ParseFloat(string(d.src[d.pos:d.pos+n]), 64)
		if err != nil && !errors.Is(err, strconv.ErrRange) {
			return 0, errJSON
		}
		d.pos += n
		return f, nil
	}
	return 0, errJSON
}

// numberPrefix returns how many bytes of s strtod would consume.
func numberPrefix(s []byte) int {
	i, digits := 0, 0
	if i < len(s) && (s[i] == '-' || s[i] == '+') {
		i++
	}
	for ; i < len(s) && s[i] >= '0' && s[i] <= '9'; i++ {
		digits++
	}
	if i < len(s) && s[i] == '.' {
		i++
		for ; i < len(s) && s[i] >= '0' && s[i] <= '9'; i++ {
			digits++
		}
	}
	if digits == 0 {
		return 0
	}
	if i < len(s) && (s[i] == 'e' || s[i] == 'E') {
		j := i + 1
		if j < len(s) && (s[j] == '-' || s[j] == '+') {
			j++
		}
		if j < len(s) && s[j] >= '0' && s[j] <= '9' {
			for j < len(s) && s[j] >= '0' && s[j] <= '9' {
				j++
			}
			i = j
		}
	}
	return i
}

func (v value) ok() bool { return v.doc != nil }

func (v value) is(k jsonKind) bool { return v.doc != nil && v.doc.nodes[v.at].kind == k }

// isBool mirrors cJSON_IsBool: true and false only, never 0 and 1.
func (v value) isBool() bool { return v.is(jsonTrue) || v.is(jsonFalse) }

// get mirrors cJSON_GetObjectItem: it also walks arrays, whose items have no key and therefore never match.
func (v value) get(name string) value {
	if v.doc == nil {
		return value{}
	}
	for i := v.doc.nodes[v.at].child; i != 0; i = v.doc.nodes[i].next {
		if equalFoldASCII(v.doc.nodes[i].key, name) {
			return value{doc: v.doc, at: i}
		}
	}
	return value{}
}

// each calls f for every child in text order.
func (v value) each(f func(key string, item value)) {
	if v.doc == nil {
		return
	}
	for i := v.doc.nodes[v.at].child; i != 0; i = v.doc.nodes[i].next {
		f(string(v.doc.nodes[i].key), value{doc: v.doc, at: i})
	}
}

// bytes is valuestring; it lives as long as the parsed buffer.
func (v value) bytes() []byte {
	if !v.is(jsonString) {
		return nil
	}
	return v.doc.nodes[v.at].text
}

func (v value) string() string { return string(v.bytes()) }

// number is valuedouble.
func (v value) number() float64 {
	if !v.is(jsonNumber) {
		return 0
	}
	return v.doc.nodes[v.at].num
}

// int32 is valueint: truncated towards zero and saturated at the limits of a C int.
func (v value) int32() int32 {
	n := v.number()
	switch {
	case n >= math.MaxInt32:
		return math.MaxInt32
	case n <= math.MinInt32:
		return math.MinInt32
	}
	return int32(n)
}

func equalFoldASCII(a []byte, b string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		x, y := a[i], b[i]
		if x != y && lowerASCII(x) != lowerASCII(y) {
			return false
		}
	}
	return true
}

func lowerASCII(c byte) byte {
	if c >= 'A' && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}
