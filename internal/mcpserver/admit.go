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
	"strconv"
	"strings"
	"sync/atomic"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
)

// requestInfo is the caller of a request or session, and the server that it addresses.
type requestInfo struct {
	caller  *access.Caller
	granted bool // with an access token of OAuth
	from    string
	device  devices.ID // empty: the whole fleet

	request *request                // the HTTP request that carries it
	slot    *sessionSlot            // for the session that the request may open
	session atomic.Pointer[session] // that the request opened; nil without one
}

type requestInfoKey struct{}

// requestInfoOf returns the requestInfo of a handler's context. Contexts of sessions
// keep the values of the request that opened them.
func requestInfoOf(ctx context.Context) *requestInfo {
	v, _ := ctx.Value(requestInfoKey{}).(*requestInfo)
	if v == nil {
		return &requestInfo{} // has no permissions
	}
	return v
}

func (v *requestInfo) by() access.Principal {
	return access.Principal{Caller: v.caller, Via: access.ViaMCP, From: v.from}
}

// Reasons of refusals. Each has a counter.
const (
	refusedHost     = "host"
	refusedOrigin   = "origin"
	refusedToken    = "unauthorized"
	refusedGuesses  = "too_many"
	refusedScope    = "forbidden"
	refusedPath     = "not_found"
	refusedOwner    = "session_of_another"
	refusedStream   = "stream_open"
	refusedTotal    = "sessions"
	refusedKey      = "sessions_of_key"
	refusedRequests = "requests_of_key"
	refusedCalls    = "calls_of_key"
	refusedRate     = "rate_of_key"
	refusedBody     = "body"
	refusedDraining = "draining"
)

// refusal describes why a request is not served.
type refusal struct {
	reason string
	err    *devices.Error
	scopes string // that an application needs for the request, and lacks at least one of; empty: that is not the reason
}

func refuse(reason string, code devices.Code, detail string) *refusal {
	return &refusal{reason: reason, err: &devices.Error{Code: code, Detail: detail}}
}

func (s *Server) refuse(w http.ResponseWriter, r *http.Request, denied *refusal) {
	s.stats.Refused.Add(denied.reason, 1)
	status, _ := denied.err.Code.Status()
	h := w.Header()
	if denied.scopes != "" {
		h.Set("WWW-Authenticate", `Bearer error="insufficient_scope", scope="`+denied.scopes+`", `+s.metadataOf(r))
	}
	switch status {
	case http.StatusUnauthorized:
		h.Set("Connection", "close") // leaves the connection to clients that authenticate
		h.Set("WWW-Authenticate", s.challenge(r))
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		h.Set("Retry-After", "1")
	}
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	body := append(denied.err.Problem().JSON(), '\n')
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // fails only if the client has disconnected
}

// checkOrigin refuses requests that a web page may have caused: a page of another
// origin, or one whose own host name resolves to this node.
func (s *Server) checkOrigin(r *http.Request) *refusal {
	host := hostOf(r.Host)
	if _, err := netip.ParseAddr(host); err != nil && !isLocalName(host) && !s.isListedHost(host) {
		return refuse(refusedHost, devices.CodeForbidden, "the Host header is not a name of this node; add it to --mcp-hosts if it should be")
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
			s.isListedOrigin(u.Scheme+"://"+u.Host) {
			return nil
		}
	}
	return refuse(refusedOrigin, devices.CodeForbidden, "this request came from a web page of another origin; add the origin to --mcp-origins to allow it")
}

func (s *Server) isListedHost(host string) bool {
	return slices.ContainsFunc(s.opt.Hosts, func(h string) bool { return strings.EqualFold(h, host) })
}

// hostOf returns the host of host[:port], without the brackets of an IPv6 address.
func hostOf(authority string) string {
	if host, _, err := net.SplitHostPort(authority); err == nil {
		authority = host
	}
	return strings.TrimSuffix(strings.TrimPrefix(authority, "["), "]")
}

func isLocalName(host string) bool { return strings.EqualFold(host, "localhost") }

// identify authenticates a request and finds the server that it addresses.
func (s *Server) identify(r *http.Request) (*requestInfo, *refusal) {
	resource, _ := ResourceOf(r.URL.Path)
	who, granted, err := s.opt.Auth.AuthenticateAt(connlimit.BearerToken(r.Header), resource, clock.Now())
	if errors.Is(err, access.ErrUnknownGrant) { // of another node, a moment ago
		if err := s.opt.Service.CatchUp(r.Context()); err != nil {
			return nil, &refusal{reason: refusedToken, err: devices.AsError(err)}
		}
		who, granted, err = s.opt.Auth.AuthenticateAt(connlimit.BearerToken(r.Header), resource, clock.Now())
	}
	if err != nil {
		s.note(access.Principal{Via: access.ViaMCP, From: s.opt.Failures.Client(r)}, r.Method, "", &devices.Error{Code: devices.CodeUnauthorized, Detail: err.Error()})
		genuine := granted && !errors.Is(err, access.ErrToken) // it was valid once, or is valid at another address
		if r.Header.Get("Authorization") != "" && !genuine && s.opt.Failures.FailedRequest(r) {
			return nil, refuse(refusedGuesses, devices.CodeRateLimited, "too many wrong tokens from this address; try again later with a valid one")
		}
		return nil, refuse(refusedToken, devices.CodeUnauthorized, unauthorized(err))
	}
	v := &requestInfo{caller: who, granted: granted, from: s.opt.Failures.Client(r)}
	if s.opt.Draining() {
		return nil, refuse(refusedDraining, devices.CodeUnavailable, "this node is stopping; send the request to another node")
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
	if denied := v.needs(access.ScopeRead); denied != nil {
		return nil, denied
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
	case errors.Is(err, access.ErrExpired), errors.Is(err, access.ErrRevoked), errors.Is(err, access.ErrResource):
		return err.Error()
	}
	return "give an API key as `Authorization: Bearer ...`; `fleetd keys create` makes one"
}

// base returns the URL under which the client reaches this node; Host was checked.
func base(r *http.Request) string {
	if r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https") {
		return "https://" + r.Host
	}
	return "http://" + r.Host
}

// origin returns the address of this server for a client. It is the configured one if there is: what is derived from a request
// could be forged, and hosts compare it.
func (s *Server) origin(r *http.Request) string {
	if s.opt.PublicURL != "" {
		return s.opt.PublicURL
	}
	return base(r)
}

// firstScopes are what a host should ask for first. Hosts ask for all that the metadata of a resource names; the server's has the others.
var firstScopes = []string{string(access.ScopeRead), string(access.ScopeCall)}

// challenge is the WWW-Authenticate of a refusal (RFC 6750, 3; RFC 9728, 5.1). The error is for a host that sent a token, and has to
// get another one.
func (s *Server) challenge(r *http.Request) string {
	text := "Bearer " + s.metadataOf(r)
	if s.opt.Login {
		text += `, scope="` + strings.Join(firstScopes, " ") + `"`
	}
	if r.Header.Get("Authorization") != "" {
		text += `, error="invalid_token"`
	}
	return text
}

// metadataOf is the parameter of a challenge that leads to the metadata of the resource of a request.
func (s *Server) metadataOf(r *http.Request) string {
	return `resource_metadata="` + s.origin(r) + PathMetadata + r.URL.Path + `"`
}

// metadata implements RFC 9728: the protected resource as the client wrote it (section 3.3), how to send a token, and the authorization
// server if there is one. Without one, operators create keys.
func (s *Server) metadata(w http.ResponseWriter, r *http.Request) {
	resource := cmp.Or(strings.TrimPrefix(r.URL.Path, PathMetadata), PathMCP)
	if _, ok := ResourceOf(resource); !ok || r.Method != http.MethodGet {
		s.refuse(w, r, refuse(refusedPath, devices.CodeNotFound, "unknown resource"))
		return
	}
	var servers []string
	scopes := access.AllScopes().Names()
	if s.opt.Login {
		servers, scopes = []string{s.opt.PublicURL}, firstScopes
	}
	body, err := json.Marshal(struct {
		Resource string   `json:"resource"`
		Name     string   `json:"resource_name"`
		Servers  []string `json:"authorization_servers,omitempty"`
		Methods  []string `json:"bearer_methods_supported"`
		Scopes   []string `json:"scopes_supported"`
	}{s.origin(r) + resource, "fleetd", servers, []string{"header"}, scopes})
	if err != nil { // cannot fail for strings
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*") // for every page: the response is public
	h.Set("Content-Type", "application/json")
	_, _ = w.Write(append(body, '\n')) // fails only if the client has disconnected
}
