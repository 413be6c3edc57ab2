package mcpserver

import (
	"context"
	"crypto/sha256"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

// lists knows what tools each session of a device's server was shown, so that
// only those are told of a change for whom there is one.
type lists struct {
	s       *Server
	trigger func() // makes the SDK notify every session of the server

	mu    sync.Mutex
	shows map[*mcp.ServerSession]*shown
}

type shown struct {
	v       *visit
	mark    [sha256.Size]byte
	pending bool // it is to be told
}

func newLists(s *Server, trigger func()) *lists {
	return &lists{s: s, trigger: trigger, shows: map[*mcp.ServerSession]*shown{}}
}

// shown notes what a session saw. Requests without a session are told by the
// stream they listen on.
func (l *lists) shown(session *mcp.ServerSession, v *visit, view *view) {
	x := v.session.Load()
	if x == nil || session == nil {
		return
	}
	mark := view.mark()
	l.mu.Lock()
	defer l.mu.Unlock()
	if x.ctx.Err() == nil {
		l.shows[session] = &shown{v: v, mark: mark}
	}
}

// listen notes a stream that wants to be told; end must be called with it.
func (l *lists) listen(ctx context.Context, session *mcp.ServerSession, v *visit) (end func()) {
	if v.device == "" {
		return func() {}
	}
	mark := l.markOf(ctx, v)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shows[session] = &shown{v: v, mark: mark}
	return func() { l.drop(session) }
}

// markOf is the mark of what a visit sees now; nothing, if that cannot be told.
func (l *lists) markOf(ctx context.Context, v *visit) [sha256.Size]byte {
	if view, err := l.s.viewOf(ctx, v.by(), v.device); err == nil {
		return view.mark()
	}
	return (&view{}).mark()
}

func (l *lists) drop(session *mcp.ServerSession) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.shows, session)
}

// of are the sessions that see the device; of every device if id is empty.
func (l *lists) of(id devices.ID) map[*mcp.ServerSession]*visit {
	l.mu.Lock()
	defer l.mu.Unlock()
	var of map[*mcp.ServerSession]*visit
	for session, x := range l.shows {
		if id == "" || x.v.device == id {
			if of == nil {
				of = map[*mcp.ServerSession]*visit{}
			}
			of[session] = x.v
		}
	}
	return of
}

// changed looks what the sessions of a device see now, of every device if id
// is empty, and tells those that saw something else.
func (l *lists) changed(id devices.ID) {
	tell := false
	for session, v := range l.of(id) {
		mark := l.markOf(l.s.ctx, v)
		l.mu.Lock()
		if x := l.shows[session]; x != nil && x.mark != mark {
			x.mark, x.pending, tell = mark, true, true
		}
		l.mu.Unlock()
	}
	if tell {
		l.trigger()
	}
}

// take tells whether a session is to be told, once.
func (l *lists) take(session *mcp.ServerSession) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	x := l.shows[session]
	if x == nil || !x.pending {
		return false
	}
	x.pending = false
	return true
}

// follows knows which sessions follow which resources.
type follows struct {
	mu        sync.Mutex
	byDevice  map[devices.ID]map[string]int // followers of each URI, as the client wrote it
	bySession map[*mcp.ServerSession]map[string]follow
}

type follow struct {
	v      *visit
	device devices.ID
}

func newFollows() *follows {
	return &follows{byDevice: map[devices.ID]map[string]int{}, bySession: map[*mcp.ServerSession]map[string]follow{}}
}

func (f *follows) add(session *mcp.ServerSession, uri string, to follow) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	mine := f.bySession[session]
	if _, twice := mine[uri]; twice {
		return nil
	}
	if len(mine) >= MaxSubscription {
		return invalid("a session may follow 64 resources")
	}
	if x := to.v.session.Load(); x != nil && x.ctx.Err() != nil {
		return nil // it has ended
	}
	if mine == nil {
		mine = map[string]follow{}
		f.bySession[session] = mine
	}
	mine[uri] = to
	if f.byDevice[to.device] == nil {
		f.byDevice[to.device] = map[string]int{}
	}
	f.byDevice[to.device][uri]++
	return nil
}

func (f *follows) remove(session *mcp.ServerSession, uri string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.removeLocked(session, uri)
}

func (f *follows) removeLocked(session *mcp.ServerSession, uri string) {
	to, ok := f.bySession[session][uri]
	if !ok {
		return
	}
	delete(f.bySession[session], uri)
	if len(f.bySession[session]) == 0 {
		delete(f.bySession, session)
	}
	uris := f.byDevice[to.device]
	if uris[uri]--; uris[uri] == 0 {
		delete(uris, uri)
	}
	if len(uris) == 0 {
		delete(f.byDevice, to.device)
	}
}

func (f *follows) drop(session *mcp.ServerSession) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for uri := range f.bySession[session] {
		f.removeLocked(session, uri)
	}
}

// of are the URIs that are followed of a device; of all if id is empty.
func (f *follows) of(id devices.ID) (uris []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for device, of := range f.byDevice {
		if id != "" && device != id {
			continue
		}
		for uri := range of {
			uris = append(uris, uri)
		}
	}
	return uris
}

func (f *follows) get(session *mcp.ServerSession, uri string) (follow, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	to, ok := f.bySession[session][uri]
	return to, ok
}

// wants tells whether any session cares for a device.
func (s *Server) wants(id devices.ID) bool {
	s.follows.mu.Lock()
	_, followed := s.follows.byDevice[id]
	s.follows.mu.Unlock()
	return followed || len(s.lists.of(id)) > 0
}

// notify tells sessions what an event changed.
func (s *Server) notify(e devices.StreamEvent) {
	defer tasks.Contain(s.log, nil)
	id := e.Device
	if e.Gap {
		id = ""
	}
	switch e.Kind {
	case devices.EventNotification, devices.EventPhoto:
		if !e.Gap {
			return
		}
	}
	for _, uri := range s.follows.of(id) {
		of, err := parseURI(uri)
		if err != nil || e.Kind == devices.EventCatalog && of.part == partStatus && !e.Gap {
			continue
		}
		params := &mcp.ResourceUpdatedNotificationParams{URI: uri}
		_ = s.fleet.server.ResourceUpdated(s.ctx, params) // it tells of no failure
		_ = s.device.server.ResourceUpdated(s.ctx, params)
	}
	s.lists.changed(id)
}

// Kinds of notifications, for their counter.
const (
	notifiedTools    = "tools"
	notifiedResource = "resource"
)

// onlyChanged holds back what the SDK would tell every session of a server.
func (s *Server) onlyChanged(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
		if method != "notifications/tools/list_changed" {
			return next(ctx, method, req)
		}
		session, _ := req.GetSession().(*mcp.ServerSession)
		if s.lists.take(session) {
			s.post.send(session, notifiedTools, func(ctx context.Context) { s.tell(ctx, next, method, req, notifiedTools) })
		}
		return nil, nil
	}
}

// onlyPermitted holds back what a session followed while it still might.
func (s *Server) onlyPermitted(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
		params, ok := req.GetParams().(*mcp.ResourceUpdatedNotificationParams)
		if !ok {
			return next(ctx, method, req)
		}
		session, _ := req.GetSession().(*mcp.ServerSession)
		s.post.send(session, params.URI, func(ctx context.Context) {
			to, ok := s.follows.get(session, params.URI)
			if ok && s.opt.Service.Permit(ctx, to.v.by(), access.ScopeRead, to.device) == nil {
				s.tell(ctx, next, method, req, notifiedResource)
			}
		})
		return nil, nil
	}
}

// tell delivers a notification.
func (s *Server) tell(ctx context.Context, next mcp.MethodHandler, method string, req mcp.Request, kind string) {
	defer tasks.Contain(s.log, nil)
	if _, err := next(ctx, method, req); err != nil {
		s.log.Debug("a host was not told", "method", method, "error", err)
		return
	}
	s.stats.Notified.Add(kind, 1)
}

// subscribe is called by the SDK before it notes a subscription.
func (s *Server) subscribe(ctx context.Context, req *mcp.SubscribeRequest) error {
	v := visitOf(ctx)
	if s.isFixture(req.Params.URI) {
		return s.follows.add(req.Session, req.Params.URI, follow{v, ""})
	}
	of, err := parseURI(req.Params.URI)
	if err != nil || of.device == "" || !v.covers(of.device) {
		return mcp.ResourceNotFoundError(req.Params.URI)
	}
	if err := s.opt.Service.Permit(ctx, v.by(), access.ScopeRead, of.device); err != nil {
		return s.protocolError(ctx, err)
	}
	return s.follows.add(req.Session, req.Params.URI, follow{v, of.device})
}

func (s *Server) unsubscribe(_ context.Context, req *mcp.UnsubscribeRequest) error {
	s.follows.remove(req.Session, req.Params.URI)
	return nil
}
