package restapi

import (
	"bytes"
	"cmp"
	"context"
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
	register(s, withAnswer(s.operation(http.MethodGet, "/v1/audit", about{id: "listAudit", scope: access.ScopeAudit, tag: tagAudit,
		summary: "List who did what", text: "A key without the scope admin sees calls, messages and changes of devices, as far as its devices and tools go, and no addresses. What happened in the last second may not be there yet. Entries come by the time at which groups of them were written; of two nodes' " +
			"groups, one comes before the other. One request looks at a bounded part of the record: a page may hold fewer entries than asked for, and none, while next_cursor leads on.",
		answer: "A page, newest first.", codes: away}), "application/json", schemaOf[api.List[api.AuditEntry]](s)), s.listAudit)
	plain(s, withAnswer(s.operation(http.MethodGet, pathAuditExport, about{id: "exportAudit", scope: access.ScopeAdmin, tag: tagAudit,
		summary: "Export the record", text: "JSON lines: one that describes a block of entries, with its hash and that of the block before it, then its entries. " +
			"`fleetd audit verify FILE` checks it without a node, with the fleet's secret.",
		answer: "Whole blocks, run by run. An answer that breaks off is not complete.", codes: away}), typeJSONL, &huma.Schema{Type: huma.TypeString}),
		s.exportAudit)
	register(s, s.operation(http.MethodGet, "/v1/audit/verify", about{id: "verifyAudit", scope: access.ScopeAdmin, tag: tagAudit,
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
	f := audit.Filter{Since: within.since, Until: within.until, Key: in.Key, Kind: in.Kind, Action: in.Action, Outcome: in.Outcome}
	if in.Device != "" {
		id, err := parseDevice(in.Device)
		if err != nil {
			return nil, err
		}
		f.Device = string(id)
	}
	by := caller(ctx)
	all := by.Caller.Scopes.Has(access.ScopeAdmin)
	out := []byte(`{"items":[`)
	found := 0
	permit := s.opt.Service.AuditPermit(ctx, by)
	var failed error
	next, more, err := audit.Walk(ctx, s.opt.Archive, &f, place, func(e *audit.Line, line []byte) audit.Visit {
		if !all {
			may, err := permit(e)
			if failed = err; err != nil {
				return audit.StopHere
			}
			if !may {
				return audit.Next
			}
			line = jsonspan.Without(line, "from") // the address of a person
		}
		if found > 0 {
			if len(out)+len(line)+len(e.Run)+len(e.Node) > pageBytes {
				return audit.StopHere
			}
			out = append(out, ',')
		}
		out = appendAuditLine(out, e, line)
		if found++; found == in.Limit {
			return audit.Stop
		}
		return audit.Next
	})
	if err = cmp.Or(err, failed); err != nil {
		return nil, err
	}
	cursor := ""
	if more {
		cursor = p.cursor(auditPlace(next))
	}
	return newRaw(endAudit(out, cursor)), nil
}

func endAudit(out []byte, cursor string) []byte {
	out = jsonspan.AppendString(append(out, `],"next_cursor":`...), cursor)
	return append(out, "}\n"...)
}

// appendAuditLine appends an entry with the run that it belongs to.
func appendAuditLine(dst []byte, e *audit.Line, line []byte) []byte {
	dst = jsonspan.AppendString(append(dst, `{"run":`...), e.Run)
	dst = jsonspan.AppendString(append(dst, `,"node":`...), e.Node)
	return append(append(dst, ','), bytes.TrimPrefix(line, []byte("{"))...)
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
	q := audit.Query{Since: r.since, Until: r.until, Limit: audit.WalkPage}
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
		if len(blocks) < audit.WalkPage {
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
	return answerOf(v.Report(), err)
}
