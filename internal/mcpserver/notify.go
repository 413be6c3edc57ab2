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

// toolLists records the tools that each session of the device server was shown, so that
// a session is notified only if its own list has changed.
type toolLists struct {
	s       *Server
	trigger func() // makes the SDK notify every session

	mu         sync.Mutex
	shownLists map[*mcp.ServerSession]*shownList
}

type shownList struct {
	v           *requestInfo
	fingerprint [sha256.Size]byte
	pending     bool // a notification is due
}

func newToolLists(s *Server, trigger func()) *toolLists {
	return &toolLists{s: s, trigger: trigger, shownLists: map[*mcp.ServerSession]*shownList{}}
}

// record records the list that a session was shown. Requests without a session are
// notified on the stream on which they listen.
func (l *toolLists) record(session *mcp.ServerSession, v *requestInfo, view *view) {
	x := v.session.Load()
	if x == nil || session == nil {
		return
	}
	fingerprint := view.fingerprint()
	l.mu.Lock()
	defer l.mu.Unlock()
	if x.ctx.Err() == nil {
		l.shownLists[session] = &shownList{v: v, fingerprint: fingerprint}
	}
}

// listen records a stream that expects notifications; end must be called when it ends.
func (l *toolLists) listen(ctx context.Context, session *mcp.ServerSession, v *requestInfo) (end func()) {
	if v.device == "" {
		return func() {}
	}
	fingerprint := l.fingerprintOf(ctx, v)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shownLists[session] = &shownList{v: v, fingerprint: fingerprint}
	return func() { l.drop(session) }
}

// fingerprintOf returns the fingerprint of the current list; that of an empty list on an error.
func (l *toolLists) fingerprintOf(ctx context.Context, v *requestInfo) [sha256.Size]byte {
	if view, err := l.s.viewOf(ctx, v.by(), v.device); err == nil {
		return view.fingerprint()
	}
	return (&view{}).fingerprint()
}

func (l *toolLists) drop(session *mcp.ServerSession) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.shownLists, session)
}

// of returns the sessions that show a device; all sessions if id is empty.
func (l *toolLists) sessionsOf(id devices.ID) map[*mcp.ServerSession]*requestInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	var of map[*mcp.ServerSession]*requestInfo
	for session, x := range l.shownLists {
		if id == "" || x.v.device == id {
			if of == nil {
				of = map[*mcp.ServerSession]*requestInfo{}
			}
			of[session] = x.v
		}
	}
	return of
}

// recheck compares the current lists of the sessions of a device (of all devices if id
// is empty) with the lists that they were shown, and notifies those that differ.
func (l *toolLists) recheck(id devices.ID) {
	tell := false
	for session, v := range l.sessionsOf(id) {
		fingerprint := l.fingerprintOf(l.s.ctx, v)
		l.mu.Lock()
		if x := l.shownLists[session]; x != nil && x.fingerprint != fingerprint {
			x.fingerprint, x.pending, tell = fingerprint, true, true
		}
		l.mu.Unlock()
	}
	if tell {
		l.trigger()
	}
}

// take reports whether a notification is due for a session, and clears that.
func (l *toolLists) takePending(session *mcp.ServerSession) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	x := l.shownLists[session]
	if x == nil || !x.pending {
		return false
	}
	x.pending = false
	return true
}

// subscriptions records the resource subscriptions of sessions.
type subscriptions struct {
	mu        sync.Mutex
	byDevice  map[devices.ID]map[string]int // number of subscriptions of each URI, as the client wrote it
	bySession map[*mcp.ServerSession]map[string]subscription
}

type subscription struct {
	v      *requestInfo
	device devices.ID
}

func newSubscriptions() *subscriptions {
	return &subscriptions{byDevice: map[devices.ID]map[string]int{}, bySession: map[*mcp.ServerSession]map[string]subscription{}}
}

func (f *subscriptions) add(session *mcp.ServerSession, uri string, to subscription) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	own := f.bySession[session]
	if _, twice := own[uri]; twice {
		return nil
	}
	if len(own) >= MaxSubscription {
		return invalid("a session may subscribe to at most 64 resources")
	}
	if x := to.v.session.Load(); x != nil && x.ctx.Err() != nil {
		return nil // the session has ended
	}
	if own == nil {
		own = map[string]subscription{}
		f.bySession[session] = own
	}
	own[uri] = to
	if f.byDevice[to.device] == nil {
		f.byDevice[to.device] = map[string]int{}
	}
	f.byDevice[to.device][uri]++
	return nil
}

func (f *subscriptions) remove(session *mcp.ServerSession, uri string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.removeLocked(session, uri)
}

func (f *subscriptions) removeLocked(session *mcp.ServerSession, uri string) {
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

func (f *subscriptions) drop(session *mcp.ServerSession) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for uri := range f.bySession[session] {
		f.removeLocked(session, uri)
	}
}

// urisOf returns the subscribed URIs of a device; all of them if id is empty.
func (f *subscriptions) urisOf(id devices.ID) (uris []string) {
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

func (f *subscriptions) get(session *mcp.ServerSession, uri string) (subscription, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	to, ok := f.bySession[session][uri]
	return to, ok
}

// needsEvents reports whether any session needs the events of a device.
func (s *Server) needsEvents(id devices.ID) bool {
	s.subscriptions.mu.Lock()
	_, followed := s.subscriptions.byDevice[id]
	s.subscriptions.mu.Unlock()
	return followed || len(s.toolLists.sessionsOf(id)) > 0
}

// notify notifies the sessions that an event concerns.
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
	for _, uri := range s.subscriptions.urisOf(id) {
		of, err := parseURI(uri)
		if err != nil || e.Kind == devices.EventCatalog && of.part == partStatus && !e.Gap {
			continue
		}
		params := &mcp.ResourceUpdatedNotificationParams{URI: uri}
		_ = s.fleet.server.ResourceUpdated(s.ctx, params) // it returns no error
		_ = s.device.server.ResourceUpdated(s.ctx, params)
	}
	s.toolLists.recheck(id)
}

// Kinds of notifications, for their counter.
const (
	notifiedTools    = "tools"
	notifiedResource = "resource"
)

// filterListChanged stops notifications that the SDK sends to every session of a server.
func (s *Server) filterListChanged(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
		if method != "notifications/tools/list_changed" {
			return next(ctx, method, req)
		}
		session, _ := req.GetSession().(*mcp.ServerSession)
		if s.toolLists.takePending(session) {
			s.notifier.send(session, notifiedTools, func(ctx context.Context) { s.deliver(ctx, next, method, req, notifiedTools) })
		}
		return nil, nil
	}
}

// filterPermitted stops notifications about resources that the caller may no longer read.
func (s *Server) filterPermitted(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
		params, ok := req.GetParams().(*mcp.ResourceUpdatedNotificationParams)
		if !ok {
			return next(ctx, method, req)
		}
		session, _ := req.GetSession().(*mcp.ServerSession)
		s.notifier.send(session, params.URI, func(ctx context.Context) {
			to, ok := s.subscriptions.get(session, params.URI)
			if ok && s.opt.Service.Permit(ctx, to.v.by(), access.ScopeRead, to.device) == nil {
				s.deliver(ctx, next, method, req, notifiedResource)
			}
		})
		return nil, nil
	}
}

// deliver delivers a notification.
func (s *Server) deliver(ctx context.Context, next mcp.MethodHandler, method string, req mcp.Request, kind string) {
	defer tasks.Contain(s.log, nil)
	if _, err := next(ctx, method, req); err != nil {
		s.log.Debug("an MCP notification was not delivered", "method", method, "error", err)
		return
	}
	s.stats.Notified.Add(kind, 1)
}

// subscribe is called by the SDK before it records a subscription.
func (s *Server) subscribe(ctx context.Context, req *mcp.SubscribeRequest) error {
	v := requestInfoOf(ctx)
	of, err := parseURI(req.Params.URI)
	if err != nil || of.device == "" || !v.covers(of.device) {
		return mcp.ResourceNotFoundError(req.Params.URI)
	}
	if err := s.opt.Service.Permit(ctx, v.by(), access.ScopeRead, of.device); err != nil {
		return s.protocolError(ctx, err)
	}
	return s.subscriptions.add(req.Session, req.Params.URI, subscription{v, of.device})
}

func (s *Server) unsubscribe(_ context.Context, req *mcp.UnsubscribeRequest) error {
	s.subscriptions.remove(req.Session, req.Params.URI)
	return nil
}
