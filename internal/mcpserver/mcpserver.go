// Package mcpserver serves the fleet as an MCP server to hosts of language models:
// `/mcp` with a small constant set of tools over the whole fleet,
// `/mcp/devices/{id}` with one device's own tools under names that hosts accept, and
// `/sse` for hosts that only support the transport before Streamable HTTP.
//
// Two generations of the protocol are served on one URL. Revisions up to 2025-11-25
// have sessions, 2026-07-28 does not; the header Mcp-Protocol-Version distinguishes
// them. The official SDK implements the protocol. This package adds what a server with
// many keys needs: authentication, limits of sessions, their owner and their end, and
// the cleaning of a device's texts before they reach a model.
//
// This package makes no access decisions. The core makes them, at the node that owns
// the device, as for every other interface.
package mcpserver

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/audit"
	"fleetd/internal/connlimit"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// Paths.
const (
	PathMCP      = "/mcp"
	PathDevices  = "/mcp/devices/"
	PathSSE      = "/sse"
	PathMetadata = "/.well-known/oauth-protected-resource"
)

// Limits of requests and sessions.
const (
	BodyLimit       = 256 << 10 // bytes of a request
	MaxSessions     = 1000      // of all callers
	MaxBatch        = 100       // messages in one body, in revisions with batches
	MaxKeySessions  = 100       // of one caller
	MaxKeyRequests  = 200       // of one caller in progress, including streams
	MaxKeyCalls     = 200       // of one caller in progress, even if the client has disconnected
	MaxSubscription = 64        // resource subscriptions of one session
	SessionTimeout  = 30 * time.Minute
	closeGrace      = 10 * time.Second // for calls in progress when the node stops
	sweepEvery      = 250 * time.Millisecond
)

// revisionModern is the first revision without sessions. Revisions are dates, so they
// can be compared as text.
const revisionModern = "2026-07-28"

// Events reads the event stream.
type Events interface {
	// Follow calls deliver for the stored events that q selects until ctx ends
	// or deliver fails.
	Follow(ctx context.Context, q devices.EventQuery, deliver func(devices.StreamEvent) error) error
	// Recent returns the last events that q selects and keep accepts, oldest
	// first, at most limit.
	Recent(ctx context.Context, q devices.EventQuery, limit int, keep func(*devices.StreamEvent) bool) ([]devices.StreamEvent, error)
}

// Photos reads stored photos.
type Photos interface {
	Open(ctx context.Context, reader, id string) (devices.Photo, io.ReadCloser, error)
}

// Explainer answers why a device or a call is as it is.
type Explainer interface {
	Device(ctx context.Context, by access.Principal, id devices.ID) (api.Why, error)
	ExplainCall(ctx context.Context, by access.Principal, call string) (api.Why, error)
}

// Options of a Server. All fields except Failures, Work, Hosts and Origins are required.
type Options struct {
	Service *fleet.Service
	Auth    *access.Authenticator
	// Failures slows down clients that try tokens; may be nil.
	Failures *connlimit.Failures
	// Work bounds what each key has the node do, calls of devices excepted; may be nil.
	Work      *connlimit.Work
	Events    Events
	Photos    Photos
	Audit     audit.Archive
	Jobs      Jobs
	Explainer Explainer
	// Hosts are names of the API besides IP addresses and localhost. Origins are web
	// pages that may send requests, as scheme://host[:port].
	Hosts, Origins []string
	// PublicURL is the address under which hosts reach MCP, --public-api-url; may be empty.
	PublicURL string
	// Login says that there is an authorization server at PublicURL; without it, hosts use API keys alone.
	Login bool
	// Node is the prefix of session ids, by which a load balancer finds the node.
	Node     string
	Version  string
	Draining func() bool
	// Mint seals cursors.
	Mint *credential.Mint
	Log  *slog.Logger
}

// Server serves MCP. It is an http.Handler for its paths.
type Server struct {
	opt           Options
	log           *slog.Logger
	fleet         endpoint
	device        endpoint
	sessions      *sessions
	index         *lru[devices.Hash, *toolIndex]
	history       *history
	wordIndex     *wordIndex
	watch         *watch
	subscriptions *subscriptions
	toolLists     *toolLists
	notifier      *notifier
	sseStreams    sseStreams
	stats         Stats

	ctx   context.Context // ends with the server
	stop  context.CancelFunc
	tasks sync.WaitGroup
}

// endpoint is one MCP server with its two HTTP handlers.
type endpoint struct {
	server    *mcp.Server
	stateful  http.Handler // revisions with sessions
	stateless http.Handler
}

// New returns a running server; Close ends it.
func New(opt Options) *Server {
	s := &Server{opt: opt, log: opt.Log, index: newLRU[devices.Hash, *toolIndex](maxIndexes), history: newHistory(), subscriptions: newSubscriptions(), sseStreams: sseStreams{byID: map[string]*sseStream{}}}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.notifier = newNotifier(s.ctx)
	s.wordIndex = newWordIndex(s)
	s.sessions = newSessions(&s.stats, s.forget)
	s.watch = newWatch(opt.Events, opt.Log, s.needsEvents, s.wordIndex.onReport, s.notify)
	s.fleet = s.newEndpoint(s.newFleetServer())
	s.device = s.newEndpoint(s.newDeviceServer())
	s.tasks.Go(func() { s.watch.follow(s.ctx) })
	s.tasks.Go(func() { s.watch.deliver(s.ctx) })
	s.tasks.Go(s.sweep)
	return s
}

// Stats returns the counters.
func (s *Server) Stats() *Stats { return &s.stats }

// forget drops the pending notifications of a session that has ended.
func (s *Server) forget(session *mcp.ServerSession) {
	s.toolLists.drop(session)
	s.subscriptions.drop(session)
}

// Close ends every session and waits for calls in progress up to closeGrace, after
// which they are cancelled.
func (s *Server) Close() {
	s.sessions.drain()
	s.sessions.wait(closeGrace)
	s.sessions.endAll()
	s.stop()
	s.tasks.Wait()
	s.notifier.close()
}

func (s *Server) newEndpoint(server *mcp.Server) endpoint {
	get := func(*http.Request) *mcp.Server { return server }
	// The SDK checks Host only on loopback listeners; checkOrigin checks it on all.
	options := mcp.StreamableHTTPOptions{MaxRequestBodyBytes: BodyLimit, PropagateRequestCancellation: true, DisableLocalhostProtection: true, Logger: discardLog}
	modern := options
	modern.Stateless = true
	options.SessionTimeout = SessionTimeout
	options.EventStore = s.sessions
	return endpoint{server, mcp.NewStreamableHTTPHandler(get, &options), mcp.NewStreamableHTTPHandler(get, &modern)}
}

// discardLog discards the SDK's log lines: several for each request, with nothing that is
// not in the response.
var discardLog = slog.New(slog.DiscardHandler)

// serverOptions returns the options that both servers share.
func (s *Server) serverOptions(instructions string, capabilities *mcp.ServerCapabilities) *mcp.ServerOptions {
	return &mcp.ServerOptions{
		Instructions: instructions,
		Logger:       discardLog,
		Capabilities: capabilities,
		GetSessionID: s.newSessionID,
		// Lists depend on the caller.
		SetCacheable:       func(_ context.Context, _ mcp.Request, c *mcp.Cacheable) { c.CacheScope = "private" },
		CompletionHandler:  s.complete,
		SubscribeHandler:   s.subscribe,
		UnsubscribeHandler: s.unsubscribe,
	}
}

// Handles reports whether the server handles a path.
func Handles(path string) bool {
	return path == PathMCP || strings.HasPrefix(path, PathMCP+"/") || path == PathSSE || strings.HasPrefix(path, PathMetadata) || wantsAuthorization(path)
}

// ResourceOf returns the resource of a path, with the id of a device as the fleet writes it. ok is false for any other path, which is returned unchanged.
func ResourceOf(path string) (resource string, ok bool) {
	if device, one := strings.CutPrefix(path, PathDevices); one {
		if id, err := devices.ParseID(device); err == nil {
			return PathDevices + string(id), true
		}
	}
	return path, path == PathMCP || path == PathSSE
}

// wantsAuthorization reports whether hosts use a path to find an authorization server
// or to use it. There is none.
func wantsAuthorization(path string) bool {
	switch path {
	case "/register", "/authorize", "/token":
		return true
	}
	return strings.Contains(path, "/.well-known/") && !strings.HasPrefix(path, PathMetadata)
}

// ServeHTTP serves one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	connlimit.PaceAnonymous(r.Context()) // much is answered before the caller is known
	if denied := s.checkOrigin(r); denied != nil {
		s.refuse(w, r, denied)
		return
	}
	if s.allowPage(w, r) {
		return
	}
	if wantsAuthorization(r.URL.Path) {
		s.refuse(w, r, refuse(refusedPath, devices.CodeNotFound, "there is no authorization server at this path; create an API key with `fleetd keys create`"))
		return
	}
	if strings.HasPrefix(r.URL.Path, PathMetadata) {
		s.metadata(w, r)
		return
	}
	v, denied := s.identify(r)
	if denied != nil {
		s.refuse(w, r, denied)
		return
	}
	connlimit.MarkRequestAuthenticated(r.Context())
	ctx, cancel := context.WithCancel(context.WithValue(r.Context(), requestInfoKey{}, v))
	defer cancel()
	out := newDeadlineWriter(w)
	defer func() {
		if sent := out.end(); r.Method == http.MethodPost { // the streams of a GET bring what devices do
			s.opt.Work.Charge(v.caller.Key, sent)
		}
	}()
	leave, denied := s.sessions.enter(v, cancel, out)
	if denied != nil {
		s.refuse(w, r, denied)
		return
	}
	defer leave()
	r = r.WithContext(ctx)
	if !s.beginRequest(w, r, v, connlimit.WorkOfBody(r, BodyLimit)) {
		return
	}
	if denied := s.lacksScope(r, v); denied != nil {
		s.refuse(w, r, denied)
		return
	}
	switch {
	case refuseID(out, r):
	case r.URL.Path == PathSSE:
		s.serveSSE(out, r, v)
	case r.Header.Get("Mcp-Protocol-Version") >= revisionModern:
		if !refuseBatch(out, r) {
			s.endpointOf(v).stateless.ServeHTTP(out, r)
		}
	default:
		s.serveStateful(out, r, v)
	}
}

// beginRequest waits until the caller may have so many units of work done, or refuses the request.
func (s *Server) beginRequest(w http.ResponseWriter, r *http.Request, v *requestInfo, units int64) bool {
	err := s.opt.Work.BeginUnits(r.Context(), v.caller.Key, units)
	if err != nil {
		s.refuse(w, r, refuse(refusedRate, devices.CodeRateLimited, err.Error()))
	}
	return err == nil
}

func (s *Server) endpointOf(v *requestInfo) *endpoint {
	if v.device != "" {
		return &s.device
	}
	return &s.fleet
}
