package restapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"fleetd/internal/access"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// errKeyEnded is for a key that ended after its token was checked.
var errKeyEnded = &devices.Error{Code: devices.CodeUnauthorized, Detail: access.ErrToken.Error()}

// permit returns why a caller may not make a request of this kind; nil if it may.
// id is the device in its path, if there is one.
func (s *Server) permit(ctx context.Context, by access.Principal, a about, id devices.ID) error {
	if a.anyone {
		if by.Caller == nil {
			return errKeyEnded
		}
		return nil
	}
	err := s.permitDevice(ctx, by, a.scope, a.id, id)
	if err != nil && a.hides && by.Caller != nil && by.Caller.Scopes.Has(a.scope) && !isUnavailable(err) {
		return registry.UnknownDevice(id)
	}
	return err
}

// permitDevice is permit for a device that was found otherwise. The refusal
// goes to the record.
func (s *Server) permitDevice(ctx context.Context, by access.Principal, scope access.Scope, action string, id devices.ID) error {
	err := s.opt.Service.Permit(ctx, by, scope, id)
	if err != nil {
		s.opt.Service.NoteRefusal(by, action, id, err)
	}
	return err
}

// isUnavailable reports whether an answer has to wait for a part that is down, as for
// the labels of a device.
func isUnavailable(err error) bool {
	return err != nil && devices.AsError(err).Code == devices.CodeUnavailable
}

// requestKey finds the request in the context of an operation of huma's.
type requestKey struct{}

// caller is the caller of the request.
func caller(ctx context.Context) access.Principal {
	if c, ok := ctx.Value(requestKey{}).(*humaContext); ok {
		return c.by
	}
	return access.Principal{}
}

// deviceOf is the device in the path of the request, which was read when its caller was checked.
func deviceOf(ctx context.Context) devices.ID {
	if c, ok := ctx.Value(requestKey{}).(*humaContext); ok {
		return c.device
	}
	return ""
}

// requestOf is the request in the context of an operation of huma's, and its answer's writer.
func requestOf(ctx context.Context) (*http.Request, http.ResponseWriter) {
	return humago.Unwrap(ctx.Value(requestKey{}).(*humaContext))
}

// listOf is the listName of the request.
func listOf(ctx context.Context) string {
	if c, ok := ctx.Value(requestKey{}).(*humaContext); ok {
		return listName(c.URL())
	}
	return ""
}

// guardOperation checks the caller of an operation of huma's.
func (s *Server) guardOperation(a about) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		r, w := humago.Unwrap(ctx)
		var slot *connlimit.Slot
		var id devices.ID
		by, err := s.by(r, access.ViaREST), checkQuery(r) // huma refuses unknown ones
		if err == nil && !a.judged {
			slot, id, err = s.enter(w, r, by, a)
			defer slot.Leave()
		}
		if err != nil {
			s.fail(w, r, err)
			return
		}
		if c, ok := ctx.(*humaContext); ok {
			c.by, c.device = by, id
		}
		next(ctx)
	}
}

// guardHandler checks the caller of a handler that is no operation.
func (s *Server) guardHandler(a about, handler http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		slot, _, err := s.enter(w, r, s.by(r, access.ViaREST), a)
		defer slot.Leave()
		if err != nil {
			s.fail(w, r, err)
			return
		}
		handler(w, r)
	}
}

// enter returns the slot in which a request of this kind is worked on, and the device in its path, or why it is refused.
func (s *Server) enter(w http.ResponseWriter, r *http.Request, by access.Principal, a about) (slot *connlimit.Slot, id devices.ID, err error) {
	slot, err = s.begin(w, r, by) // before the scopes: refusals cost work, too
	if text := r.PathValue("device"); err == nil && text != "" {
		id, err = parseDevice(text)
	}
	if err == nil {
		err = s.permit(r.Context(), by, a, id)
	}
	return slot, id, err
}

// begin waits until the caller may have one more request worked on, and returns the slot
// in which that is done.
func (s *Server) begin(w http.ResponseWriter, r *http.Request, by access.Principal) (*connlimit.Slot, error) {
	if by.Caller == nil { // the key ended after the token was checked
		return nil, nil
	}
	err := s.opt.Work.Begin(r.Context(), by.Caller.Key)
	var slot *connlimit.Slot
	if err == nil {
		slot, err = s.opt.Work.Compute(r.Context(), by.Caller.Key)
	}
	if err != nil {
		if errors.Is(err, connlimit.ErrTooMuchWork) {
			w.Header().Set("Retry-After", retryWork)
		}
		return nil, workError(err)
	}
	r.Body = &pausedBody{r.Body, slot}
	if c, counted := w.(*countedAnswer); counted {
		c.caller, c.client.slot = by.Caller.Key, slot
	}
	return slot, nil
}

// retryWork is the Retry-After of a caller that has more work done than it may.
var retryWork = strconv.Itoa(int(connlimit.WorkWait / time.Second))

// workError is the refusal for an error of connlimit.Work.
func workError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, connlimit.ErrTooMuchWork):
		return &devices.Error{Code: devices.CodeRateLimited, Detail: fmt.Sprintf("this key makes more requests than %d a second, or more large ones at once than the node works on; calls of tools do not count", connlimit.WorkRate)}
	}
	return &devices.Error{Code: devices.CodeUnavailable, Detail: "the client left while its request waited"}
}

// pausedBody gives the slot of its request back while it waits for the client.
type pausedBody struct {
	io.ReadCloser
	slot *connlimit.Slot
}

// Read reads bytes of the body.
func (b *pausedBody) Read(p []byte) (n int, err error) {
	b.slot.Pause(func() { n, err = b.ReadCloser.Read(p) })
	return n, err
}

// pausedAnswer gives the slot of its request back while it waits for the client, and does not take it again
// if the answer is a stream of events or a photo. Nothing is computed for a photo, and a request that holds one of the places for
// photos must not wait for a slot: requests with a slot wait for these places.
type pausedAnswer struct {
	http.ResponseWriter
	slot *connlimit.Slot
}

// Unwrap is for http.ResponseController.
func (a *pausedAnswer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// Write sends bytes of the answer.
func (a *pausedAnswer) Write(p []byte) (n int, err error) {
	if h := a.Header(); isStream(h) || h.Get("Content-Type") == mediaJPEG {
		a.slot.Leave()
	}
	a.slot.Pause(func() { n, err = a.ResponseWriter.Write(p) })
	return n, err
}

func isStream(h http.Header) bool {
	return strings.HasPrefix(h.Get("Content-Type"), "text/event-stream")
}

// countedAnswer counts the bytes of an answer as it was before compression.
type countedAnswer struct {
	http.ResponseWriter
	client *pausedAnswer // what ResponseWriter writes to in the end
	caller string        // whose work it is; empty: of nobody
	bytes  int64
}

// Unwrap is for http.ResponseController.
func (a *countedAnswer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// Write sends bytes of the answer.
func (a *countedAnswer) Write(b []byte) (int, error) {
	n, err := a.ResponseWriter.Write(b)
	a.bytes += int64(n)
	return n, err
}

// charge counts the answer as its caller's work. What a stream brings in hours does not count.
func (a *countedAnswer) charge(work *connlimit.Work) {
	if a.caller != "" && !isStream(a.Header()) {
		work.Charge(a.caller, a.bytes)
	}
}
