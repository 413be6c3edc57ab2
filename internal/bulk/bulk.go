// Package bulk reads and writes devices in files: CSV with a header, or NDJSON. A file is checked completely
// before any row is imported; the rows of a file or an export are never in memory all at once.
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
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// Limits of an import.
const (
	MaxBytes  = 1 << 30
	MaxRows   = 1_000_000
	MaxFaults = 1000 // listed; further ones are counted
	// maxLine is the longest line, or row of CSV with its line breaks, in bytes.
	maxLine = 256 << 10
	// checkBatch is how many rows are checked against the database at a time.
	checkBatch = fleet.MaxImport
	// importBatch is how many rows are passed to the core at a time. The next ones are read
	// while they are written, so that the database does not wait for the file.
	importBatch = fleet.MaxImport
)

// Format is the format of a file.
type Format string

// Formats.
const (
	CSV    Format = "csv"
	NDJSON Format = "ndjson"
)

// row is one device of a file.
type row struct {
	fleet.ImportRow
	line   int64
	column int64 // of the id
	faults []api.LineFault
}

func (r *row) fault(column int64, format string, args ...any) {
	r.faults = append(r.faults, api.LineFault{Line: r.line, Column: column, Detail: fmt.Sprintf(format, args...)})
}

// reader reads the rows of a file.
type reader interface {
	// read returns the next row, or io.EOF. After a *fileFault no more rows can be read. The caller
	// owns the row.
	read() (row, error)
	// header returns the position of the header, and last that of the last row, including preceding
	// blank lines.
	header() span
	last() span
}

// fileFault is a fault because of which no row of a file can be imported.
type fileFault struct{ faults []api.LineFault }

func (f *fileFault) Error() string { return "the file cannot be parsed" }

func newReader(file io.Reader, format Format, replace bool) (reader, error) {
	if format == NDJSON {
		return newNDJSON(file, replace), nil
	}
	return newCSV(file, replace)
}

// Core performs an import; it is the fleet.Service.
type Core interface {
	CheckImport(ctx context.Context, principal access.Principal, rows []fleet.ImportRow, replace bool, created int64) ([]fleet.ImportResult, error)
	Import(ctx context.Context, principal access.Principal, rows []fleet.ImportRow, replace bool, committed func()) ([]fleet.ImportResult, error)
}

// Options of an import.
type Options struct {
	Format Format
	// Partial imports the rows without a fault. Otherwise any fault refuses the file.
	Partial bool
	// Replace allows a row to replace the client of a member, and to admit a revoked device.
	Replace bool
}

// ErrFaults is returned by Import for a file that was refused because of the faults in the report: nothing
// was imported.
var ErrFaults = errors.New("the file has faults, and nothing of it was imported")

// Import checks a file and writes its devices. After any other error than ErrFaults, a part may have been
// written: the rows with the first ids; the same file can be imported again.
func Import(ctx context.Context, core Core, principal access.Principal, file io.ReaderAt, opt Options) (api.ImportReport, error) {
	im := importer{ctx: ctx, core: core, principal: principal, opt: opt, seed: maphash.MakeSeed(), lines: map[uint64]uint32{}}
	im.report.Faults = []api.LineFault{}
	err := im.check(file)
	im.lines = nil
	if err == nil && im.report.Refused > 0 && !opt.Partial {
		err = ErrFaults
	}
	if err == nil {
		err = im.write(file)
	}
	slices.SortStableFunc(im.report.Faults, func(a, b api.LineFault) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return im.report, err
}

type importer struct {
	ctx       context.Context
	core      Core
	principal access.Principal
	opt       Options
	report    api.ImportReport

	seed   maphash.Seed
	lines  map[uint64]uint32 // the line of each device, by a hash of its id
	faulty []uint64          // a bit for each row with a fault
	head   span              // position of the header
	order  order             // positions of the rows without a fault of their own
}

func (im *importer) refuse(index int64, faults ...api.LineFault) {
	for int64(len(im.faulty)) <= index/64 {
		im.faulty = append(im.faulty, 0)
	}
	im.faulty[index/64] |= 1 << (index % 64)
	im.report.Refused++
	im.list(faults)
}

func (im *importer) list(faults []api.LineFault) {
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
		results, err := im.core.CheckImport(im.ctx, im.principal, batch.rows, im.opt.Replace, created)
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
	if whole, ok := errors.AsType[*fileFault](err); ok {
		im.report.Refused++
		im.list(whole.faults)
		return ErrFaults
	}
	return err
}

// write imports the rows without a fault, in the order of their ids.
func (im *importer) write(file io.ReaderAt) error {
	var gathered batch
	var writing []*written // at most two; the last one is not committed yet
	count := func() error {
		w := writing[0]
		writing = writing[1:]
		return im.count(w)
	}
	defer func() { // batches in progress count, too, if an error ends the loop
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
			return fmt.Errorf("internal error (bug): the row on line %d differs when the file is read again", e.line)
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

// written is a batch that is being written.
type written struct {
	batch     batch
	committed chan struct{} // closed after the commit, or after done
	done      chan struct{} // closed when it is in force, or has failed
	results   []fleet.ImportResult
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
		w.results, w.err = im.core.Import(im.ctx, im.principal, b.rows, im.opt.Replace, committed)
	}()
	return w
}

// count waits for a batch and adds the results of its rows.
func (im *importer) count(w *written) error {
	<-w.done
	for i, result := range w.results {
		switch {
		case result.Err != nil: // it changed after the check
			im.report.Refused++
			im.list([]api.LineFault{w.batch.at[i].fault(result.Err)})
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
			return &fileFault{[]api.LineFault{{Line: r.line, Detail: fmt.Sprintf("a file has at most %d devices; split it", MaxRows)}}}
		}
		if err := f(index, &r); err != nil {
			return err
		}
		if err := im.ctx.Err(); err != nil {
			return err
		}
	}
}

// batch collects rows and their positions in the file.
type batch struct {
	rows []fleet.ImportRow
	at   []place
}

type place struct{ index, line, column int64 }

func (p place) fault(err error) api.LineFault {
	return api.LineFault{Line: p.line, Column: p.column, Detail: devices.AsError(err).Detail}
}

func (b *batch) add(index int64, r *row) {
	b.rows = append(b.rows, r.ImportRow)
	b.at = append(b.at, place{index, r.line, r.column})
}

func (b *batch) clear() { b.rows, b.at = b.rows[:0], b.at[:0] }
