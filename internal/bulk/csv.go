package bulk

import (
	"bufio"
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/cleantext"
	"fleetd/internal/fleet"
)

// importFields are the columns and members that an import reads, beside labels.
var importFields = []string{fieldID, fieldName, fieldTransport, oldTransport, fieldSerial, fieldClientID, fieldAdmission}

// cellNull is a cell that removes a value; an empty one keeps it.
const cellNull = `\null`

// risky reports whether a cell with this text would be misread: as a formula by a spreadsheet, or as no value
// by an import.
func risky(text string) bool {
	text = strings.TrimLeft(text, "'")
	return text == "" || text[0] == '\\' || cleantext.IsFormula(text)
}

// Cell returns a value as a CSV cell: with an apostrophe before a risky one.
func Cell(value string) string {
	if risky(value) {
		return "'" + value
	}
	return value
}

// uncell returns the value of a cell.
func uncell(text string) string {
	if len(text) > 0 && text[0] == '\'' && risky(text[1:]) {
		return text[1:]
	}
	return text
}

// csvReader reads rows of CSV.
type csvReader struct {
	input   *bounded
	csv     *csv.Reader
	names   []string // of the columns
	base    int64    // start of the text, after a byte order mark
	head    span
	span    span  // of the last row
	line    int64 // first line of the last row
	replace bool
}

var byteOrderMark = []byte("\xEF\xBB\xBF") // of UTF-8; spreadsheets write it

func newCSV(file io.Reader, replace bool) (*csvReader, error) {
	buffered, base := bufio.NewReader(file), int64(0)
	if start, err := buffered.Peek(len(byteOrderMark)); err == nil && bytes.Equal(start, byteOrderMark) {
		if _, err := buffered.Discard(len(byteOrderMark)); err != nil {
			return nil, err
		}
		base = int64(len(byteOrderMark))
	}
	r := &csvReader{input: &bounded{r: buffered}, base: base, replace: replace}
	r.csv = csv.NewReader(r.input)
	r.csv.FieldsPerRecord, r.csv.ReuseRecord = -1, true
	err := r.readHeader()
	r.head = r.span
	return r, err
}

func (r *csvReader) header() span { return r.head }

func (r *csvReader) last() span { return r.span }

func (r *csvReader) readHeader() error {
	header, err := r.next()
	var syntax *csv.ParseError
	switch {
	case errors.Is(err, io.EOF):
		return &fileFault{[]api.LineFault{{Line: 1, Detail: "the file is empty; its first line must contain the column names, including id"}}}
	case errors.As(err, &syntax):
		return &fileFault{[]api.LineFault{syntaxFault(syntax)}}
	case err != nil:
		return err
	}
	if limit := MaxLabelColumns + len(importFields) + len(reported); len(header) > limit {
		return &fileFault{[]api.LineFault{{Line: 1, Detail: fmt.Sprintf("the first line names %d columns; a file may have %d, of which %d may be labels", len(header), limit, MaxLabelColumns)}}}
	}
	var faults []api.LineFault
	for i, name := range header {
		name = strings.TrimSpace(name)
		problem := ""
		key, isLabel := strings.CutPrefix(name, labelPrefix)
		switch {
		case slices.Contains(r.names, name):
			problem = "the column %s occurs twice"
		case isLabel:
			if fleet.CheckLabel(key, "") != nil {
				problem = fmt.Sprintf("the column %%s must be label.KEY, with a key of 1 to %d of [A-Za-z0-9_-]", fleet.MaxLabelKey)
			}
		case !slices.Contains(importFields, name) && !slices.Contains(reported, name):
			problem = "unknown column %s; the columns are " + columns + " and label.KEY, separated by commas"
		}
		if problem != "" {
			line, column := r.csv.FieldPos(i)
			faults = append(faults, api.LineFault{Line: int64(line), Column: int64(column), Detail: fmt.Sprintf(problem, quoted(name))})
		}
		r.names = append(r.names, strings.Clone(name))
	}
	r.line = 1
	if !slices.Contains(r.names, fieldID) {
		faults = append(faults, api.LineFault{Line: 1, Detail: "the first line must contain the column names, including id"})
	}
	if faults != nil {
		return &fileFault{faults}
	}
	return nil
}

// next reads a record of limited length.
func (r *csvReader) next() ([]string, error) {
	r.input.left = maxLine
	r.span.from = r.base + r.csv.InputOffset()
	record, err := r.csv.Read()
	r.span.to = r.base + r.csv.InputOffset()
	if errors.Is(err, errLongLine) {
		return nil, &fileFault{[]api.LineFault{{Line: r.line + 1, Detail: fmt.Sprintf("the row that starts here has more than %d bytes; perhaps a quote is not closed", maxLine)}}}
	}
	return record, err
}

func syntaxFault(err *csv.ParseError) api.LineFault {
	detail := err.Err.Error()
	switch {
	case errors.Is(err.Err, csv.ErrQuote):
		detail = `a quote in a quoted cell is written twice, and the cell ends with one`
	case errors.Is(err.Err, csv.ErrBareQuote):
		detail = `a cell with a quote must be in quotes, with the quote in it written twice`
	}
	return api.LineFault{Line: int64(err.Line), Column: int64(err.Column), Detail: detail}
}

func (r *csvReader) read() (row, error) {
	record, err := r.next()
	if syntax, ok := errors.AsType[*csv.ParseError](err); ok {
		f := syntaxFault(syntax)
		r.line = f.Line
		return row{line: f.Line, faults: []api.LineFault{f}}, nil
	}
	if err != nil {
		return row{}, err
	}
	line, _ := r.csv.FieldPos(0)
	out := row{line: int64(line)}
	r.line = out.line
	if len(record) != len(r.names) {
		out.fault(0, "the row has %d cells, but the first line has %d columns", len(record), len(r.names))
		return out, nil
	}
	for i, text := range record {
		name := r.names[i]
		at, column := r.csv.FieldPos(i)
		out.line = int64(at) // of a cell after one with a line break
		null := text == cellNull
		value := uncell(text)
		if null {
			value = ""
		}
		key, isLabel := strings.CutPrefix(name, labelPrefix)
		switch {
		case text == "" && name != fieldID:
		case isLabel:
			out.setLabel(key, int64(column), value, null)
		case name == fieldAdmission:
			out.setAdmission(int64(column), value, r.replace)
		default:
			out.set(name, int64(column), value, null)
		}
	}
	out.line = int64(line)
	out.checkLabels()
	return out, nil
}

var errLongLine = errors.New("a line is too long")

// bounded fails if a record needs more than left bytes, including those that a buffered reader has read ahead.
type bounded struct {
	r    io.Reader
	left int
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errLongLine
	}
	n, err := b.r.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
