package restapi

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
)

// problem is every failure of the API: a problem document of RFC 9457 without
// `type`, which then counts as about:blank.
type problem struct {
	Title   string       `json:"title" doc:"The text of the status."`
	Status  int          `json:"status" doc:"The HTTP status."`
	Code    devices.Code `json:"code" doc:"The stable name of what went wrong."`
	Detail  string       `json:"detail" doc:"A sentence for people."`
	Part    string       `json:"part,omitempty" doc:"With code unavailable: the part that is down."`
	Sent    *bool        `json:"sent,omitempty" doc:"Whether bytes of the call left for the device."`
	Outcome string       `json:"outcome,omitempty" doc:"unknown: the device may or may not have acted."`
	Rule    string       `json:"rule,omitempty" doc:"With codes forbidden, tool_denied and confirmation_required: the rule that decided."`
	// Confirmation makes the same call pass once.
	Confirmation string          `json:"confirmation,omitempty" doc:"With code confirmation_required: give it as confirmation in the same call within 60 s, once a person has agreed."`
	Errors       []devices.Fault `json:"errors,omitempty" nullable:"false" doc:"With code invalid_arguments: every fault with its JSON pointer into the arguments."`
	Call         string          `json:"call,omitempty" doc:"The id of the call, raw request or message that failed, in the audit and in logs; also in the header Fleetd-Call."`
	// Faults are those of a file.
	Faults  []api.LineFault `json:"faults,omitempty" nullable:"false" doc:"With code invalid_arguments of an import: the faults of the file, at most 1000."`
	Refused int64           `json:"refused,omitempty" doc:"With faults: how many rows have one."`
}

// newProblem makes the problem of a refusal.
func newProblem(e *devices.Error) *problem {
	status, phrase := e.Code.Status()
	p := &problem{Title: phrase, Status: status, Code: e.Code, Detail: e.Detail, Part: e.Part, Outcome: e.Outcome, Rule: e.Rule, Confirmation: e.Confirmation, Errors: e.Faults, Call: e.Call}
	if e.ReportsSent() {
		p.Sent = &e.Sent
	}
	return p
}

// problem translates any error of the core. Internal errors are logged here
// and not shown.
func (s *Server) problem(ctx context.Context, err error) *problem {
	p := (*problem)(nil)
	if errors.As(err, &p) {
		return p
	}
	e := devices.AsError(err)
	if ctx.Err() != nil && s.opt.Draining() {
		// The node ended this request: its time to finish calls is over.
		return newProblem(&devices.Error{Code: devices.CodeUnavailable, Part: "node", Sent: e.Sent, Outcome: e.Outcome, Call: e.Call,
			Detail: "this node stopped before the answer came"})
	}
	if e.Code == devices.CodeInternal {
		if ctx.Err() == nil {
			s.opt.Log.Error("API request failed", "error", err, "call", e.Call)
		}
		e = &devices.Error{Code: e.Code, Sent: e.Sent, Outcome: e.Outcome, Call: e.Call, Detail: "internal error (bug); the node's log has the cause"}
	}
	return newProblem(e)
}

// tooManyFailures is the answer to one wrong token too many of an address.
func tooManyFailures() *problem {
	return newProblem(&devices.Error{Code: devices.CodeRateLimited, Detail: "too many wrong tokens from this address; try again later with the right one"})
}

func badRequest(detail string) *problem {
	return newProblem(&devices.Error{Code: devices.CodeBadRequest, Detail: detail})
}

// Error is the code and the detail.
func (p *problem) Error() string { return string(p.Code) + ": " + p.Detail }

// GetStatus implements huma.StatusError.
func (p *problem) GetStatus() int { return p.Status }

// GetHeaders implements huma.HeadersError.
func (p *problem) GetHeaders() http.Header {
	h := http.Header{}
	if p.Status == http.StatusServiceUnavailable || p.Status == http.StatusTooManyRequests {
		h["Retry-After"] = []string{"1"}
	}
	if p.Call != "" {
		h[HeaderCall] = []string{p.Call}
	}
	return h
}

// ContentType implements huma.ContentTypeFilter.
func (p *problem) ContentType(string) string { return valueProblem[0] }

func (p *problem) write(w http.ResponseWriter) {
	body, err := json.Marshal(p)
	if err != nil { // a struct of strings and numbers marshals
		http.Error(w, p.Detail, p.Status)
		return
	}
	h := w.Header()
	body = append(body, '\n')
	h["Content-Type"] = valueProblem
	h["Content-Length"] = []string{strconv.Itoa(len(body))} // the client need not wait for the end of its own body
	h["Cache-Control"] = []string{"no-store"}
	for name, values := range p.GetHeaders() {
		h[name] = values
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(body) // the client is gone if this fails
}

func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	s.problem(r.Context(), err).write(w)
}

// humaContext gives huma's own refusals the status of our table, and reads
// every body as JSON whatever it calls itself: curl sends JSON as a form.
type humaContext struct {
	inner
	status int              // of a refusal, instead of the one huma chose
	by     access.Principal // from guardOperation on
}

// inner gives the embedded context a name other than that of its own method.
type inner = huma.Context

// Unwrap lets humago find the request.
func (c *humaContext) Unwrap() huma.Context { return c.inner }

// Context carries the request.
func (c *humaContext) Context() context.Context {
	return context.WithValue(c.inner.Context(), requestKey{}, c)
}

// Header hides the content types.
func (c *humaContext) Header(name string) string {
	switch name {
	case "Content-Type":
		return valueJSON[0]
	case "Accept":
		return ""
	}
	return c.inner.Header(name)
}

// SetStatus sends the status.
func (c *humaContext) SetStatus(status int) {
	if c.status != 0 {
		status = c.status
	}
	c.inner.SetStatus(status)
}

func wrapContext(ctx huma.Context, next func(huma.Context)) { next(&humaContext{inner: ctx}) }

// refusals turns huma's validation errors into problems.
func refusals(ctx huma.Context, _ string, v any) (any, error) {
	m, ok := v.(*huma.ErrorModel)
	if !ok {
		return v, nil
	}
	e := &devices.Error{Code: devices.CodeBadRequest}
	switch m.Status {
	case http.StatusRequestEntityTooLarge:
		e.Code = devices.CodeTooLarge
	case http.StatusInternalServerError:
		e.Code = devices.CodeInternal
	}
	var sentences []string
	for _, fault := range m.Errors {
		if fault.Message == "unknown query parameter" {
			fault.Message += "; /docs lists those of this operation"
		}
		sentences = append(sentences, strings.TrimPrefix(fault.Location+": "+fault.Message, ": "))
	}
	e.Detail = strings.Join(sentences, "; ")
	if e.Detail == "" {
		e.Detail = m.Detail
	}
	p := newProblem(e)
	if c, ok := ctx.(*humaContext); ok {
		c.status = p.Status
	}
	return p, nil
}
