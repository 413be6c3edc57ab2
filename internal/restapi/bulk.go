package restapi

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/bulk"
	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

const (
	pathImport = "/v1/devices/import"
	pathExport = "/v1/devices/export"
	// maxReceived is how many files a node receives at once, to import or with firmware; keys have shares of it.
	maxReceived = 4
)

// filePace is how slowly a file may come.
var filePace = connlimit.BodyPace{Grace: time.Minute, Rate: 32 << 10}

// Types of files with devices.
const (
	typeCSV    = "text/csv"
	typeNDJSON = "application/x-ndjson"
	typeJSONL  = "application/jsonl"
)

func (s *Server) bulkRoutes() {
	away := []devices.Code{devices.CodeUnavailable}
	text := &huma.Schema{Type: huma.TypeString}
	in := withAnswer(s.operation(http.MethodPost, pathImport, about{id: "importDevices", scope: access.ScopeWrite, tag: tagDevices, summary: "Import devices",
		text: "A file of at most 1 GiB and 1,000,000 devices: CSV whose first line names the columns (id,name,transport_wanted,serial,client_id,label.KEY,...; only id is needed), " +
			"or NDJSON with the same names and labels as an object. The Content-Type decides which it is, else the first byte. Devices that are not known become members; of others the given values are set and labels merged. " +
			"An empty cell leaves a value as it is, and `\\null` (in NDJSON null) removes it. Columns of an export that say what a device reported are ignored. " +
			"The whole file is checked first: with any fault nothing is imported and the answer is 422 with the line and column of each, unless partial. " +
			"Then devices are written in groups; what is refused because it changed meanwhile is listed, too. A file that was imported in part may be imported again. " +
			"The first client of a member without a client_id is admitted.",
		answer: "What became of the file.", codes: append(away, devices.CodeTooLarge, devices.CodeInvalidArguments, devices.CodeLimitReached)}), valueJSON[0], schemaOf[api.ImportReport](s))
	in.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{typeCSV: {Schema: text}, typeNDJSON: {Schema: text}}}
	plain(s, in, s.importDevices)
	out := s.operation(http.MethodGet, pathExport, about{id: "exportDevices", scope: access.ScopeRead, tag: tagDevices, summary: "Export devices",
		text: "The columns of an import, those of labels in order of their keys, and what the devices reported. Devices that wait and never were members are left out. " +
			"Without secrets there is no client_id: where an import of the file creates a member, the first client that comes with the id is admitted. " +
			"In CSV a cell that a spreadsheet would take for a formula begins with an apostrophe, which an import takes off.",
		answer: "The devices in order of id. An answer that breaks off is not complete.", codes: away})
	out.Responses[strconv.Itoa(out.DefaultStatus)].Content = map[string]*huma.MediaType{typeCSV: {Schema: text}, typeNDJSON: {Schema: text}}
	plain(s, out, s.exportDevices)
}

type importFile struct {
	Partial bool `query:"partial" doc:"With true, the rows without a fault are imported."`
	Replace bool `query:"replace_client" doc:"A row may replace the client of a member, whose credentials end, and admit a device that was revoked."`
}

// FileFormat is the format of a file that an operation answers with.
type FileFormat struct {
	Format bulk.Format `query:"format" enum:"csv,ndjson" default:"csv"`
}

func (f *FileFormat) mediaType() string {
	if f.Format == bulk.NDJSON {
		return typeNDJSON
	}
	return typeCSV + "; charset=utf-8"
}

type exportInput struct {
	FileFormat
	Select  string `query:"select" doc:"Selects devices, as in the list."`
	Secrets bool   `query:"secrets" doc:"With the admitted client_id of each device, by which it gets its credentials; needs the scope admin."`
}

func (s *Server) importDevices(w http.ResponseWriter, r *http.Request, in *importFile) {
	report, err := s.runImport(w, r, bulk.Options{Partial: in.Partial, Replace: in.Replace})
	switch {
	case errors.Is(err, bulk.ErrFaults):
		p := newProblem(&devices.Error{Code: devices.CodeInvalidArguments, Detail: fmt.Sprintf("the file has faults on %s; nothing of it was imported", count(int(report.Refused), "row"))})
		p.Faults, p.Refused = report.Faults, report.Refused
		p.write(w)
	case err != nil:
		p := *s.problem(r.Context(), err)
		if written := report.Created + report.Changed; written > 0 {
			p.Detail = fmt.Sprintf("%s; %s were imported before that, import the same file again to go on", p.Detail, count(int(written), "row"))
		}
		p.write(w)
	default:
		w.Header()["Content-Type"] = valueJSON
		_ = marshal(w, report) // numbers and strings encode
	}
}

func (s *Server) runImport(w http.ResponseWriter, r *http.Request, opt bulk.Options) (report api.ImportReport, err error) {
	if err := s.draining(); err != nil {
		return report, err
	}
	by := s.by(r, access.ViaREST)
	file, err := s.spool(w, r, by, bulk.MaxBytes, errFileTooLarge, func(body *bufio.Reader) (err error) {
		opt.Format, err = formatOf(r, body)
		return err
	})
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, file.discard()) }()
	if !s.importing.TryLock() { // each takes the database
		return report, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "this node is writing another import; try again in a minute"}
	}
	defer s.importing.Unlock()
	if report, err = bulk.Import(r.Context(), untilDrain{s}, by, file, opt); errors.Is(err, bulk.ErrFaults) {
		return report, err
	}
	s.opt.Service.NoteChange(by, "import", "", fmt.Sprintf("%d rows: %d created, %d changed, %d unchanged, %d refused", report.Rows, report.Created, report.Changed,
		report.Unchanged, report.Refused), err)
	return report, err
}

// places are the files that a node receives, by the key that sends them. The zero value is ready to use.
type places struct {
	mu   sync.Mutex
	held map[string]int64
}

// take takes a place, which leave gives back, or refuses.
func (p *places) take(key string, keys *access.Registry) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	holder := func(key string) access.Holder { return keys.Holder(key, clock.Now()) }
	if access.Share(maxReceived, p.held, key, holder) == 0 {
		return devices.LimitReached("files that this node receives at once", maxReceived)
	}
	if p.held == nil {
		p.held = map[string]int64{}
	}
	p.held[key]++
	return nil
}

func (p *places) leave(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held[key]--; p.held[key] == 0 {
		delete(p.held, key)
	}
}

// checkImport returns an error if a file may not be received or imported any further: the node stops, or the key has ended.
func (s *Server) checkImport(by access.Principal) error {
	if err := s.draining(); err != nil {
		return err
	}
	if err := s.opt.Service.Keys().Valid(by.Caller, clock.Now()); err != nil {
		return &devices.Error{Code: devices.CodeUnauthorized, Detail: err.Error()}
	}
	return nil
}

// sender is the body with a file until its key ends. Its errors are answers to the request.
type sender struct {
	io.Reader
	s  *Server
	by access.Principal
}

// Read implements io.Reader.
func (b sender) Read(p []byte) (int, error) {
	if err := b.s.checkImport(b.by); err != nil {
		return 0, err
	}
	n, err := b.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = badRequest("the body broke off: " + err.Error())
	}
	return n, err
}

// untilDrain is the core until the node stops or the key ends: an import does not hold that up.
type untilDrain struct{ s *Server }

// CheckImport implements bulk.Core.
func (d untilDrain) CheckImport(ctx context.Context, by access.Principal, rows []fleet.ImportRow, replace bool, created int64) ([]fleet.ImportResult, error) {
	if err := d.s.checkImport(by); err != nil {
		return nil, err
	}
	return d.s.opt.Service.CheckImport(ctx, by, rows, replace, created)
}

// Import implements bulk.Core.
func (d untilDrain) Import(ctx context.Context, by access.Principal, rows []fleet.ImportRow, replace bool, committed func()) ([]fleet.ImportResult, error) {
	if err := d.s.checkImport(by); err != nil {
		return nil, err
	}
	return d.s.opt.Service.Import(ctx, by, rows, replace, committed)
}

// spooled is a file that is gone with its last use, and its place with it.
type spooled struct {
	*os.File
	leave func()
}

func (f spooled) discard() error {
	defer f.leave()
	if f.File == nil {
		return nil
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

var errFileTooLarge = newProblem(&devices.Error{Code: devices.CodeTooLarge, Detail: "a file may have 1 GiB; split it"})

// spool writes the body, which may have most bytes, to a file: it is read more than once, and its sender takes its time. look sees the
// beginning first.
func (s *Server) spool(w http.ResponseWriter, r *http.Request, by access.Principal, most int64, tooLarge error, look func(*bufio.Reader) error) (out spooled, err error) {
	if err := s.receiving.take(by.Key(), s.opt.Service.Keys()); err != nil { // each takes disk
		return out, err
	}
	out.leave = func() { s.receiving.leave(by.Key()) }
	defer func() {
		if err != nil {
			err = errors.Join(err, out.discard())
		}
	}()
	if r.ContentLength > most {
		return out, tooLarge
	}
	control := http.NewResponseController(w)
	connlimit.PaceBody(w, r, filePace)
	body := bufio.NewReader(sender{r.Body, s, by})
	if err := look(body); err != nil {
		return out, err
	}
	f, err := os.CreateTemp(s.opt.Dir, "received-*")
	if err != nil {
		return out, s.noDisk(err)
	}
	out.File = f
	n, err := io.Copy(f, io.LimitReader(body, most+1))
	switch {
	case err != nil:
		if _, ok := errors.AsType[*os.PathError](err); ok {
			err = s.noDisk(err)
		}
	case n > most:
		err = tooLarge
	default:
		_ = control.SetReadDeadline(time.Time{}) // the connection is closed with the answer if this fails
		_, err = f.Seek(0, io.SeekStart)
	}
	return out, err
}

func (s *Server) noDisk(err error) error {
	s.opt.Log.Error("a file that a caller sends cannot be kept", "error", err)
	return &devices.Error{Code: devices.CodeUnavailable, Part: "disk", Detail: "this node cannot keep the file while it is read; its log has the cause"}
}

// formatOf finds the format by the Content-Type, else by the first byte: curl sends
// files as forms.
func formatOf(r *http.Request, body *bufio.Reader) (bulk.Format, error) {
	kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")) // one that cannot be read names no format
	switch kind {
	case typeCSV:
		return bulk.CSV, nil
	case typeNDJSON, "application/ndjson", "application/jsonl", "application/json":
		return bulk.NDJSON, nil
	}
	start, err := body.Peek(64)
	if err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	if start = bytes.TrimLeft(start, "\uFEFF \t\r\n"); len(start) > 0 && start[0] == '{' {
		return bulk.NDJSON, nil
	}
	return bulk.CSV, nil
}

func (s *Server) exportDevices(w http.ResponseWriter, r *http.Request, in *exportInput) {
	by := s.by(r, access.ViaREST)
	s.download(w, r, in.mediaType(), "devices."+string(in.Format), func(out io.Writer) error {
		sel, err := parseSelect(in.Select)
		if err == nil && in.Secrets {
			err = s.permitDevice(r.Context(), by, access.ScopeAdmin, "exportDevices", "")
		}
		if err != nil {
			return err
		}
		return bulk.Export(out, bulk.ExportOptions{Format: in.Format, Secrets: in.Secrets, Client: s.opt.Service.Client}, func(f func([]devices.View) error) error {
			return s.opt.Service.Each(r.Context(), by, sel, func(page []devices.View) error {
				if err := s.draining(); err != nil {
					return err
				}
				return f(page)
			})
		})
	})
}
