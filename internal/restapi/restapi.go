// Package restapi serves the API of a node: JSON over HTTP under /v1 onto
// fleet.Service, server-sent events, the OpenAPI 3.1 document that describes
// both, and a page that shows it.
//
// Most operations are declared with huma on the standard library's mux. The
// two that carry calls to devices are plain handlers which decode spans of the
// request and append the answer: a framework's work per request would cost
// half of what the whole call costs. They are described in the same
// document.
//
// Every failure is one problem document (RFC 9457), and one table gives each
// code its status.
package restapi

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/attest"
	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/explain"
	"fleetd/internal/fleet"
	"fleetd/internal/precompressed"
	"fleetd/internal/stats"
	"fleetd/internal/trace"
)

// QueueLimits of requests.
const (
	BodyLimit    = 64 << 10 // bytes
	maxNotedPath = 128      // bytes, of a request without a token
)

// Events reads the event stream.
type Events interface {
	// Follow calls deliver for the stored events that q selects, from one
	// goroutine, until ctx ends or deliver fails. It fails with
	// devices.CodeUnavailable, at once, if the stream does not answer.
	Follow(ctx context.Context, q devices.EventQuery, deliver func(devices.StreamEvent) error) error
	// Erase deletes the stored events of a device.
	Erase(ctx context.Context, device devices.ID) error
}

// Photos reads stored photos. Errors are *devices.Error, CodeNotFound and
// CodeUnavailable among them.
type Photos interface {
	// List returns at most limit photos, newest first, of one device or of all
	// if device is empty; before is the id after which the page starts. more
	// reports whether others follow.
	List(ctx context.Context, device devices.ID, before string, limit int) (photos []devices.Photo, more bool, err error)
	// Open returns a photo and its JPEG, which the caller closes.
	Open(ctx context.Context, reader, id string) (devices.Photo, io.ReadCloser, error)
	// Delete removes a photo.
	Delete(ctx context.Context, id string) error
	// DeleteAll removes every photo of a device.
	DeleteAll(ctx context.Context, device devices.ID) (deleted int, err error)
}

// Diagnoser computes what a device gets at its OTA check; id may be empty.
type Diagnoser interface {
	Diagnose(id devices.ID) devices.Diagnosis
}

// Archive is what the database keeps of the policy and the audit. Errors are those of
// fleet.Records.
type Archive interface {
	// PolicyVersion returns one version of the policy, or another one if it is
	// not there.
	PolicyVersion(ctx context.Context, version int64) (access.Policy, error)
	// PolicyVersions returns at most limit versions below one, newest first, or
	// the newest if that is 0.
	PolicyVersions(ctx context.Context, before int64, limit int) ([]access.Policy, error)
	audit.Archive
	// AuditRuns returns blocks after q.Before, in the order of run and
	// sequence.
	AuditRuns(ctx context.Context, q audit.Query) ([]audit.Block, error)
}

// Options of a Server. All fields are required but AuthNone, Console and Dir.
type Options struct {
	Service *fleet.Service
	Mint    *credential.Mint
	// AuthNone requires no token. Requests that a web page may have caused are
	// then refused: the listener is on loopback, and so are browsers.
	AuthNone bool
	// Work bounds what one caller has the node do, calls excepted; nil does not.
	Work *connlimit.Work
	// Failures slows down clients that guess tokens; nil does not.
	Failures  *connlimit.Failures
	Events    Events
	Photos    Photos
	Attest    *attest.List
	Archive   Archive
	Jobs      Jobs
	Stats     *stats.Fleet
	Explainer *explain.Explainer
	Tracer    *trace.Tracer
	Webhooks  Webhooks
	Firmware  Firmware
	// MaxFirmware is how many bytes a firmware file may have.
	MaxFirmware int64
	Diagnoser   Diagnoser
	// PublicAPIURL is the address under which hosts reach MCP; may be empty.
	PublicAPIURL string
	// Nodes are the nodes of the fleet, this one included.
	Nodes func() []devices.Node
	// Authenticate judges what an MQTT client of an external broker presents;
	// nil without an external broker.
	Authenticate func(clientID, username, password string) error
	// Ready names the parts that are down; none means ready.
	Ready func() map[string]error
	// Draining reports whether the node stops: calls are then refused, and event
	// streams end.
	Draining func() bool
	// LogLevel is what /v1/log-level shows and sets.
	LogLevel *slog.LevelVar
	Log      *slog.Logger
	Version  string
	// Console serves the web console below /console/; nil: it is switched off.
	Console http.Handler
	// Dir is where files are kept while they are read; empty: where the system
	// keeps temporary ones.
	Dir string
}

// Server is the API of one node: an http.Handler. Event streams and calls take
// their time, so its http.Server must have neither a ReadTimeout nor a
// WriteTimeout.
type Server struct {
	opt      Options
	mux      *http.ServeMux
	api      huma.API
	auth     *access.Authenticator
	public   map[string]bool  // exact paths that need no token
	rights   map[string]about // what an operation takes, by `METHOD /path`
	browsers *http.CrossOriginProtection
	patience time.Duration // streamWrite, less in tests

	streams   *connlimit.Shares[string] // of keys
	importing sync.Mutex                // one import at a time
	receiving places                    // files on their way
}

// New returns a Server.
func New(opt Options) *Server {
	s := &Server{opt: opt, mux: http.NewServeMux(), public: map[string]bool{}, rights: map[string]about{},
		browsers: http.NewCrossOriginProtection(), patience: streamWrite, streams: connlimit.NewShares[string](streamsOfKey),
		auth: &access.Authenticator{Keys: opt.Service.Keys(), IsAdmin: opt.Mint.IsAdmin, Open: opt.AuthNone}}
	s.newAPI()
	s.deviceRoutes()
	s.selectionRoutes()
	s.bulkRoutes()
	s.changeRoutes()
	s.attestationRoutes()
	s.rotateRoutes()
	s.secretRoutes()
	s.toolRoutes()
	s.callRoutes()
	s.messageRoutes()
	s.jobRoutes()
	s.eventRoutes()
	s.webhookRoutes()
	s.photoRoutes()
	s.firmwareRoutes()
	s.keyRoutes()
	s.selfRoutes()
	s.policyRoutes()
	s.auditRoutes()
	s.nodeRoutes()
	s.statsRoutes()
	s.consoleRoutes()
	s.explainRoutes()
	s.traceRoutes()
	s.documentRoutes()
	s.mux.HandleFunc("/", s.unknown)
	return s
}

// Handle adds a handler for administrators, such as pprof. Call it before the
// first request; pattern is one of http.ServeMux.
func (s *Server) Handle(pattern string, h http.Handler) {
	s.mux.HandleFunc(pattern, s.guardHandler(about{id: pattern, scope: access.ScopeAdmin}, h.ServeHTTP))
}

// HandlePublic adds a handler that needs no token, such as metrics; pattern is
// `METHOD /exact/path`.
func (s *Server) HandlePublic(pattern string, h http.Handler) {
	_, path, _ := strings.Cut(pattern, " ")
	s.public[path] = true
	s.mux.Handle(pattern, h)
}

// Shared header values; net/http copies them and nobody writes to them.
var (
	valueNosniff = []string{"nosniff"}
	// valuePolicy keeps browsers from showing an answer as a page that runs scripts or loads files.
	valuePolicy = []string{"default-src 'none'; frame-ancestors 'none'; sandbox"}
	// valueHSTS has browsers use TLS alone for this name; behind a proxy with TLS the header is the proxy's.
	valueHSTS    = []string{"max-age=31536000"}
	valueJSON    = []string{"application/json"}
	valueProblem = []string{"application/problem+json"}
)

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header()["X-Content-Type-Options"] = valueNosniff
	w.Header()["Content-Security-Policy"] = valuePolicy
	if r.TLS != nil {
		w.Header()["Strict-Transport-Security"] = valueHSTS
	}
	if s.public[r.URL.Path] || isConsole(r) {
		connlimit.PaceAnonymous(r.Context())
	} else {
		if p := s.admit(r); p != nil {
			if p.Code == string(devices.CodeUnauthorized) && r.Header.Get("Authorization") != "" && s.opt.Failures.FailedRequest(r) {
				p = tooManyFailures()
			} else if p.Code == string(devices.CodeUnauthorized) {
				w.Header().Set("WWW-Authenticate", `Bearer realm="fleetd"`)
			}
			// A connection that has proven nothing takes a place from those that would.
			w.Header().Set("Connection", "close")
			p.write(w)
			return
		}
		connlimit.MarkRequestAuthenticated(r.Context())
	}
	if r.Method != http.MethodGet { // answers to changes and calls are short
		s.mux.ServeHTTP(w, r)
		return
	}
	client := &pausedAnswer{ResponseWriter: w}
	counted := &countedAnswer{ResponseWriter: client, client: client}
	defer counted.charge(s.opt.Work)
	if !precompressed.AcceptsGzip(r) {
		s.mux.ServeHTTP(counted, r)
		return
	}
	answer := &gzipAnswer{ResponseWriter: client}
	counted.ResponseWriter = answer
	s.mux.ServeHTTP(counted, r)
	answer.end()
}

// admit returns why a request may not pass, nil if it may.
func (s *Server) admit(r *http.Request) *problem {
	if s.opt.AuthNone {
		return s.admitLocal(r)
	}
	if _, err := s.auth.Authenticate(connlimit.BearerToken(r.Header), clock.Now()); errors.Is(err, access.ErrResource) {
		return newProblem(&devices.Error{Code: devices.CodeForbidden, Detail: err.Error()})
	} else if err != nil {
		refusal := &devices.Error{Code: devices.CodeUnauthorized, Detail: err.Error() +
			": give an API key (`fleetd keys create`) or the admin token as `Authorization: Bearer ...`; the node keeps the latter in its data directory, in the file admin-token"}
		s.opt.Service.NoteRefusal(access.Principal{Via: access.ViaREST, From: s.opt.Failures.Client(r)}, r.Method+" "+r.URL.Path[:min(len(r.URL.Path), maxNotedPath)], "", refusal)
		return newProblem(refusal)
	}
	return nil
}

// by returns the caller of an authenticated request. It is looked up again where it is
// needed, because carrying it along with a request costs more than finding it.
func (s *Server) by(r *http.Request, via access.Via) access.Principal {
	who, err := s.auth.Authenticate(connlimit.BearerToken(r.Header), clock.Now())
	if err != nil {
		who = nil // the key ended a moment ago
	}
	return access.Principal{Caller: who, Via: via, From: s.opt.Failures.Client(r)}
}

// admitLocal replaces the token where none is required: a web page open in a
// browser on this machine could otherwise send requests here, directly or by
// giving its own host name this address.
func (s *Server) admitLocal(r *http.Request) *problem {
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.Trim(host, "[]")
	if net.ParseIP(host) == nil && !strings.EqualFold(host, "localhost") {
		return newProblem(&devices.Error{Code: devices.CodeForbidden,
			Detail: "without a token the API answers only to localhost or an IP address in the Host header"})
	}
	if err := s.browsers.Check(r); err != nil {
		return newProblem(&devices.Error{Code: devices.CodeForbidden, Detail: "this request came from another site's page: " + err.Error()})
	}
	return nil
}

// methods are tried to tell a wrong method from an unknown path.
var methods = []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}

// unknown answers requests that no route matches.
func (s *Server) unknown(w http.ResponseWriter, r *http.Request) {
	var allowed []string
	probe := r.Clone(r.Context())
	for _, method := range methods {
		probe.Method = method
		if _, pattern := s.mux.Handler(probe); pattern != "/" {
			allowed = append(allowed, method)
		}
	}
	if len(allowed) == 0 {
		newProblem(&devices.Error{Code: devices.CodeNotFound, Detail: "there is nothing at " + r.URL.Path + "; /docs lists all paths"}).write(w)
		return
	}
	w.Header().Set("Allow", strings.Join(allowed, ", "))
	newProblem(&devices.Error{Code: devices.CodeMethodNotAllowed, Detail: r.URL.Path + " takes " + strings.Join(allowed, ", ") + ", not " + r.Method}).write(w)
}

// draining is the refusal of calls while the node stops.
func (s *Server) draining() error {
	if !s.opt.Draining() {
		return nil
	}
	return &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "this node is stopping; send the request to another node"}
}
