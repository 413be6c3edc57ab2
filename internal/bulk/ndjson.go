package bulk

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"fleetd/internal/api"
	"fleetd/internal/fleet"
	"fleetd/internal/jsonspan"
)

// ndjsonReader reads rows of NDJSON: one object on each line.
type ndjsonReader struct {
	lines   *bufio.Reader
	line    int64
	offset  int64  // bytes
	span    span   // of the last line
	long    []byte // a line longer than the buffer of lines
	replace bool
}

func newNDJSON(file io.Reader, replace bool) *ndjsonReader {
	return &ndjsonReader{lines: bufio.NewReaderSize(file, 64<<10), replace: replace}
}

// header is empty: every line contains its names.
func (r *ndjsonReader) header() span { return span{} }

func (r *ndjsonReader) last() span { return r.span }

// next returns the next line that is not blank, without the line break.
func (r *ndjsonReader) next() ([]byte, error) {
	for {
		text, err := r.lines.ReadSlice('\n')
		r.line++
		r.span.from = r.offset
		r.offset += int64(len(text))
		if errors.Is(err, bufio.ErrBufferFull) {
			r.long = append(r.long[:0], text...)
			for errors.Is(err, bufio.ErrBufferFull) && len(r.long) <= maxLine {
				text, err = r.lines.ReadSlice('\n')
				r.long = append(r.long, text...)
				r.offset += int64(len(text))
			}
			text = r.long
		}
		if len(text) > maxLine {
			return nil, &fileFault{[]api.LineFault{{Line: r.line, Detail: fmt.Sprintf("the line has more than %d bytes", maxLine)}}}
		}
		if mark := bytes.HasPrefix(text, byteOrderMark); mark && r.line == 1 {
			text = text[len(byteOrderMark):]
			r.span.from += int64(len(byteOrderMark))
		}
		r.span.to = r.offset
		switch {
		case len(bytes.TrimSpace(text)) > 0 && (err == nil || errors.Is(err, io.EOF)):
			return bytes.TrimRight(text, "\r\n"), nil
		case err != nil:
			return nil, err
		}
	}
}

func (r *ndjsonReader) read() (row, error) {
	text, err := r.next()
	if err != nil {
		return row{}, err
	}
	out := row{line: r.line}
	// Spans share the line's array, so their capacity gives their position.
	column := func(span []byte) int64 { return int64(cap(text)-cap(span)) + 1 }
	var seen []string
	walk := jsonspan.Object(text)
	for walk.Next() {
		name, value := string(walk.Key()), walk.Value()
		at := column(value)
		if slices.Contains(seen, name) {
			out.fault(at, "%s is given twice", quoted(name))
			continue
		}
		seen = append(seen, name)
		switch {
		case slices.Contains(importFields, name):
			given, isText := jsonspan.String(value)
			null := jsonspan.KindOf(value) == jsonspan.KindNull
			switch {
			case !isText && (!null || name == fieldID):
				out.fault(at, "%s must be a string", name)
			case name == fieldAdmission:
				out.setAdmission(at, given, r.replace)
			default:
				out.set(name, at, given, null)
			}
		case name == fieldLabels:
			out.readLabels(value, column)
		default:
			if !slices.Contains(reported, name) {
				out.fault(at, "unknown member %s; the members are "+columns+" and labels", quoted(name))
			}
		}
	}
	if err := walk.Err(); err != nil {
		out.faults = []api.LineFault{{Line: r.line, Column: syntaxColumn(text), Detail: "the line must be one JSON object: " + err.Error()}}
		return out, nil
	}
	if !slices.Contains(seen, fieldID) {
		out.fault(1, "id is missing")
	}
	out.checkLabels()
	return out, nil
}

func (r *row) readLabels(object []byte, column func([]byte) int64) {
	switch jsonspan.KindOf(object) {
	case jsonspan.KindObject:
	default:
		r.fault(column(object), "labels must be an object of strings")
		return
	}
	walk := jsonspan.Object(object)
	for walk.Next() {
		key, value := string(walk.Key()), walk.Value()
		text, isText := jsonspan.String(value)
		null := jsonspan.KindOf(value) == jsonspan.KindNull
		_, twice := r.Labels[key]
		switch {
		case twice:
			r.fault(column(value), "label %s is given twice", quoted(key))
		case fleet.CheckLabel(key, "") != nil:
			r.fault(column(value), "label %s: keys are 1 to %d of [A-Za-z0-9_-]", quoted(key), fleet.MaxLabelKey)
		case !isText && !null:
			r.fault(column(value), "label %s must be a string, or null to remove it", key)
		default:
			r.setLabel(key, column(value), text, null)
		}
	}
}

// syntaxColumn returns the column of the first JSON error.
func syntaxColumn(text []byte) int64 {
	var v any
	if syntax, ok := errors.AsType[*json.SyntaxError](json.Unmarshal(text, &v)); ok {
		return max(1, syntax.Offset)
	}
	return 1
}
