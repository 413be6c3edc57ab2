package restapi

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

func etag(revision int64) string { return `"` + strconv.FormatInt(revision, 10) + `"` }

// Match is the header of a request that changes something other than a device only as the caller has seen it.
type Match struct {
	IfMatch string `header:"If-Match" doc:"ETag of what is changed, as it was read: the request is refused with 412 if it was changed since."`
}

// revision returns the revision of the header; empty: any.
func (m *Match) revision() string {
	text := strings.TrimSpace(m.IfMatch)
	if text == "*" {
		return ""
	}
	return strings.Trim(text, `"`)
}

// quoted returns an answer with the ETag of a revision.
func quoted[T any](revision string, body T) *tagged[T] {
	return &tagged[T]{ETag: `"` + revision + `"`, Body: body}
}

// secret is an answer with a secret, which nobody on the way may store.
type secret[T any] struct {
	CacheControl string `header:"Cache-Control"`
	Body         T
}

func newSecret[T any](body T) *secret[T] { return &secret[T]{"no-store", body} }

// Precondition is the header of a request that changes a device only as the caller
// has seen it.
type Precondition struct {
	IfMatch string `header:"If-Match" doc:"ETag of the device as it was read: the request is refused with 412 if a decision was made about it since."`
}

// revision is what If-Match names; 0: any.
func (p *Precondition) revision() (int64, error) {
	text := (&Match{p.IfMatch}).revision()
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n <= 0 {
		return 0, newProblem(&devices.Error{Code: devices.CodeStale, Detail: "no member has the ETag " + strconv.Quote(p.IfMatch) + ": read the device again and make your change there"})
	}
	return n, nil
}

// revokedAnswer is a revocation: 204 if it is recorded, else 202 with how far it is.
type revokedAnswer struct {
	Status int
	Body   *api.Revocation
}

func newRevoked(r registry.RevokeResult) *revokedAnswer {
	if r.Recorded {
		return &revokedAnswer{Status: http.StatusNoContent}
	}
	return &revokedAnswer{http.StatusAccepted, &api.Revocation{Nodes: append([]string{}, r.Nodes...)}}
}

// registerRevoke adds an operation that revokes something.
func registerRevoke[In any](s *Server, op huma.Operation, handler func(context.Context, *In) (*revokedAnswer, error)) {
	op.Responses[strconv.Itoa(http.StatusAccepted)] = &huma.Response{
		Description: "Revoked without the database: in force on the nodes named, and recorded as soon as the database answers.",
		Content:     map[string]*huma.MediaType{valueJSON[0]: {Schema: schemaOf[api.Revocation](s)}}}
	register(s, op, handler)
	op.Responses[strconv.Itoa(op.DefaultStatus)].Content = nil // what huma derives from the type
}
