// Package mcpserver is the fleet as an MCP server, for hosts of language
// models: `/mcp` with a small constant set of tools over the whole fleet,
// `/mcp/devices/{id}` with one device's own tools under names that hosts take,
// and `/sse` for hosts that know only the transport before Streamable HTTP.
//
// Both eras of the protocol are served on one URL. Revisions up to 2025-11-25
// keep a session, 2026-07-28 keeps none; the header Mcp-Protocol-Version tells
// them apart. The official SDK speaks the protocol. What it would do too
// openly for a server that many keys share is done here: who may come in,
// how many sessions there are, whose they are and when they end, and what of
// a device's own words reaches a model.
//
// Nothing here decides what a caller may do: the core does, at the owner of
// the device, as for every other way in.
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
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
	"fleetd/internal/lobby"
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
	MaxBatch        = 100       // messages in one body, of the revisions that have batches
	MaxKeySessions  = 100       // of one caller
	MaxKeyRequests  = 200       // of one caller at once, streams included
	MaxKeyCalls     = 200       // of one caller at once, with or without somebody who waits
	MaxSubscription = 64        // resources that one session follows
	SessionTimeout  = 30 * time.Minute
	closeGrace      = 10 * time.Second // for calls in progress when the node stops
	sweepEvery      = 250 * time.Millisecond
)

// revisionModern is the first revision without sessions. Revisions are dates,
// so that text order is their order.
const revisionModern = "2026-07-28"

// Events reads the event stream.
type Events interface {
	// Follow calls deliver for the stored events that q selects until ctx ends
	// or deliver fails.
	Follow(ctx context.Context, q devices.EventQuery, deliver func(devices.StreamEvent) error) error
	// Recent returns the last events that q selects and keep accepts, oldest
	// first, at most limit.
	Recent(ctx context.Context, q devices.EventQuery, limit int, keep func(devices.StreamEvent) bool) ([]devices.StreamEvent, error)
}

// Photos reads stored photos.
type Photos interface {
	Open(ctx context.Context, id string) (devices.Photo, io.ReadCloser, error)
}

// Options of a Server. All fields are required but Failures, Hosts and Origins.
type Options struct {
	Service *fleet.Service
	Door    *access.Door
	// Failures slows down who tries tokens; nil slows nobody down.
	Failures *lobby.Failures
	Events   Events
	Photos   Photos
	// Hosts are names under which the API is reached, beside addresses and
	// localhost; Origins are web pages that may ask, as scheme://host[:port].
	Hosts, Origins []string
	// Node begins the ids of sessions, so that a load balancer finds their node.
	Node     string
	Version  string
	Draining func() bool
	// Fixtures adds what the conformance suite wants, in programs built for it.
	Fixtures bool
	Log      *slog.Logger
}

// Server serves MCP. It is an http.Handler for its paths.
type Server struct {
	opt      Options
	log      *slog.Logger
	fleet    endpoint
	device   endpoint
	sessions *sessions
	index    *indexCache
	words    *words
	watch    *watch
	follows  *follows
	lists    *lists
	post     *post
	rules    chan struct{} // capacity 1: the rules have changed
	old      oldStreams
	stats    Stats

	ctx   context.Context // ends with the server
	stop  context.CancelFunc
	tasks sync.WaitGroup
}

// endpoint is one MCP server with its two ways of speaking HTTP.
type endpoint struct {
	server    *mcp.Server
	stateful  http.Handler // revisions with sessions
	stateless http.Handler
}

// New returns a running server; Close ends it.
func New(opt Options) *Server {
	s := &Server{opt: opt, log: opt.Log, index: newIndexCache(), follows: newFollows(), old: oldStreams{byID: map[string]*oldStream{}}, rules: make(chan struct{}, 1)}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.post = newPost(s.ctx)
	s.words = newWords(s)
	s.sessions = newSessions(&s.stats, s.forget)
	s.watch = newWatch(opt.Events, opt.Log, s.wants, s.words.touched, s.notify)
	s.fleet = s.newEndpoint(s.newFleetServer())
	s.device = s.newEndpoint(s.newDeviceServer())
	s.tasks.Go(func() { s.watch.follow(s.ctx) })
	s.tasks.Go(func() { s.watch.tell(s.ctx) })
	s.tasks.Go(s.sweep)
	s.tasks.Go(s.relist)
	return s
}

// Stats returns the counters.
func (s *Server) Stats() *Stats { return &s.stats }

// forget drops what a session that has ended was to be told.
func (s *Server) forget(session *mcp.ServerSession) {
	s.lists.drop(session)
	s.follows.drop(session)
}

// Close ends every session and waits for calls in progress, up to a limit,
// after which they are cancelled.
func (s *Server) Close() {
	s.sessions.drain()
	s.sessions.wait(closeGrace)
	s.sessions.endAll()
	s.stop()
	s.tasks.Wait()
	s.post.close()
}

func (s *Server) newEndpoint(server *mcp.Server) endpoint {
	get := func(*http.Request) *mcp.Server { return server }
	// The SDK checks Host on loopback listeners alone; visitor checks it everywhere.
	options := mcp.StreamableHTTPOptions{MaxRequestBodyBytes: BodyLimit, PropagateRequestCancellation: true, DisableLocalhostProtection: true, Logger: quiet}
	modern := options
	modern.Stateless = true
	options.SessionTimeout = SessionTimeout
	options.EventStore = s.sessions
	return endpoint{server, mcp.NewStreamableHTTPHandler(get, &options), mcp.NewStreamableHTTPHandler(get, &modern)}
}

// quiet takes the SDK's log lines: several for each request, none of which says
// more than an error that the client gets.
var quiet = slog.New(slog.DiscardHandler)

// serverOptions are those of both servers.
func (s *Server) serverOptions(instructions string, capabilities *mcp.ServerCapabilities) *mcp.ServerOptions {
	return &mcp.ServerOptions{
		Instructions: instructions,
		Logger:       quiet,
		Capabilities: capabilities,
		GetSessionID: s.newSessionID,
		// What a list holds depends on who asks.
		SetCacheable:       func(_ context.Context, _ mcp.Request, c *mcp.Cacheable) { c.CacheScope = "private" },
		CompletionHandler:  s.complete,
		SubscribeHandler:   s.subscribe,
		UnsubscribeHandler: s.unsubscribe,
	}
}

// Takes tells whether a path is one of ours.
func Takes(path string) bool {
	return path == PathMCP || strings.HasPrefix(path, PathMCP+"/") || path == PathSSE || strings.HasPrefix(path, PathMetadata) || wantsAuthorization(path)
}

// wantsAuthorization tells whether a path is one where hosts look for an
// authorization server, or use one. There is none.
func wantsAuthorization(path string) bool {
	switch path {
	case "/register", "/authorize", "/token":
		return true
	}
	return strings.Contains(path, "/.well-known/") && !strings.HasPrefix(path, PathMetadata)
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if no := s.checkPlace(r); no != nil {
		s.refuse(w, r, no)
		return
	}
	if s.allowPage(w, r) {
		return
	}
	if wantsAuthorization(r.URL.Path) {
		s.refuse(w, r, refuse(refusedPath, devices.CodeNotFound, "there is no authorization server; `fleetd keys create` makes an API key"))
		return
	}
	if strings.HasPrefix(r.URL.Path, PathMetadata) {
		s.metadata(w, r)
		return
	}
	v, no := s.visitor(r)
	if no != nil {
		s.refuse(w, r, no)
		return
	}
	lobby.VouchFor(r.Context())
	ctx, cancel := context.WithCancel(context.WithValue(r.Context(), visitKey{}, v))
	defer cancel()
	out := newPatient(w)
	defer out.end()
	leave, no := s.sessions.enter(v, cancel, out)
	if no != nil {
		s.refuse(w, r, no)
		return
	}
	defer leave()
	r = r.WithContext(ctx)
	switch {
	case r.URL.Path == PathSSE:
		s.serveSSE(out, r, v)
	case r.Header.Get("Mcp-Protocol-Version") >= revisionModern:
		s.endpointOf(v).stateless.ServeHTTP(out, r)
	default:
		s.serveStateful(out, r, v)
	}
}

func (s *Server) endpointOf(v *visit) *endpoint {
	if v.device != "" {
		return &s.device
	}
	return &s.fleet
}
