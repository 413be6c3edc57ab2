package restapi

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
)

// Explainer answers why a device or a call is as it is. Errors are *devices.Error.
type Explainer interface {
	Device(ctx context.Context, by access.Principal, id devices.ID) (api.Why, error)
	Recording(ctx context.Context, by access.Principal, id devices.ID, kind devices.StepKind, before time.Time, limit int) (api.Recording, error)
	Call(ctx context.Context, by access.Principal, call string) (api.RecordedCall, error)
	ExplainCall(ctx context.Context, by access.Principal, call string) (api.Why, error)
	Refusals(ctx context.Context, by access.Principal) (api.Recording, error)
	Offline(ctx context.Context, by access.Principal, sel selector.Selector, after string, limit int) (api.OfflineCauses, error)
}

type offlineInput struct {
	Page
	Selection
}

type recordingInput struct {
	DevicePath
	Kind   string `query:"kind" doc:"Only records of this kind." enum:"ota.check,activation.try,connect.refused,connected,mcp.failed,catalog,deviation,udp,limit,closed,call"`
	Before string `query:"before" doc:"RFC 3339: only earlier records; the at of the last item continues a list."`
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"100"`
}

// CallPath names a call.
type CallPath struct {
	Call string `path:"call" maxLength:"64" doc:"Id of a call, from the header Fleetd-Call, a result or a problem."`
}

func (s *Server) explainRoutes() {
	const limits = "The nodes keep records in memory (--recorder-memory); reach has since when, and missing the nodes that did not answer within a second. "
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/devices/{device}/explain", about{id: "explainDevice", scope: access.ScopeEvents, hides: true, tag: tagExplain, summary: "Explain a device",
		text: "Why it is offline, or what is wrong with it while it is online. " + limits, answer: "The cause.", codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeUnavailable}}), s.explainDevice)
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/explain", about{id: "explainOffline", scope: access.ScopeEvents, tag: tagExplain, summary: "Explain the devices that are offline",
		text:   "Why they are, grouped by cause, a page at a time: add up the pages until next_cursor is empty. As with lists, a page may have fewer devices than limit, or none. " + limits,
		answer: "The causes of a page.", codes: []devices.Code{devices.CodeUnavailable}}), s.explainOffline)
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/devices/{device}/recording", about{id: "getRecording", scope: access.ScopeEvents, hides: true, tag: tagExplain, summary: "Show what happened to a device",
		text: "OTA checks, refused and accepted connections, failures, ends and calls. " + limits, answer: "Records, newest first.", codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeUnavailable}}), s.recording)
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/calls/{call}", about{id: "getCall", scope: access.ScopeEvents, tag: tagExplain, summary: "Show a call",
		text: "One that the caller's key made; with the scope admin any. " + limits, answer: "What the nodes recorded.", codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}), s.recordedCall)
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/calls/{call}/explain", about{id: "explainCall", scope: access.ScopeEvents, tag: tagExplain, summary: "Explain a call",
		text: "One that the caller's key made; with the scope admin any. " + limits, answer: "The cause.", codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}), s.explainCall)
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/refusals", about{id: "listRefusals", scope: access.ScopeEvents, tag: tagExplain, summary: "List unknown devices",
		text: "OTA checks and connections of devices that the fleet does not have, the last 256 of each node. A key that is limited to devices is refused.", answer: "Records, newest first."}), s.refusals)
}

func (s *Server) explainDevice(ctx context.Context, in *DevicePath) (*answer[api.Why], error) {
	id, err := parseDevice(in.Device)
	if err != nil {
		return nil, err
	}
	e, err := s.opt.Explainer.Device(ctx, caller(ctx), id)
	return answerOf(s, ctx, e, err)
}

func (s *Server) explainOffline(ctx context.Context, in *offlineInput) (*answer[api.OfflineCauses], error) {
	sel, err := in.selector()
	if err != nil {
		return nil, err
	}
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	e, err := s.opt.Explainer.Offline(ctx, caller(ctx), sel, p.after, in.Limit)
	e.NextCursor = p.cursor(e.NextCursor) // a place until here
	return answerOf(s, ctx, e, err)
}

func (s *Server) recording(ctx context.Context, in *recordingInput) (*answer[api.Recording], error) {
	id, err := parseDevice(in.Device)
	if err != nil {
		return nil, err
	}
	var before time.Time
	if in.Before != "" {
		if before, err = time.Parse(time.RFC3339, in.Before); err != nil {
			return nil, badRequest("before must be a time such as 2026-03-01T12:00:00Z")
		}
	}
	r, err := s.opt.Explainer.Recording(ctx, caller(ctx), id, devices.StepKind(in.Kind), before, in.Limit)
	return answerOf(s, ctx, r, err)
}

func (s *Server) recordedCall(ctx context.Context, in *CallPath) (*answer[api.RecordedCall], error) {
	c, err := s.opt.Explainer.Call(ctx, caller(ctx), in.Call)
	return answerOf(s, ctx, c, err)
}

func (s *Server) explainCall(ctx context.Context, in *CallPath) (*answer[api.Why], error) {
	e, err := s.opt.Explainer.ExplainCall(ctx, caller(ctx), in.Call)
	return answerOf(s, ctx, e, err)
}

func (s *Server) refusals(ctx context.Context, _ *struct{}) (*answer[api.Recording], error) {
	by := caller(ctx)
	if by.Caller.Limited() {
		refusal := &devices.Error{Code: devices.CodeForbidden, Detail: "unknown devices belong to nobody, and this key is limited to devices; use a key without that limit"}
		s.opt.Service.NoteRefusal(by, "listRefusals", "", refusal)
		return nil, s.problem(ctx, refusal)
	}
	r, err := s.opt.Explainer.Refusals(ctx, by)
	return answerOf(s, ctx, r, err)
}

// answerOf answers with a value, or with why there is none.
func answerOf[T any](s *Server, ctx context.Context, v T, err error) (*answer[T], error) {
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &answer[T]{v}, nil
}
