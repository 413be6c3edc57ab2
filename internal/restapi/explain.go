package restapi

import (
	"context"
	"net/http"
	"net/url"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
)

type offlineInput struct {
	Page
	Selection
}

type logInput struct {
	DevicePath
	Page
	Kind   string `query:"kind" doc:"The list has only records of this kind." enum:"ota.check,activation.try,connect.refused,connected,mcp.failed,catalog,deviation,udp,limit,closed,call"`
	Before string `query:"before" doc:"The list has only earlier records. It is RFC 3339, or a duration before now, such as 2h or 7d."`
}

// CallPath names a call.
type CallPath struct {
	Call string `path:"call" maxLength:"64" doc:"Id of a call, from the header Fleetd-Call, a result or a problem."`
}

func (s *Server) explainRoutes() {
	const limits = "The nodes keep records in memory (--recorder-memory); reach has since when, and missing the nodes that did not answer within a second. "
	register(s, s.operation(http.MethodGet, "/v1/devices/{device}/explain", about{id: "explainDevice", scope: access.ScopeEvents, hides: true, tag: tagExplain, summary: "Explain a device",
		text: "Why it is offline, or what is wrong with it while it is online. " + limits, answer: "The cause.", codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeUnavailable}}), s.explainDevice)
	register(s, s.operation(http.MethodGet, "/v1/explain", about{id: "explainOffline", scope: access.ScopeEvents, tag: tagExplain, summary: "Explain the devices that are offline",
		text:   "Why they are, grouped by cause, a page at a time: add up the pages until next_cursor is empty. As with lists, a page may have fewer devices than limit, or none. " + limits,
		answer: "The causes of a page.", codes: []devices.Code{devices.CodeUnavailable}}), s.explainOffline)
	register(s, s.operation(http.MethodGet, "/v1/devices/{device}/log", about{id: "getDeviceLog", scope: access.ScopeEvents, hides: true, tag: tagExplain, summary: "Show what happened to a device",
		text: "OTA checks, refused and accepted connections, failures, ends and calls. As with lists, a page may have fewer records than limit although more follow. " + limits, answer: "Records, newest first.", codes: []devices.Code{devices.CodeDeviceUnknown, devices.CodeUnavailable}}), s.deviceLog)
	s.mux.HandleFunc("GET /v1/devices/{device}/recording", redirectToLog)
	register(s, s.operation(http.MethodGet, "/v1/calls/{call}", about{id: "getCall", scope: access.ScopeEvents, tag: tagExplain, summary: "Show a call",
		text: "One that the caller's key made; with the scope admin any. " + limits, answer: "What the nodes recorded.", codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}), s.recordedCall)
	register(s, s.operation(http.MethodGet, "/v1/calls/{call}/explain", about{id: "explainCall", scope: access.ScopeEvents, tag: tagExplain, summary: "Explain a call",
		text: "One that the caller's key made; with the scope admin any. " + limits, answer: "The cause.", codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}), s.explainCall)
	register(s, s.operation(http.MethodGet, "/v1/refusals", about{id: "listRefusals", scope: access.ScopeEvents, tag: tagExplain, summary: "List unknown devices",
		text: "OTA checks and connections of devices that the fleet does not have, the last 256 of each node. A key that is limited to devices is refused.", answer: "Records, newest first."}), s.refusals)
}

func (s *Server) explainDevice(ctx context.Context, _ *DevicePath) (*answer[api.Why], error) {
	e, err := s.opt.Explainer.Device(ctx, caller(ctx), deviceOf(ctx))
	return answerOf(e, err)
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
	e, err := s.opt.Explainer.Offline(ctx, caller(ctx), sel.At(p.begun), p.after, in.Limit)
	e.NextCursor = p.cursor(e.NextCursor) // a place until here
	return answerOf(e, err)
}

func (s *Server) deviceLog(ctx context.Context, in *logInput) (*answer[api.Log], error) {
	p, after, err := s.logPage(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	if in.Before != "" && p.after == "" {
		if after.At, err = p.time("before", in.Before); err != nil {
			return nil, err
		}
	}
	l, err := s.opt.Explainer.Log(ctx, caller(ctx), deviceOf(ctx), devices.StepKind(in.Kind), after, in.Limit)
	l.NextCursor = p.cursor(l.NextCursor) // a place until here
	return answerOf(l, err)
}

// logPage opens the cursor of a list of records: the place after which the page begins.
func (s *Server) logPage(ctx context.Context, in Page) (p *paging, after devices.LogPosition, err error) {
	if p, err = s.page(ctx, in); err != nil {
		return nil, after, err
	}
	if after, err = devices.ParseLogPosition(p.after); err != nil {
		err = errCursor
	}
	return p, after, err
}

// redirectToLog answers at the former path of the device log, until v0.2.
func redirectToLog(w http.ResponseWriter, r *http.Request) {
	target := url.URL{Path: "/v1/devices/" + r.PathValue("device") + "/log", RawQuery: r.URL.RawQuery}
	http.Redirect(w, r, target.String(), http.StatusPermanentRedirect)
}

func (s *Server) recordedCall(ctx context.Context, in *CallPath) (*answer[api.RecordedCall], error) {
	c, err := s.opt.Explainer.Call(ctx, caller(ctx), in.Call)
	return answerOf(c, err)
}

func (s *Server) explainCall(ctx context.Context, in *CallPath) (*answer[api.Why], error) {
	e, err := s.opt.Explainer.ExplainCall(ctx, caller(ctx), in.Call)
	return answerOf(e, err)
}

func (s *Server) refusals(ctx context.Context, in *Page) (*answer[api.Log], error) {
	by := caller(ctx)
	if by.Caller.Limited() {
		refusal := &devices.Error{Code: devices.CodeForbidden, Detail: "unknown devices belong to nobody, and this key is limited to devices; use a key without that limit"}
		s.opt.Service.NoteRefusal(by, "listRefusals", "", refusal)
		return nil, refusal
	}
	p, after, err := s.logPage(ctx, *in)
	if err != nil {
		return nil, err
	}
	l, err := s.opt.Explainer.Refusals(ctx, by, after, in.Limit)
	l.NextCursor = p.cursor(l.NextCursor) // a place until here
	return answerOf(l, err)
}

// answerOf answers with a value, or with why there is none.
func answerOf[T any](v T, err error) (*answer[T], error) {
	return &answer[T]{v}, err
}
