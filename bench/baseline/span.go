package main

import (
	"encoding/json"
	"errors"
	"strconv"
)

var errSyntax = errors.New("the JSON is not as expected")

// splitReply takes an answer of a device apart without decoding it.
func splitReply(message []byte) (id uint64, result []byte, err error) {
	var payload, number []byte
	if err := members(message, func(name, value []byte) {
		if string(name) == "payload" {
			payload = value
		}
	}); err != nil {
		return 0, nil, err
	}
	if err := members(payload, func(name, value []byte) {
		switch string(name) {
		case "id":
			number = value
		case "result":
			result = value
		}
	}); err != nil {
		return 0, nil, err
	}
	if !json.Valid(result) {
		return 0, nil, errSyntax
	}
	id, err = strconv.ParseUint(string(number), 10, 64)
	return id, result, err
}

// members calls each with every member of an object; a value is the text that it takes.
func members(object []byte, each func(name, value []byte)) error {
	s := scanner{text: object}
	if !s.skip('{') {
		return errSyntax
	}
	for !s.skip('}') {
		name := s.value()
		if len(name) < 2 || name[0] != '"' || !s.skip(':') {
			return errSyntax
		}
		each(name[1:len(name)-1], s.value())
		s.skip(',')
	}
	return nil
}

// scanner goes through JSON text from value to value.
type scanner struct {
	text []byte
	at   int
}

// skip passes space, and the byte c if it comes next.
func (s *scanner) skip(c byte) bool {
	for s.at < len(s.text) && (s.text[s.at] == ' ' || s.text[s.at] == '\n' || s.text[s.at] == '\r' || s.text[s.at] == '\t') {
		s.at++
	}
	if s.at == len(s.text) || s.text[s.at] != c {
		return false
	}
	s.at++
	return true
}

// value passes one value, by its brackets and quotes alone.
func (s *scanner) value() []byte {
	s.skip(0) // the space before it
	from, depth := s.at, 0
	for ; s.at < len(s.text); s.at++ {
		switch s.text[s.at] {
		case '"':
			for s.at++; s.at < len(s.text) && s.text[s.at] != '"'; s.at++ {
				if s.text[s.at] == '\\' {
					s.at++
				}
			}
			if depth == 0 {
				s.at = min(s.at+1, len(s.text))
				return s.text[from:s.at]
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				s.at++
			}
			if depth <= 0 {
				return s.text[from:s.at]
			}
		case ',', ' ', '\n', '\r', '\t':
			if depth == 0 {
				return s.text[from:s.at]
			}
		}
	}
	s.at = min(s.at, len(s.text))
	return s.text[from:s.at]
}
