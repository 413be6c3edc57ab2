package bulk

import (
	"cmp"
	"fmt"
	"io"
	"slices"
)

// span is a range of bytes in a file.
type span struct{ from, to int64 }

// order holds the positions of the rows in a file: 24 bytes and the id for each. Rows are written in the order
// of their ids: a batch then changes adjacent pages of the tables and their indexes.
type order struct {
	entries []entry
	ids     []byte // each after its length
}

type entry struct {
	at     int64 // position in the file
	length uint32
	line   uint32
	index  uint32
	id     uint32 // position in ids
}

func (o *order) add(index int64, r *row, at span) {
	o.entries = append(o.entries, entry{at.from, uint32(at.to - at.from), uint32(r.line), uint32(index), uint32(len(o.ids))})
	o.ids = append(append(o.ids, byte(len(r.Device))), r.Device...)
}

// id returns the id of a row; it must not be modified.
func (o *order) id(e *entry) []byte {
	return o.ids[e.id+1:][:o.ids[e.id]]
}

// sort sorts the rows by id, without the skipped ones.
func (o *order) sort(skip func(index int64) bool) {
	o.entries = slices.DeleteFunc(o.entries, func(e entry) bool { return skip(int64(e.index)) })
	slices.SortFunc(o.entries, func(a, b entry) int {
		return cmp.Or(slices.Compare(o.id(&a), o.id(&b)), cmp.Compare(a.index, b.index))
	})
}

// orderedFile reads the header of a file and then its rows in another order.
type orderedFile struct {
	file io.ReaderAt
	rows []entry
	next span   // the header, then the next row
	text []byte // unread rest of it
	buf  []byte
}

func newOrderedFile(file io.ReaderAt, header span, rows []entry) *orderedFile {
	return &orderedFile{file: file, rows: rows, next: header}
}

func (f *orderedFile) Read(p []byte) (int, error) {
	for len(f.text) == 0 {
		if f.next.from == f.next.to {
			if len(f.rows) == 0 {
				return 0, io.EOF
			}
			e := &f.rows[0]
			f.rows, f.next = f.rows[1:], span{e.at, e.at + int64(e.length)}
		}
		n := int(f.next.to - f.next.from)
		f.buf = slices.Grow(f.buf[:0], n+1)[:n]
		if k, err := f.file.ReadAt(f.buf, f.next.from); k < n {
			return 0, fmt.Errorf("read the file again: %w", err)
		}
		if n > 0 && f.buf[n-1] != '\n' { // the last row of the file
			f.buf = append(f.buf, '\n')
		}
		f.text, f.next = f.buf, span{}
	}
	n := copy(p, f.text)
	f.text = f.text[n:]
	return n, nil
}
