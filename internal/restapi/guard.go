package restapi

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// permit tells why a caller may not make a request of this kind; nil if it may.
// text is the device in its path, if there is one.
func (s *Server) permit(ctx context.Context, by access.By, a about, text string) error {
	if a.anyone {
		if by.Who == nil { // the key ended after the token was checked
			return &devices.Error{Code: devices.CodeUnauthorized, Detail: access.ErrToken.Error()}
		}
		return nil
	}
	var id devices.ID
	if text != "" {
		var err error
		if id, err = parseDevice(text); err != nil {
			return err
		}
	}
	return s.permitDevice(ctx, by, a.scope, a.id, id)
}

// permitDevice is permit for a device that was found otherwise. The refusal
// goes to the record.
func (s *Server) permitDevice(ctx context.Context, by access.By, scope access.Scope, action string, id devices.ID) error {
	err := s.opt.Service.Permit(ctx, by, scope, id)
	if err != nil {
		s.opt.Service.NoteRefusal(by, action, id, err)
	}
	return err
}

// isUnavailable tells whether an answer has to wait for a part that is down, as for
// the labels of a device.
func isUnavailable(err error) bool {
	return err != nil && devices.AsError(err).Code == devices.CodeUnavailable
}

// callerKey finds the caller in the context of an operation of huma's.
type callerKey struct{}

// caller says who makes the request.
func caller(ctx context.Context) access.By {
	by, _ := ctx.Value(callerKey{}).(access.By)
	return by
}

// guardOperation stands in front of an operation of huma's.
func (s *Server) guardOperation(a about) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		r, w := humago.Unwrap(ctx)
		by := s.by(r, access.ViaREST)
		if err := s.permit(r.Context(), by, a, ctx.Param("device")); err != nil {
			s.fail(w, r, err)
			return
		}
		if err := checkQuery(r, nil); err != nil { // huma refuses unknown ones
			s.fail(w, r, err)
			return
		}
		if c, ok := ctx.(*humaContext); ok {
			c.by = by
		}
		next(ctx)
	}
}

// guardHandler stands in front of a plain handler.
func (s *Server) guardHandler(a about, handler http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := s.permit(r.Context(), s.by(r, access.ViaREST), a, r.PathValue("device")); err != nil {
			s.fail(w, r, err)
			return
		}
		handler(w, r)
	}
}
