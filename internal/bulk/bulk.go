// Package bulk reads and writes devices in files: CSV with a header, or NDJSON.
// A file is checked as a whole before anything of it is taken, and neither its
// rows nor those of an export are ever in memory together.
package bulk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"math"
	"slices"
	"sync"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// Bounds of an import.
const (
	MaxBytes  = 1 << 30
	MaxRows   = 1_000_000
	MaxFaults = 1000 // listed; the rest is counted
	// maxLine is the longest line, or row of CSV with its line breaks, in bytes.
	maxLine = 256 << 10
	// checkBatch is how many rows are checked against the database at once.
	checkBatch = fleet.MaxImport
	// importBatch is how many rows are given to the core at once. While they are
	// written the next ones are read, so that the database never waits for the file.
	importBatch = fleet.MaxImport
)

// Format is that of a file.
type Format string

// Formats.
const (
	CSV    Format = "csv"
	NDJSON Format = "ndjson"
)

// LineFault is a mistake in a file. Line and Column count from 1, columns in bytes;
// Column is 0 where the fault is that of a whole line.
type LineFault struct {
	Line   int64  `json:"line"`
	Column int64  `json:"column"`
	Detail string `json:"detail"`
}

// row is one device of a file.
type row struct {
	fleet.ImportRow
	line   int64
	column int64 // of the id
	faults []LineFault
}

func (r *row) fault(column int64, format string, args ...any) {
	r.faults = append(r.faults, LineFault{r.line, column, fmt.Sprintf(format, args...)})
}

// reader reads the rows of a file.
type reader interface {
	// read returns the next row, or io.EOF. A *fileFault ends the file. The row is
	// the caller's.
	read() (row, error)
	// header is where the header is, and last where the last row is, blank lines
	// before it included.
	header() span
	last() span
}

// fileFault is a fault for which no row of a file can be taken.
type fileFault struct{ faults []LineFault }

func (f *fileFault) Error() string { return "the file cannot be read as devices" }

func newReader(file io.Reader, format Format, replace bool) (reader, error) {
	if format == NDJSON {
		return newNDJSON(file, replace), nil
	}
	return newCSV(file, replace)
}

// Core takes what an import writes; it is the fleet.Service.
type Core interface {
	CheckImport(ctx context.Context, by access.By, rows []fleet.ImportRow, replace bool, created int64) ([]fleet.Imported, error)
	Import(ctx context.Context, by access.By, rows []fleet.ImportRow, replace bool, committed func()) ([]fleet.Imported, error)
}

// Options of an import.
type Options struct {
	Format Format
	// Partial takes the rows without a fault. Without it any fault refuses the file.
	Partial bool
	// Replace lets a row replace the client of a member, and admit a device that was
	// revoked.
	Replace bool
}

// ImportReport says what became of a file.
type ImportReport struct {
	Rows         int64       `json:"rows" doc:"Devices in the file."`
	Created      int64       `json:"created"`
	Changed      int64       `json:"changed"`
	Unchanged    int64       `json:"unchanged"`
	FirstClients int64       `json:"first_clients" doc:"Rows of members without a client_id: the first client that comes with the id is admitted, also under approve."`
	Refused      int64       `json:"refused" doc:"Rows with a fault."`
	Faults       []LineFault `json:"faults" nullable:"false" doc:"At most 1000 of them."`
}

// ErrFaults is returned by Import for a file that was refused for the faults in the
// report: nothing was taken.
var ErrFaults = errors.New("the file has faults, and nothing of it was imported")

// Import checks a file and writes its devices. Of one that fails while they are
// written, with another error than ErrFaults, a part was written, the rows with the
// first ids; the same file may be imported again.
func Import(ctx context.Context, core Core, by access.By, file io.ReaderAt, opt Options) (ImportReport, error) {
	im := importer{ctx: ctx, core: core, by: by, opt: opt, seed: maphash.MakeSeed(), lines: map[uint64]uint32{}}
	im.report.Faults = []LineFault{}
	err := im.check(file)
	im.lines = nil
	if err == nil && im.report.Refused > 0 && !opt.Partial {
		err = ErrFaults
	}
	if err == nil {
		err = im.write(file)
	}
	slices.SortStableFunc(im.report.Faults, func(a, b LineFault) int { return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column)) })
	return im.report, err
}

type importer struct {
	ctx    context.Context
	core   Core
	by     access.By
	opt    Options
	report ImportReport

	seed   maphash.Seed
	lines  map[uint64]uint32 // where each device is, by a hash of its id
	faulty []uint64          // a bit for each row with a fault
	head   span              // the header of the file
	order  order             // its rows without a fault of their own
}

func (im *importer) refuse(index int64, faults ...LineFault) {
	for int64(len(im.faulty)) <= index/64 {
		im.faulty = append(im.faulty, 0)
	}
	im.faulty[index/64] |= 1 << (index % 64)
	im.report.Refused++
	im.list(faults)
}

func (im *importer) list(faults []LineFault) {
	im.report.Faults = append(im.report.Faults, faults[:min(len(faults), MaxFaults-len(im.report.Faults))]...)
}

func (im *importer) isFaulty(index int64) bool {
	return index/64 < int64(len(im.faulty)) && im.faulty[index/64]&(1<<(index%64)) != 0
}

// check reads the whole file and lists its faults.
func (im *importer) check(file io.ReaderAt) error {
	var batch batch
	var created int64
	flush := func() error {
		if len(batch.rows) == 0 {
			return nil
		}
		results, err := im.core.CheckImport(im.ctx, im.by, batch.rows, im.opt.Replace, created)
		if err != nil {
			return err
		}
		for i, result := range results {
			if result.Created {
				created++
			}
			if result.Err != nil {
				im.refuse(batch.at[i].index, batch.at[i].fault(result.Err))
			}
		}
		batch.clear()
		return nil
	}
	rows, err := newReader(io.NewSectionReader(file, 0, math.MaxInt64), im.opt.Format, im.opt.Replace)
	if err == nil {
		im.head = rows.header()
		err = im.each(rows, func(index int64, r *row) error {
			im.report.Rows++
			if len(r.faults) == 0 {
				h := maphash.String(im.seed, string(r.Device))
				if line, twice := im.lines[h]; twice {
					r.fault(r.column, "%s is on line %d already", r.Device, line)
				}
				im.lines[h] = uint32(r.line)
			}
			if len(r.faults) > 0 {
				im.refuse(index, r.faults...)
				return nil
			}
			im.order.add(index, r, rows.last())
			if batch.add(index, r); len(batch.rows) == checkBatch {
				return flush()
			}
			return nil
		})
	}
	if err == nil {
		err = flush()
	}
	var whole *fileFault
	if errors.As(err, &whole) {
		im.report.Refused++
		im.list(whole.faults)
		return ErrFaults
	}
	return err
}

// write imports the rows without a fault, in the order of their ids.
func (im *importer) write(file io.ReaderAt) error {
	var gathered batch
	var writing []*written // at most two, the last of them not committed yet
	count := func() error {
		w := writing[0]
		writing = writing[1:]
		return im.count(w)
	}
	defer func() { // what is written when an error ends the loop counts as well
		for len(writing) > 0 {
			_ = count()
		}
	}()
	flush := func() error {
		last := len(gathered.rows) == 0
		if n := len(writing); n > 0 {
			<-writing[n-1].committed
		}
		for len(writing) > 0 && (last || len(writing) > 1 || writing[0].ended()) {
			if err := count(); err != nil {
				return err
			}
		}
		if !last {
			writing, gathered = append(writing, im.begin(gathered)), batch{}
		}
		return nil
	}
	im.order.sort(im.isFaulty)
	rows, err := newReader(newOrderedFile(file, im.head, im.order.entries), im.opt.Format, im.opt.Replace)
	if err != nil {
		return err
	}
	for i := range im.order.entries {
		e := &im.order.entries[i]
		r, err := rows.read()
		if err != nil {
			return err
		}
		if len(r.faults) > 0 || string(r.Device) != string(im.order.id(e)) {
			return fmt.Errorf("internal error (bug): the row on line %d is another one when the file is read again", e.line)
		}
		r.line = int64(e.line)
		if gathered.add(int64(e.index), &r); len(gathered.rows) == importBatch {
			if err := flush(); err != nil {
				return err
			}
		}
		if err := im.ctx.Err(); err != nil {
			return err
		}
	}
	if err := flush(); err != nil {
		return err
	}
	return flush()
}

// written is a batch on its way into the database.
type written struct {
	batch     batch
	committed chan struct{} // closed when it is in the database, or done
	done      chan struct{} // closed when it is in force, too, or has failed
	results   []fleet.Imported
	err       error
}

func (w *written) ended() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

func (im *importer) begin(b batch) *written {
	w := &written{batch: b, committed: make(chan struct{}), done: make(chan struct{})}
	committed := sync.OnceFunc(func() { close(w.committed) })
	go func() {
		defer committed()
		defer close(w.done)
		w.results, w.err = im.core.Import(im.ctx, im.by, b.rows, im.opt.Replace, committed)
	}()
	return w
}

// count waits for a batch and reports what became of its rows.
func (im *importer) count(w *written) error {
	<-w.done
	for i, result := range w.results {
		switch {
		case result.Err != nil: // it changed after it was checked
			im.report.Refused++
			im.list([]LineFault{w.batch.at[i].fault(result.Err)})
			continue
		case result.Created:
			im.report.Created++
		case result.Changed:
			im.report.Changed++
		default:
			im.report.Unchanged++
		}
		if result.FirstClient {
			im.report.FirstClients++
		}
	}
	return w.err
}

// each calls f with the rows of a file.
func (im *importer) each(rows reader, f func(index int64, r *row) error) error {
	for index := int64(0); ; index++ {
		r, err := rows.read()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case index == MaxRows:
			return &fileFault{[]LineFault{{Line: r.line, Detail: fmt.Sprintf("a file may have %d devices; split it", MaxRows)}}}
		}
		if err := f(index, &r); err != nil {
			return err
		}
		if err := im.ctx.Err(); err != nil {
			return err
		}
	}
}

// batch gathers rows, with where they are in the file.
type batch struct {
	rows []fleet.ImportRow
	at   []place
}

type place struct{ index, line, column int64 }

func (p place) fault(err error) LineFault {
	return LineFault{p.line, p.column, devices.AsError(err).Detail}
}

func (b *batch) add(index int64, r *row) {
	b.rows = append(b.rows, r.ImportRow)
	b.at = append(b.at, place{index, r.line, r.column})
}

func (b *batch) clear() { b.rows, b.at = b.rows[:0], b.at[:0] }
