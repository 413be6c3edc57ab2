package jsonspan

import (
	"bytes"
	"strconv"
	"strings"
)

// TextFault is the reason why the device's parser (cJSON) reads a string differently.
type TextFault uint8

// Faults of strings.
const (
	TextOK        TextFault = iota
	LoneSurrogate           // the whole message is dropped
	NUL                     // the string ends there
)

// escapeLength is the length of an escape with a code, as in \u0000.
const escapeLength = 6

// nextFault finds the first fault of text in a valid value from i on.
func nextFault(b []byte, i int) (at int, fault TextFault) {
	for i < len(b) {
		n := bytes.IndexByte(b[i:], '\\') // only in strings
		if n < 0 {
			break
		}
		i += n
		code, ok := escaped16(b, i)
		switch {
		case !ok:
			i += 2
		case code == 0:
			return i, NUL
		case code < 0xD800 || code > 0xDFFF:
			i += escapeLength
		default:
			low, ok := escaped16(b, i+escapeLength)
			if code > 0xDBFF || !ok || low < 0xDC00 || low > 0xDFFF {
				return i, LoneSurrogate
			}
			i += 2 * escapeLength
		}
	}
	return len(b), TextOK
}

// escaped16 is the code of the escape at i; false if there is another, or none.
func escaped16(b []byte, i int) (code int, ok bool) {
	if i+escapeLength > len(b) || b[i] != '\\' || b[i+1] != 'u' {
		return 0, false
	}
	for _, c := range b[i+2 : i+escapeLength] {
		code <<= 4
		switch {
		case c <= '9':
			code |= int(c - '0')
		default:
			code |= int(c|0x20-'a') + 10
		}
	}
	return code, true
}

// FindTextFault finds the first string of a valid value, including names, that the device's
// parser reads differently. pointer (RFC 6901) is its location, with U+FFFD in place of the
// fault.
func FindTextFault(value []byte) (pointer string, fault TextFault) {
	value = value[space(value, 0):]
	at, fault := nextFault(value, 0)
	if fault == TextOK {
		return "", TextOK
	}
	return pointerTo(value, at), fault
}

// pointerTo names the innermost member or element that has the byte at that offset.
func pointerTo(value []byte, at int) string {
	walk := Walk{}
	switch KindOf(value) {
	case KindObject:
		walk = Object(value)
	case KindArray:
		walk = Array(value)
	}
	for i := 0; walk.Next(); i++ {
		if at >= walk.pos {
			continue
		}
		step := strconv.Itoa(i)
		if walk.end == '}' {
			step = strings.ReplaceAll(string(walk.Key()), "\x00", "\uFFFD")
		}
		return Pointer(step) + pointerTo(walk.value, at-(walk.pos-len(walk.value)))
	}
	return ""
}

// Pointer is the RFC 6901 pointer of a top-level member.
func Pointer(name string) string {
	return "/" + strings.ReplaceAll(strings.ReplaceAll(name, "~", "~0"), "/", "~1")
}

// RepairText returns a valid value with U+FFFD in place of every fault of its
// strings: the value itself if there is none, else a copy.
func RepairText(value []byte) []byte {
	at, fault := nextFault(value, 0)
	if fault == TextOK {
		return value
	}
	value = bytes.Clone(value)
	for ; fault != TextOK; at, fault = nextFault(value, at) {
		at += copy(value[at:], `\ufffd`)
	}
	return value
}
