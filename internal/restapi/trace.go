package restapi

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/timespan"
)

// Actions of traces in the audit log.
const (
	actionTrace     = "trace"
	actionTraceRead = "trace_read"
	actionTraceEnd  = "trace_end"
)

var errNoTrace = &devices.Error{Code: devices.CodeNotFound, Detail: "the device is not traced; start a trace with POST"}

type startTraceInput struct {
	DevicePath
	Body *api.NewTrace `required:"false"`
}

func (s *Server) traceRoutes() {
	const path = "/v1/devices/{device}/trace"
	register(s, s.operation(http.MethodPost, path, about{id: "startTrace", scope: access.ScopeEvents, hides: true, tag: tagExplain, summary: "Start a trace",
		text: "Messages between the device and the node that holds it, what nodes record of it, and its calls; never audio. It replaces an earlier trace of the device, unless an administrator started that, goes on " +
			"when the device connects again or to another node, and ends 30 s after its last reader left. A fleet has 30 traces at most, of which keys have shares. The beginning and the end are in the audit.",
		status: http.StatusCreated, answer: "The trace, which GET reads.", codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeConflict, devices.CodeLimitReached, devices.CodeUnavailable}}), s.startTrace)
	register(s, s.operation(http.MethodDelete, path, about{id: "endTrace", scope: access.ScopeEvents, hides: true, tag: tagExplain, summary: "End a trace",
		status: http.StatusNoContent, answer: "It has ended on all nodes that can be reached.", codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeNotFound}}), s.endTrace)
	plain(s, withAnswer(s.operation(http.MethodGet, path, about{id: "followTrace", scope: access.ScopeEvents, hides: true, tag: tagExplain, summary: "Read a trace",
		text:   "Server-sent events: `trace` with a TraceEntry as JSON on one line, and `end` when the trace ends. Entries are not stored: what happens while nobody reads is not shown. A trace with payloads needs the scope admin.",
		answer: "Entries until the trace ends, the client goes away or reads too slowly, its key ends, or the node stops.", codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeNotFound, devices.CodeUnavailable}}),
		"text/event-stream", &huma.Schema{Type: huma.TypeString}), s.followTrace)
}

// permitPayload refuses payloads to callers that are not administrators: they contain the requests of others.
func permitPayload(by access.Principal) error {
	switch {
	case by.Caller == nil:
		return errKeyEnded
	case by.Caller.Scopes.Has(access.ScopeAdmin):
		return nil
	}
	return &devices.Error{Code: devices.CodeForbidden, Detail: "payloads need the scope admin; trace without them"}
}

// permitReplace refuses to end or replace the trace of an administrator to callers that are none.
func (s *Server) permitReplace(by access.Principal, running api.Trace, owner string) error {
	if by.Caller == nil {
		return errKeyEnded
	}
	if by.Caller.Scopes.Has(access.ScopeAdmin) || !running.Payload && !s.opt.Service.Keys().Holder(owner, clock.Now()).Admin {
		return nil
	}
	return &devices.Error{Code: devices.CodeForbidden, Detail: "an administrator traces this device; read that trace, or wait until it ends"}
}

func (s *Server) startTrace(ctx context.Context, in *startTraceInput) (*answer[api.Trace], error) {
	id := deviceOf(ctx)
	var wanted api.NewTrace
	if in.Body != nil {
		wanted = *in.Body
	}
	lasts, err := timespan.Parse(cmp.Or(wanted.For, "10m"))
	if err != nil {
		return nil, badRequest("for must be a duration such as 10m")
	}
	by := caller(ctx)
	err = s.opt.Service.Registry().CheckKnown(id)
	if err == nil && wanted.Payload {
		err = permitPayload(by)
	}
	running, owner, ok := s.opt.Tracer.Get(id)
	if err == nil && ok {
		err = s.permitReplace(by, running, owner)
	}
	var started api.Trace
	if err == nil {
		started, err = s.opt.Tracer.Start(ctx, id, running.ID, by.Key(), wanted.Payload, lasts)
	}
	detail := fmt.Sprintf("for %v", lasts)
	if wanted.Payload {
		detail += ", with payloads"
	}
	s.opt.Service.NoteChange(by, actionTrace, id, detail, err)
	return answerOf(started, err)
}

func (s *Server) endTrace(ctx context.Context, in *DevicePath) (*struct{}, error) {
	by, id := caller(ctx), deviceOf(ctx)
	running, owner, ok := s.opt.Tracer.Get(id)
	var err error
	if ok {
		err = s.permitReplace(by, running, owner)
	}
	if err == nil && !s.opt.Tracer.End(ctx, running) {
		err = errNoTrace
	}
	s.opt.Service.NoteChange(by, actionTraceEnd, id, "", err)
	return nil, err
}

// shownEntry returns an entry of a trace as the caller may see it: a call that another key made without what
// identifies it, and without the text of its refusal, which may describe that key.
func shownEntry(by access.Principal, entry []byte) json.RawMessage {
	var e api.TraceEntry
	if by.Caller.Scopes.Has(access.ScopeAdmin) || json.Unmarshal(entry, &e) != nil || e.Key == "" || e.Key == by.Key() {
		return entry
	}
	e.Type, e.Text, e.Call, e.Key = "", "", "", ""
	shown, err := json.Marshal(e)
	if err != nil {
		return json.RawMessage("{}") // cannot happen: it was JSON
	}
	return shown
}

func (s *Server) followTrace(w http.ResponseWriter, r *http.Request, in *DevicePath) {
	id, err := parseDevice(in.Device)
	by := s.by(r, access.ViaREST)
	if err == nil {
		err = s.draining()
	}
	running, _, ok := s.opt.Tracer.Get(id)
	switch {
	case err != nil:
	case !ok:
		err = errNoTrace
	case running.Payload:
		err = permitPayload(by)
	}
	if err == nil {
		err = s.enterStream(by.Caller)
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer s.streams.Release(by.Caller.Key)
	s.opt.Service.NoteChange(by, actionTraceRead, id, "", nil)
	out, ctx := s.eventStream(w, r, func(ctx context.Context) bool {
		err := s.opt.Service.Permit(ctx, by, access.ScopeEvents, id) // labels may change while it lasts
		return s.opt.Service.Keys().Valid(by.Caller, clock.Now()) != nil || err != nil && !isUnavailable(err)
	})
	err = s.opt.Tracer.Follow(ctx, running, func(entry []byte) error {
		return out.event(devices.StreamEvent{Kind: "trace", Data: shownEntry(by, entry)})
	})
	over := ctx.Err() == nil && err == nil
	out.stop()
	switch {
	case over:
		s.opt.Service.NoteChange(by, actionTraceEnd, id, "it was over", nil)
		_ = out.event(devices.StreamEvent{Kind: "end", Data: json.RawMessage("{}")}) // the client that is gone needs none
	case err != nil && !out.started:
		s.fail(w, r, err)
		return
	default:
		s.opt.Service.NoteChange(by, actionTraceEnd, id, "its reader left; it is over in 30 s without another", nil)
	}
	out.end()
}
