package restapi

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
)

// problem is every failure of the API, with the headers of its answer.
type problem struct{ api.Problem }

// newProblem makes the problem of a refusal.
func newProblem(e *devices.Error) *problem { return &problem{*e.Problem()} }

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
	body := append(p.JSON(), '\n')
	h := w.Header()
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
	by     access.Principal // from guardOperation on, and so is device unless the core judges the caller
	device devices.ID
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
	e.Detail = cmp.Or(e.Detail, m.Detail)
	p := newProblem(e)
	if c, ok := ctx.(*humaContext); ok {
		c.status = p.Status
	}
	return p, nil
}
