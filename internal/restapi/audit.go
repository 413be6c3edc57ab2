package restapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// Bounds of reading the record.
const (
	auditPage    = 8                // blocks of one look into the database
	maxAuditScan = 64               // blocks of one request; what is not found in them needs another
	exportWrite  = 30 * time.Second // a reader of an export this slow is let go
)

const pathAuditExport = "/v1/audit/export"

// AuditRange is the time that entries are wanted of.
type AuditRange struct {
	Since time.Time `query:"since" doc:"RFC 3339: no entries before it."`
	Until time.Time `query:"until" doc:"RFC 3339: no entries after it."`
}

type listAuditInput struct {
	AuditRange
	Page
	Device  string `query:"device" doc:"Device id."`
	Key     string `query:"key" doc:"Id or name of the caller's key; or admin, open, voice, gateway."`
	Kind    string `query:"kind" enum:"call,message,device,key,policy,refusal,run,credential"`
	Action  string `query:"action" doc:"The tool or method that was called, the message's type, or what was done."`
	Outcome string `query:"outcome" doc:"ok, tool_error, or the code of a refusal or failure."`
}

func (s *Server) auditRoutes() {
	away := []devices.Code{devices.CodeUnavailable}
	huma.Register(s.api, withAnswer(s.operation(http.MethodGet, "/v1/audit", about{id: "listAudit", scope: access.ScopeAdmin, tag: tagAudit,
		summary: "List who did what", text: "What happened in the last second may not be there yet. Entries come by the time at which groups of them were written; of two nodes' " +
			"groups, one comes before the other. One request looks at a bounded part of the record: a page may hold fewer entries than asked for, and none, while next_cursor leads on.",
		answer: "A page, newest first.", codes: away}), "application/json", schemaOf[api.List[api.AuditEntry]](s)), s.listAudit)
	s.handle(withAnswer(s.operation(http.MethodGet, pathAuditExport, about{id: "exportAudit", scope: access.ScopeAdmin, tag: tagAudit,
		summary: "Export the record", text: "JSON lines: one that describes a block of entries, with its hash and that of the block before it, then its entries. " +
			"`fleetd audit verify FILE` checks it without a node, with the fleet's secret.",
		answer: "Whole blocks, run by run. An answer that breaks off is not complete.", codes: away}), "application/jsonl", &huma.Schema{Type: huma.TypeString}),
		s.exportAudit, queryParam("since", "RFC 3339: no blocks that end before it."), queryParam("until", "RFC 3339: no blocks that begin after it."))
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/audit/verify", about{id: "verifyAudit", scope: access.ScopeAdmin, tag: tagAudit,
		summary: "Look for gaps in the record", text: "Walks the whole record, or that of a time, and takes as long as that does.",
		answer: "What was found.", codes: away}), s.verifyAudit)
}

func (s *Server) listAudit(ctx context.Context, in *listAuditInput) (*raw, error) {
	place, err := parseAuditPlace(in.Cursor)
	if err != nil {
		return nil, err
	}
	f := auditFilter{in: in}
	if in.Device != "" {
		if f.device, err = parseDevice(in.Device); err != nil {
			return nil, err
		}
	}
	out := []byte(`{"items":[`)
	found, cursor := 0, ""
	for scanned := 0; ; scanned += auditPage {
		if scanned >= maxAuditScan {
			cursor = auditPlace(place)
			break
		}
		blocks, err := s.opt.Archive.AuditBlocks(ctx, audit.Query{Since: in.Since, Until: in.Until, Before: place, Limit: auditPage})
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		for i := range blocks {
			b := &blocks[i]
			limit := int64(0)
			if b.Run == place.Run && b.FirstSeq == place.FirstSeq {
				limit = place.Seq
			}
			place = audit.Place{LastAt: b.LastAt, Run: b.Run, FirstSeq: b.FirstSeq}
			for rest := bytes.TrimSuffix(b.Entries, []byte("\n")); len(rest) > 0; {
				line := rest
				if cut := bytes.LastIndexByte(rest, '\n'); cut >= 0 {
					rest, line = rest[:cut], rest[cut+1:]
				} else {
					rest = nil
				}
				seq, ok := f.match(line)
				if !ok || limit > 0 && seq >= limit {
					continue
				}
				if found > 0 {
					out = append(out, ',')
				}
				out = appendAuditLine(out, b, line)
				if found++; found == in.Limit {
					place.Seq = seq
					return newRaw(endAudit(out, auditPlace(place))), nil
				}
			}
			place.FirstSeq-- // after this block
		}
		if len(blocks) < auditPage {
			break
		}
	}
	return newRaw(endAudit(out, cursor)), nil
}

func endAudit(out []byte, cursor string) []byte {
	out = jsonspan.AppendString(append(out, `],"next_cursor":`...), cursor)
	return append(out, "}\n"...)
}

// appendAuditLine appends an entry with the run that it belongs to.
func appendAuditLine(dst []byte, b *audit.Block, line []byte) []byte {
	dst = jsonspan.AppendString(append(dst, `{"run":`...), b.Run)
	dst = jsonspan.AppendString(append(dst, `,"node":`...), b.Node)
	return append(append(dst, ','), bytes.TrimPrefix(line, []byte("{"))...)
}

// auditFilter selects entries.
type auditFilter struct {
	in     *listAuditInput
	device devices.ID
}

// match reports whether an entry is wanted. Most are not, so the text is looked
// at before it is taken apart.
func (f *auditFilter) match(line []byte) (seq int64, ok bool) {
	for _, want := range [...]string{string(f.device), f.in.Key, f.in.Kind, f.in.Action, f.in.Outcome} {
		if want != "" && !bytes.Contains(line, jsonspan.AppendString(nil, want)) {
			return 0, false
		}
	}
	var e audit.Line
	if json.Unmarshal(line, &e) != nil {
		return 0, false
	}
	ok = (f.device == "" || e.Device == string(f.device)) && (f.in.Key == "" || e.Key == f.in.Key || e.Name == f.in.Key) &&
		(f.in.Kind == "" || string(e.Kind) == f.in.Kind) && (f.in.Action == "" || e.Action == f.in.Action) && (f.in.Outcome == "" || e.Outcome == f.in.Outcome) &&
		(f.in.Since.IsZero() || !e.At.Before(f.in.Since)) && (f.in.Until.IsZero() || !e.At.After(f.in.Until))
	return e.Seq, ok
}

// auditPlace hides a place; parseAuditPlace finds it again.
func auditPlace(p audit.Place) string {
	return newCursor(fmt.Sprintf("%d %s %d %d", p.LastAt.UnixMicro(), p.Run, p.FirstSeq, p.Seq))
}

func parseAuditPlace(cursor string) (p audit.Place, err error) {
	text, err := parseCursor(cursor)
	if err != nil || text == "" {
		return p, err
	}
	var at int64
	if _, err := fmt.Sscanf(text, "%d %s %d %d", &at, &p.Run, &p.FirstSeq, &p.Seq); err != nil {
		return p, errCursor
	}
	p.LastAt = time.UnixMicro(at).UTC()
	return p, nil
}

// walkAudit calls f for the blocks of a time, as they hang together.
func (s *Server) walkAudit(ctx context.Context, r AuditRange, f func(*audit.Block) error) error {
	q := audit.Query{Since: r.Since, Until: r.Until, Limit: auditPage}
	for {
		blocks, err := s.opt.Archive.AuditRuns(ctx, q)
		if err != nil {
			return err
		}
		for i := range blocks {
			if err := f(&blocks[i]); err != nil {
				return err
			}
			q.Before = audit.Place{Run: blocks[i].Run, FirstSeq: blocks[i].FirstSeq}
		}
		if len(blocks) < auditPage {
			return nil
		}
		if err := s.draining(); err != nil {
			return err
		}
	}
}

func (s *Server) exportAudit(w http.ResponseWriter, r *http.Request) {
	within, err := auditRangeOf(r)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	control := http.NewResponseController(w)
	started := false
	var out []byte
	err = s.walkAudit(r.Context(), within, func(b *audit.Block) error {
		started = true
		w.Header().Set("Content-Type", "application/jsonl")
		out = audit.AppendExport(out[:0], b)
		if err := control.SetWriteDeadline(time.Now().Add(exportWrite)); err != nil {
			return err
		}
		_, err := w.Write(out)
		return err
	})
	switch {
	case err == nil:
		w.Header().Set("Content-Type", "application/jsonl")
		_ = control.SetWriteDeadline(time.Time{}) // the connection is closed with the answer if this fails
	case started:
		panic(http.ErrAbortHandler) // the client must not take it for the whole
	default:
		s.fail(w, r, err)
	}
}

func auditRangeOf(r *http.Request) (out AuditRange, err error) {
	for name, at := range map[string]*time.Time{"since": &out.Since, "until": &out.Until} {
		if text := strings.TrimSpace(r.URL.Query().Get(name)); text != "" {
			if *at, err = time.Parse(time.RFC3339, text); err != nil {
				return out, badRequest(name + " must be a time such as 2026-03-01T12:00:00Z")
			}
		}
	}
	return out, nil
}

func (s *Server) verifyAudit(ctx context.Context, in *AuditRange) (*answer[api.AuditReport], error) {
	v := audit.Verifier{Key: s.opt.Mint.AuditKey(), Since: s.opt.AuditSince}
	err := s.walkAudit(ctx, *in, func(b *audit.Block) error {
		v.Add(b)
		return nil
	})
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &answer[api.AuditReport]{v.Report()}, nil
}
