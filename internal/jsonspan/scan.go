package jsonspan

import (
	"bytes"
	"encoding/binary"
	"unicode/utf8"
)

// The scanners below return where something ends: valueEnd and what it calls
// check everything on the way, skipEnd only looks for ends.

func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// valueEnd returns the end of the valid value that starts at i. It keeps the
// open brackets in two words instead of a stack: bit d is set if level d is
// an object.
func valueEnd(b []byte, i int) (int, error) {
	var objects uint64
	depth := 0
	for {
		i = space(b, i)
		if i >= len(b) {
			return 0, ErrSyntax
		}
		var err error
		switch c := b[i]; {
		case c == '{' || c == '[':
			if depth == MaxDepth {
				return 0, ErrDepth
			}
			closer := byte(']')
			objects &^= 1 << depth
			if c == '{' {
				closer = '}'
				objects |= 1 << depth
			}
			depth++
			i = space(b, i+1)
			if i < len(b) && b[i] == closer {
				i++
				depth--
				break
			}
			if c == '{' {
				if i, err = memberName(b, i); err != nil {
					return 0, err
				}
			}
			continue
		case c == '"':
			i, err = stringEnd(b, i)
		case c == '-' || c >= '0' && c <= '9':
			i, err = numberEnd(b, i)
		case c == 't':
			i, err = literalEnd(b, i, "true")
		case c == 'f':
			i, err = literalEnd(b, i, "false")
		case c == 'n':
			i, err = literalEnd(b, i, "null")
		default:
			err = ErrSyntax
		}
		if err != nil {
			return 0, err
		}
		// A value has ended: close every level that ends here, then go on to
		// the next element.
		for {
			if depth == 0 {
				return i, nil
			}
			i = space(b, i)
			if i >= len(b) {
				return 0, ErrSyntax
			}
			object := objects>>(depth-1)&1 == 1
			if b[i] == ',' {
				i++
				if object {
					if i, err = memberName(b, space(b, i)); err != nil {
						return 0, err
					}
				}
				break
			}
			if object != (b[i] == '}') || b[i] != '}' && b[i] != ']' {
				return 0, ErrSyntax
			}
			i++
			depth--
		}
	}
}

// skipEnd is valueEnd for values known to be valid: it only finds their
// ends.
func skipEnd(b []byte, i int) (int, error) {
	depth := 0
	for i < len(b) {
		switch b[i] {
		case '"':
			i++
			for {
				n := bytes.IndexByte(b[min(i, len(b)):], '"')
				if n < 0 {
					return 0, ErrSyntax
				}
				i += n + 1
				if !escaped(b, i-1) {
					break
				}
			}
			if depth == 0 {
				return i, nil
			}
		case '{', '[':
			depth++
			i++
		case '}', ']':
			depth--
			i++
			if depth == 0 {
				return i, nil
			}
			if depth < 0 {
				return 0, ErrSyntax
			}
		default:
			if depth > 0 {
				i++
				continue
			}
			start := i
			for i < len(b) && b[i] != ',' && b[i] != '}' && b[i] != ']' && b[i] > ' ' {
				i++
			}
			if i == start {
				return 0, ErrSyntax
			}
			return i, nil
		}
	}
	return 0, ErrSyntax
}

// escaped reports whether the quote at i follows an odd number of
// backslashes.
func escaped(b []byte, i int) bool {
	odd := false
	for i--; i >= 0 && b[i] == '\\'; i-- {
		odd = !odd
	}
	return odd
}

// memberName skips `"name":`.
func memberName(b []byte, i int) (int, error) {
	end, err := stringEnd(b, i)
	if err != nil {
		return 0, err
	}
	end = space(b, end)
	if end >= len(b) || b[end] != ':' {
		return 0, ErrSyntax
	}
	return end + 1, nil
}

func stringEnd(b []byte, i int) (int, error) {
	if i >= len(b) || b[i] != '"' {
		return 0, ErrSyntax
	}
	ascii := true
	start := i + 1
	for i = start; i < len(b); i++ {
		for i+8 <= len(b) && plain(binary.LittleEndian.Uint64(b[i:])) {
			i += 8
		}
		if i == len(b) {
			break
		}
		switch c := b[i]; {
		case c == '"':
			if !ascii && !utf8.Valid(b[start:i]) {
				return 0, ErrUTF8
			}
			return i + 1, nil
		case c == '\\':
			i++
			if i >= len(b) {
				return 0, ErrSyntax
			}
			switch b[i] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			case 'u':
				if i+4 >= len(b) || !hex4(b[i+1:i+5]) {
					return 0, ErrSyntax
				}
				i += 4
			default:
				return 0, ErrSyntax
			}
		case c < 0x20:
			return 0, ErrSyntax
		case c >= utf8.RuneSelf:
			ascii = false
		}
	}
	return 0, ErrSyntax
}

// plain reports whether none of eight bytes ends a string, starts an escape, is a
// control character or is outside ASCII: the usual trick of finding a zero or
// small byte in a word (Hacker's Delight, 6-1).
func plain(w uint64) bool {
	const ones, high = 0x0101010101010101, 0x8080808080808080
	quote, escape := w^ones*'"', w^ones*'\\'
	found := w | (w - ones*0x20) | (quote - ones) | (escape - ones)
	return found&high == 0
}

func hex4(b []byte) bool {
	for _, c := range b {
		if !(c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'f') {
			return false
		}
	}
	return true
}

func numberEnd(b []byte, i int) (int, error) {
	if b[i] == '-' {
		i++
	}
	switch {
	case i < len(b) && b[i] == '0':
		i++
	case i < len(b) && b[i] >= '1' && b[i] <= '9':
		i = digits(b, i)
	default:
		return 0, ErrSyntax
	}
	if i < len(b) && b[i] == '.' {
		end := digits(b, i+1)
		if end == i+1 {
			return 0, ErrSyntax
		}
		i = end
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		end := digits(b, i)
		if end == i {
			return 0, ErrSyntax
		}
		i = end
	}
	return i, nil
}

func digits(b []byte, i int) int {
	for i < len(b) && b[i] >= '0' && b[i] <= '9' {
		i++
	}
	return i
}

func literalEnd(b []byte, i int, word string) (int, error) {
	if len(b)-i < len(word) || string(b[i:i+len(word)]) != word {
		return 0, ErrSyntax
	}
	return i + len(word), nil
}
