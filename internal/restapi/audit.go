package restapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// Bounds of reading the record.
const (
	auditPage    = 8  // blocks of one look into the database
	maxAuditScan = 64 // blocks of one request; what is not found in them needs another
)

const pathAuditExport = "/v1/audit/export"

// AuditRange is the time that entries are wanted of.
type AuditRange struct {
	Since string `query:"since" doc:"Entries before then are left out. It is RFC 3339, or a duration before now, such as 1h or 7d."`
	Until string `query:"until" doc:"Entries after then are left out. It is RFC 3339, or a duration before now."`
}

// auditRange is the time of a request for entries; zero: without bound.
type auditRange struct{ since, until time.Time }

// parse reads the range at this time.
func (in *AuditRange) parse(now time.Time) (r auditRange, err error) {
	if r.since, err = parseMoment("since", in.Since, now); err == nil {
		r.until, err = parseMoment("until", in.Until, now)
	}
	return r, err
}

type listAuditInput struct {
	AuditRange
	Page
	Device  string `query:"device" doc:"This is the id of a device."`
	Key     string `query:"key" doc:"Id or name of the caller's key; or admin, open, voice, gateway."`
	Kind    string `query:"kind" enum:"call,message,device,key,policy,refusal,run,credential"`
	Action  string `query:"action" doc:"The tool or method that was called, the message's type, or what was done."`
	Outcome string `query:"outcome" doc:"The outcome is ok, tool_error, or the code of a refusal or failure."`
}

func (s *Server) auditRoutes() {
	away := []devices.Code{devices.CodeUnavailable}
	huma.Register(s.api, withAnswer(s.operation(http.MethodGet, "/v1/audit", about{id: "listAudit", scope: access.ScopeAdmin, tag: tagAudit,
		summary: "List who did what", text: "What happened in the last second may not be there yet. Entries come by the time at which groups of them were written; of two nodes' " +
			"groups, one comes before the other. One request looks at a bounded part of the record: a page may hold fewer entries than asked for, and none, while next_cursor leads on.",
		answer: "A page, newest first.", codes: away}), "application/json", schemaOf[api.List[api.AuditEntry]](s)), s.listAudit)
	plain(s, withAnswer(s.operation(http.MethodGet, pathAuditExport, about{id: "exportAudit", scope: access.ScopeAdmin, tag: tagAudit,
		summary: "Export the record", text: "JSON lines: one that describes a block of entries, with its hash and that of the block before it, then its entries. " +
			"`fleetd audit verify FILE` checks it without a node, with the fleet's secret.",
		answer: "Whole blocks, run by run. An answer that breaks off is not complete.", codes: away}), typeJSONL, &huma.Schema{Type: huma.TypeString}),
		s.exportAudit)
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/audit/verify", about{id: "verifyAudit", scope: access.ScopeAdmin, tag: tagAudit,
		summary: "Look for gaps in the record", text: "Walks the whole record, or that of a time, and takes as long as that does.",
		answer: "What was found.", codes: away}), s.verifyAudit)
}

func (s *Server) listAudit(ctx context.Context, in *listAuditInput) (*raw, error) {
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	place, err := parseAuditPlace(p.after)
	if err != nil {
		return nil, err
	}
	within, err := in.AuditRange.parse(p.begun)
	if err != nil {
		return nil, err
	}
	f := auditFilter{in: in, within: within}
	if in.Device != "" {
		if f.device, err = parseDevice(in.Device); err != nil {
			return nil, err
		}
	}
	out := []byte(`{"items":[`)
	found, cursor := 0, ""
	for scanned := 0; ; scanned += auditPage {
		if scanned >= maxAuditScan {
			cursor = p.cursor(auditPlace(place))
			break
		}
		blocks, err := s.opt.Archive.AuditBlocks(ctx, audit.Query{Since: within.since, Until: within.until, Before: place, Limit: auditPage})
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
					if len(out)+len(line)+len(b.Run)+len(b.Node) > pageBytes {
						place.Seq = seq + 1 // the next page begins with this entry
						return newRaw(endAudit(out, p.cursor(auditPlace(place)))), nil
					}
					out = append(out, ',')
				}
				out = appendAuditLine(out, b, line)
				if found++; found == in.Limit {
					place.Seq = seq
					return newRaw(endAudit(out, p.cursor(auditPlace(place)))), nil
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
	within auditRange
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
		(f.within.since.IsZero() || !e.At.Before(f.within.since)) && (f.within.until.IsZero() || !e.At.After(f.within.until))
	return e.Seq, ok
}

// auditPlace writes a place; parseAuditPlace reads it.
func auditPlace(p audit.Place) string {
	return fmt.Sprintf("%d %s %d %d", p.LastAt.UnixMicro(), p.Run, p.FirstSeq, p.Seq)
}

func parseAuditPlace(text string) (p audit.Place, err error) {
	if text == "" {
		return p, nil
	}
	var at int64
	if _, err := fmt.Sscanf(text, "%d %s %d %d", &at, &p.Run, &p.FirstSeq, &p.Seq); err != nil {
		return p, errCursor
	}
	p.LastAt = time.UnixMicro(at).UTC()
	return p, nil
}

// walkAudit calls f for the blocks of a time, as they hang together.
func (s *Server) walkAudit(ctx context.Context, r auditRange, f func(*audit.Block) error) error {
	q := audit.Query{Since: r.since, Until: r.until, Limit: auditPage}
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

func (s *Server) exportAudit(w http.ResponseWriter, r *http.Request, in *AuditRange) {
	s.download(w, r, typeJSONL, "", func(out io.Writer) error {
		within, err := in.parse(clock.Now())
		if err != nil {
			return err
		}
		var line []byte
		return s.walkAudit(r.Context(), within, func(b *audit.Block) error {
			line = audit.AppendExport(line[:0], b)
			_, err := out.Write(line)
			return err
		})
	})
}

func (s *Server) verifyAudit(ctx context.Context, in *AuditRange) (*answer[api.AuditReport], error) {
	within, err := in.parse(clock.Now())
	if err != nil {
		return nil, err
	}
	v := audit.Verifier{Key: s.opt.Mint.AuditKey()}
	err = s.walkAudit(ctx, within, func(b *audit.Block) error {
		v.Add(b)
		return nil
	})
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &answer[api.AuditReport]{v.Report()}, nil
}
