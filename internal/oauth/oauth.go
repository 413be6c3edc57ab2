// Package oauth is the authorization server for hosts of language models (OAuth 2.1, MCP authorization of revision
// 2026-07-28). A person who has an API key, or a consent code made from one, allows an application to use MCP with a part
// of the key's rights: a grant, which is a child of the key.
//
// Nothing about applications is stored. One names itself by the URL of a document with its metadata, or registers, and its
// client_id is then the sealed metadata. Access tokens are sealed and checked by every node without the database; codes and refresh
// tokens are stored as hashes.
//
// Sources: RFC 6749, 7009 (revocation), 7523 (assertions), 7591 (registration), 7636 (PKCE), 8252 (native applications),
// 8414 and 9728 (metadata), 8707 (resources), 9207 (issuer), 9700 (security); draft-ietf-oauth-client-id-metadata-document.
package oauth

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/connlimit"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/egress"
	"fleetd/internal/fleet"
	"fleetd/internal/mcpserver"
)

// Paths.
const (
	Root          = "/oauth/"
	PathAuthorize = Root + "authorize"
	PathToken     = Root + "token"
	PathRegister  = Root + "register"
	PathRevoke    = Root + "revoke"
	PathMetadata  = "/.well-known/oauth-authorization-server"
)

// Lives of codes and tokens.
const (
	codeLife   = time.Minute
	accessLife = 15 * time.Minute
	// successorLife is how long a refresh token that was used gets the same successor again, while that is unused: the
	// answer may be lost, and two processes of a host may use the same one at once.
	successorLife = time.Minute
	// maxBody is that of a request, in bytes.
	maxBody = 64 << 10
)

const refreshPrefix = "flr_"

// Options of a Server. All fields are required, except Failures.
type Options struct {
	// Issuer is --public-api-url, without a path.
	Issuer string
	// CIMD admits applications that name themselves by a URL.
	CIMD bool
	// Hosts are globs over the hosts of applications and of their redirects: who may ask.
	Hosts   []string
	Service *fleet.Service
	Auth    *access.Authenticator
	Mint    *credential.Mint
	// Failures slows down clients that try keys and codes; may be nil.
	Failures *connlimit.Failures
	// Client fetches the documents of applications; nil: one that connects to public addresses alone.
	Client *http.Client
	Log    *slog.Logger
}

// Server is the authorization server. It is an http.Handler for its paths, and safe for concurrent use.
type Server struct {
	opt       Options
	documents *documents
}

// New returns a Server.
func New(opt Options) *Server {
	if opt.Client == nil {
		opt.Client = newClient()
	}
	return &Server{opt: opt, documents: newDocuments(opt.Client)}
}

// newClient returns the client for documents: it connects to public addresses alone, and follows no redirect.
func newClient() *http.Client {
	allow, _ := egress.Parse("", nil) // fails only for entries
	return &http.Client{Timeout: fetchTimeout,
		// No proxy: the address that is dialled would be that of the proxy.
		Transport:     &http.Transport{DialContext: allow.Dialer(fetchTimeout), TLSHandshakeTimeout: fetchTimeout, DisableKeepAlives: true, MaxResponseHeaderBytes: 16 << 10},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// Handles reports whether the server handles a path.
func Handles(path string) bool { return strings.HasPrefix(path, Root) || path == PathMetadata }

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	connlimit.PaceAnonymous(r.Context())
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	if r.URL.Path == PathAuthorize {
		s.authorize(w, r)
		return
	}
	// Pages of any origin may use the rest: it reads nothing that a browser adds.
	w.Header().Set("Access-Control-Allow-Origin", "*")
	if r.Method == http.MethodOptions {
		w.Header().Set("Access-Control-Allow-Methods", "GET, POST")
		w.Header().Set("Access-Control-Allow-Headers", "Content-Type, Mcp-Protocol-Version")
		w.WriteHeader(http.StatusNoContent)
		return
	}
	method := http.MethodPost
	var serve func(http.ResponseWriter, *http.Request) error
	switch r.URL.Path {
	case PathMetadata:
		method, serve = http.MethodGet, s.metadata
	case PathToken:
		serve = s.token
	case PathRegister:
		serve = s.register
	case PathRevoke:
		serve = s.revoke
	default:
		http.NotFound(w, r)
		return
	}
	if r.Method != method {
		w.Header().Set("Allow", method)
		http.Error(w, r.URL.Path+" takes "+method, http.StatusMethodNotAllowed)
		return
	}
	if err := serve(w, r); err != nil {
		s.refuse(w, err)
	}
}

// refusal is an error answer of RFC 6749, section 5.2.
type refusal struct {
	status int
	code   string
	text   string
}

func (e *refusal) Error() string { return e.text }

func refuse(code, text string) *refusal { return &refusal{http.StatusBadRequest, code, text} }

func invalidClient(text string) *refusal {
	return &refusal{http.StatusUnauthorized, "invalid_client", text}
}

// refuse writes an error. What is not a refusal is a fault of the node or its database, which passes.
func (s *Server) refuse(w http.ResponseWriter, err error) {
	var no *refusal
	if !errors.As(err, &no) {
		s.opt.Log.Warn("an OAuth request failed", "error", err)
		no = &refusal{http.StatusServiceUnavailable, "temporarily_unavailable", "the node cannot reach its database; try again"}
	}
	if no.status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "5")
	}
	writeJSON(w, no.status, struct {
		Error       string `json:"error"`
		Description string `json:"error_description"`
	}{no.code, no.text})
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	body, err := json.Marshal(value)
	if err != nil { // cannot fail for strings and numbers
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // fails only if the client has disconnected
}

// metadata implements RFC 8414.
func (s *Server) metadata(w http.ResponseWriter, _ *http.Request) error {
	at := func(path string) string { return s.opt.Issuer + path }
	writeJSON(w, http.StatusOK, struct {
		Issuer        string   `json:"issuer"`
		Authorize     string   `json:"authorization_endpoint"`
		Token         string   `json:"token_endpoint"`
		Register      string   `json:"registration_endpoint"`
		Revoke        string   `json:"revocation_endpoint"`
		Scopes        []string `json:"scopes_supported"`
		ResponseTypes []string `json:"response_types_supported"`
		ResponseModes []string `json:"response_modes_supported"`
		GrantTypes    []string `json:"grant_types_supported"`
		Methods       []string `json:"token_endpoint_auth_methods_supported"`
		Algorithms    []string `json:"token_endpoint_auth_signing_alg_values_supported"`
		RevokeMethods []string `json:"revocation_endpoint_auth_methods_supported"`
		RevokeAlgs    []string `json:"revocation_endpoint_auth_signing_alg_values_supported"`
		Challenges    []string `json:"code_challenge_methods_supported"`
		CIMD          bool     `json:"client_id_metadata_document_supported,omitempty"`
		Iss           bool     `json:"authorization_response_iss_parameter_supported"`
	}{s.opt.Issuer, at(PathAuthorize), at(PathToken), at(PathRegister), at(PathRevoke), append(access.GrantScopes.Names(), "offline_access"), []string{"code"}, []string{"query"},
		[]string{"authorization_code", "refresh_token"}, []string{methodNone, methodKey}, devices.Texts(algorithms), []string{methodNone, methodKey}, devices.Texts(algorithms), []string{"S256"}, s.opt.CIMD, true})
	return nil
}

// resourceOf returns the path of a resource (RFC 8707): of the whole fleet, of /sse, or of one device.
func (s *Server) resourceOf(values []string) (path string, err error) {
	no := refuse("invalid_target", "the resource must be "+s.opt.Issuer+mcpserver.PathMCP+", "+s.opt.Issuer+mcpserver.PathSSE+" or "+s.opt.Issuer+mcpserver.PathDevices+"{device}")
	values = slices.DeleteFunc(slices.Clone(values), func(value string) bool { return value == "" }) // RFC 6749, 3.1
	switch len(values) {
	case 0:
		return mcpserver.PathMCP, nil
	case 1:
	default:
		return "", no
	}
	path, ours := strings.CutPrefix(values[0], s.opt.Issuer)
	path, known := mcpserver.ResourceOf(path)
	if !ours || !known {
		return "", no
	}
	return path, nil
}

// isAllowedHost reports whether an application may ask: --oauth-hosts.
func (s *Server) isAllowedHost(host string) bool {
	return slices.ContainsFunc(s.opt.Hosts, func(glob string) bool { return access.Match(strings.ToLower(glob), strings.ToLower(host)) })
}

// repeated returns a parameter that is there twice, which no request may have (RFC 6749, 3.1 and 3.2), except resource.
func repeated(parameters url.Values) (name string, found bool) {
	for name, values := range parameters {
		if len(values) > 1 && name != "resource" {
			return name, true
		}
	}
	return "", false
}

// form reads the parameters of a body.
func form(r *http.Request) (url.Values, error) {
	if err := r.ParseForm(); err != nil {
		return nil, refuse("invalid_request", "the body is not a form of at most 64 KiB: send application/x-www-form-urlencoded")
	}
	if name, found := repeated(r.PostForm); found {
		return nil, refuse("invalid_request", "the parameter "+name+" is there more than once")
	}
	return r.PostForm, nil
}

// principal returns who sends a request without a caller.
func (s *Server) principal(r *http.Request) access.Principal {
	return access.Principal{Via: access.ViaMCP, From: s.opt.Failures.Client(r)}
}

// AccessToken implements access.Authenticator.AccessToken.
func AccessToken(mint *credential.Mint) func(token string, now time.Time) (grant, resource string, err error) {
	return func(token string, now time.Time) (grant, resource string, err error) {
		grant, resource, err = mint.OpenAccessToken(strings.TrimPrefix(token, access.AccessPrefix), now)
		switch {
		case errors.Is(err, credential.ErrExpired):
			return "", "", access.ErrExpired
		case err != nil:
			return "", "", access.ErrToken
		}
		return grant, resource, nil
	}
}

// unavailable reports whether an error is not about the request.
func unavailable(err error) bool {
	if err == nil {
		return false
	}
	return devices.AsError(err).Code == devices.CodeUnavailable || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
