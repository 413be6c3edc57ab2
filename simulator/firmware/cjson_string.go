package firmware

import (
	"bytes"
	"unicode/utf8"
)

// string reads a quoted string at pos. Text without escapes is returned in place; text with escapes is decoded into
// the document's side buffer.
func (d *jsonDoc) string() ([]byte, error) {
	start := d.pos + 1
	end, escaped := start, false
	for {
		if end >= len(d.src) {
			return nil, errJSON
		}
		if d.src[end] == '"' {
			break
		}
		if d.src[end] == '\\' {
			escaped = true
			end++
		}
		end++
	}
	raw := d.src[start:end]
	d.pos = end + 1
	if !escaped {
		return cString(raw), nil
	}
	// A reallocation of side leaves earlier strings in the old array, which stays valid.
	from := len(d.side)
	for i := 0; i < len(raw); {
		if raw[i] != '\\' {
			d.side = append(d.side, raw[i])
			i++
			continue
		}
		n, err := d.escape(raw[i:])
		if err != nil {
			return nil, err
		}
		i += n
	}
	return cString(d.side[from:len(d.side):len(d.side)]), nil
}

// escape decodes one escape sequence at the start of s and returns its length.
func (d *jsonDoc) escape(s []byte) (int, error) {
	if len(s) < 2 {
		return 0, errJSON
	}
	switch c := s[1]; c {
	case '"', '\\', '/':
		d.side = append(d.side, c)
	case 'b':
		d.side = append(d.side, '\b')
	case 'f':
		d.side = append(d.side, '\f')
	case 'n':
		d.side = append(d.side, '\n')
	case 'r':
		d.side = append(d.side, '\r')
	case 't':
		d.side = append(d.side, '\t')
	case 'u':
		return d.unicode(s)
	default:
		return 0, errJSON
	}
	return 2, nil
}

// unicode follows utf16_literal_to_utf8 of cJSON.c.
func (d *jsonDoc) unicode(s []byte) (int, error) {
	if len(s) < 6 {
		return 0, errJSON
	}
	first := hex4(s[2:6])
	if first >= 0xDC00 && first <= 0xDFFF {
		return 0, errJSON
	}
	if first < 0xD800 || first > 0xDBFF {
		d.side = utf8.AppendRune(d.side, rune(first))
		return 6, nil
	}
	if len(s) < 12 || s[6] != '\\' || s[7] != 'u' {
		return 0, errJSON
	}
	second := hex4(s[8:12])
	if second < 0xDC00 || second > 0xDFFF {
		return 0, errJSON
	}
	d.side = utf8.AppendRune(d.side, rune(0x10000+(first&0x3FF)<<10|second&0x3FF))
	return 12, nil
}

// hex4 is parse_hex4: a bad digit makes the whole number 0 instead of an error.
func hex4(s []byte) int {
	n := 0
	for _, c := range s {
		n <<= 4
		switch {
		case c >= '0' && c <= '9':
			n += int(c - '0')
		case c >= 'a' && c <= 'f':
			n += int(c-'a') + 10
		case c >= 'A' && c <= 'F':
			n += int(c-'A') + 10
		default:
			return 0
		}
	}
	return n
}

// cString ends text where C would.
func cString(b []byte) []byte {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		return b[:i]
	}
	return b
}

// appendJSONString prints s as cJSON_PrintUnformatted does: bytes from 0x20 up are left as they are.
func appendJSONString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for i := 0; i < len(s); i++ {
		switch c := s[i]; c {
		case '"', '\\':
			b = append(b, '\\', c)
		case '\b':
			b = append(b, '\\', 'b')
		case '\f':
			b = append(b, '\\', 'f')
		case '\n':
			b = append(b, '\\', 'n')
		case '\r':
			b = append(b, '\\', 'r')
		case '\t':
			b = append(b, '\\', 't')
		default:
			if c < ' ' {
				b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
			} else {
				b = append(b, c)
			}
		}
	}
	return append(b, '"')
}
