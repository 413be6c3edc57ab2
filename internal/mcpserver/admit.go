package mcpserver

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/lobby"
)

// visit is who is behind a request or session, and where it leads.
type visit struct {
	who    *access.Caller
	from   string
	device devices.ID // empty: the whole fleet

	request *request                // the one that came with it
	place   *place                  // for the session that the request may make
	session atomic.Pointer[session] // that it made; nil without
}

type visitKey struct{}

// visitOf is the visit that a handler works for. Contexts of sessions keep the
// values of the request that made them.
func visitOf(ctx context.Context) *visit {
	v, _ := ctx.Value(visitKey{}).(*visit)
	if v == nil {
		return &visit{} // may do nothing
	}
	return v
}

func (v *visit) by() access.By { return access.By{Who: v.who, Via: access.ViaMCP, From: v.from} }

// Reasons of refusals. The list is closed: each has a counter.
const (
	refusedHost     = "host"
	refusedOrigin   = "origin"
	refusedToken    = "unauthorized"
	refusedGuesses  = "too_many"
	refusedScope    = "forbidden"
	refusedPath     = "not_found"
	refusedOwner    = "session_of_another"
	refusedTotal    = "sessions"
	refusedKey      = "sessions_of_key"
	refusedRequests = "requests_of_key"
	refusedCalls    = "calls_of_key"
	refusedBody     = "body"
	refusedDraining = "draining"
)

// refusal is why a request is not served.
type refusal struct {
	reason string
	err    *devices.Error
	status int // in place of the code's; 0: the code's
}

func refuse(reason string, code devices.Code, detail string) *refusal {
	return &refusal{reason: reason, err: &devices.Error{Code: code, Detail: detail}}
}

func (s *Server) refuse(w http.ResponseWriter, r *http.Request, no *refusal) {
	s.stats.Refused.Add(no.reason, 1)
	status, _ := no.err.Code.Status()
	status = cmp.Or(no.status, status)
	h := w.Header()
	switch status {
	case http.StatusUnauthorized:
		h.Set("Connection", "close") // its place is for those that prove who they are
		h.Set("WWW-Authenticate", `Bearer resource_metadata="`+base(r)+PathMetadata+r.URL.Path+`"`)
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		h.Set("Retry-After", "1")
	}
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(no.err.AppendProblem(nil), '\n')) // the client is gone if this fails
}

// checkPlace refuses requests that a web page may have caused: one of another
// site, or one that gave its own name this node's address.
func (s *Server) checkPlace(r *http.Request) *refusal {
	host := hostOf(r.Host)
	if _, err := netip.ParseAddr(host); err != nil && !isLocalName(host) && !s.listed(host) {
		return refuse(refusedHost, devices.CodeForbidden, "the Host header names no host of this node; give its name to --mcp-hosts if it is one")
	}
	origins := r.Header.Values("Origin")
	if len(origins) == 0 {
		return nil
	}
	u, err := url.Parse(origins[0])
	if len(origins) == 1 && err == nil && u.Host != "" && (u.Scheme == "http" || u.Scheme == "https") {
		from := hostOf(u.Host)
		addr, err := netip.ParseAddr(from)
		if isLocalName(from) || err == nil && addr.Unmap().IsLoopback() || strings.EqualFold(u.Host, r.Host) ||
			s.listedPage(u.Scheme+"://"+u.Host) {
			return nil
		}
	}
	return refuse(refusedOrigin, devices.CodeForbidden, "this request came from another site's page; give its origin to --mcp-origins if it may")
}

func (s *Server) listed(host string) bool {
	return slices.ContainsFunc(s.opt.Hosts, func(h string) bool { return strings.EqualFold(h, host) })
}

// hostOf is the host of host[:port], without the brackets of an IPv6 address.
func hostOf(authority string) string {
	if host, _, err := net.SplitHostPort(authority); err == nil {
		authority = host
	}
	return strings.TrimSuffix(strings.TrimPrefix(authority, "["), "]")
}

func isLocalName(host string) bool { return strings.EqualFold(host, "localhost") }

// visitor is who asks, and for what.
func (s *Server) visitor(r *http.Request) (*visit, *refusal) {
	who, err := s.opt.Door.Admit(lobby.Bearer(r.Header), time.Now())
	if err != nil {
		s.note(access.By{Via: access.ViaMCP, From: s.opt.Failures.From(r)}, r.Method, "", &devices.Error{Code: devices.CodeUnauthorized, Detail: err.Error()})
		if r.Header.Get("Authorization") != "" && s.opt.Failures.FailedRequest(r) {
			no := refuse(refusedGuesses, devices.CodeUnauthorized, "too many wrong tokens from this address; try again later with the right one")
			no.status = http.StatusTooManyRequests
			return nil, no
		}
		return nil, refuse(refusedToken, devices.CodeUnauthorized, unauthorized(err))
	}
	v := &visit{who: who, from: s.opt.Failures.From(r)}
	if s.opt.Draining() {
		return nil, refuse(refusedDraining, devices.CodeUnavailable, "this node is stopping; ask another one")
	}
	if r.URL.Path == PathMCP || r.URL.Path == PathSSE {
		return v, nil
	}
	text, found := strings.CutPrefix(r.URL.Path, PathDevices)
	if !found {
		return nil, refuse(refusedPath, devices.CodeNotFound, "MCP is at "+PathMCP+" and "+PathDevices+"{device}")
	}
	if v.device, err = devices.ParseID(text); err != nil {
		return nil, refuse(refusedPath, devices.CodeNotFound, err.Error())
	}
	if err := s.opt.Service.Permit(r.Context(), v.by(), access.ScopeRead, v.device); err != nil {
		s.note(v.by(), r.Method, v.device, err)
		return nil, &refusal{reason: refusedScope, err: devices.AsError(err)}
	}
	if r.Method == http.MethodPost {
		if _, err := s.opt.Service.Get(r.Context(), v.device); err != nil {
			return nil, &refusal{reason: refusedPath, err: devices.AsError(err)}
		}
	}
	return v, nil
}

func unauthorized(err error) string {
	switch {
	case errors.Is(err, access.ErrExpired), errors.Is(err, access.ErrRevoked):
		return err.Error()
	}
	return "give an API key as `Authorization: Bearer ...`; `fleetd keys create` makes one"
}

// base is the URL under which the client reaches this node. Host was checked.
func base(r *http.Request) string {
	if r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https") {
		return "https://" + r.Host
	}
	return "http://" + r.Host
}

// metadata answers RFC 9728: what is protected here, and how keys are shown.
// There is no authorization server: the operator gives keys out.
func (s *Server) metadata(w http.ResponseWriter, r *http.Request) {
	resource := strings.TrimPrefix(r.URL.Path, PathMetadata)
	if resource == "" {
		resource = PathMCP
	}
	if !Takes(resource) || strings.HasPrefix(resource, PathMetadata) || r.Method != http.MethodGet {
		s.refuse(w, r, refuse(refusedPath, devices.CodeNotFound, "there is no such resource"))
		return
	}
	body, err := json.Marshal(struct {
		Resource string   `json:"resource"`
		Name     string   `json:"resource_name"`
		Methods  []string `json:"bearer_methods_supported"`
		Scopes   []string `json:"scopes_supported"`
	}{base(r) + resource, "fleetd", []string{"header"}, access.AllScopes().Names()})
	if err != nil { // strings marshal
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*") // in place of one page: there is nothing in it that is not in the documentation
	h.Set("Content-Type", "application/json")
	_, _ = w.Write(append(body, '\n')) // the client is gone if this fails
}
