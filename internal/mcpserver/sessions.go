package mcpserver

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

// sessions records the owners of sessions and requests, limits their numbers, and ends
// them. It is also the SDK's event store, by which it learns that a session has ended.
type sessions struct {
	*replays
	stats *Stats
	calls atomic.Int64 // requests in progress that may wait for a device
	onEnd func(*mcp.ServerSession)
	ends  sync.WaitGroup

	lock     sync.Mutex
	byID     map[string]*session
	requests map[*request]struct{}
	byKey    map[string]*usage
	total    int // slots taken
	draining bool
}

// session is a session that a client opened.
type session struct {
	id     string
	v      *requestInfo
	server *mcp.ServerSession
	ctx    context.Context // ends with the session and its calls in progress
	cancel context.CancelFunc

	// under sessions.lock:
	closing bool
	busy    int       // requests, streams and calls in progress
	used    time.Time // when the last of them ended
}

// request is an HTTP request in progress.
type request struct {
	v        *requestInfo
	cancel   context.CancelFunc
	response *deadlineWriter
	stream   atomic.Bool // it continues until the client or the server ends it
	events   atomic.Pointer[eventStream]
	done     chan struct{} // closed when the request ends
}

// eventStream identifies the stream that a response carries.
type eventStream struct{ session, stream string }

// usage counts what one caller has open.
type usage struct {
	who      *access.Caller
	sessions int
	requests int
	calls    int // in progress, even if the client has disconnected
}

func newSessions(stats *Stats, over func(*mcp.ServerSession)) *sessions {
	return &sessions{replays: newReplays(stats), stats: stats, onEnd: over, byID: map[string]*session{}, requests: map[*request]struct{}{}, byKey: map[string]*usage{}}
}

// newSessionID returns an id with the node's name as prefix, by which a load balancer
// finds the node of a session.
func (s *Server) newSessionID() string { return s.opt.Node + "." + rand.Text() }

func (s *sessions) usageLocked(who *access.Caller) *usage {
	u := s.byKey[who.Key]
	if u == nil {
		u = &usage{who: who}
		s.byKey[who.Key] = u
	}
	return u
}

func (s *sessions) freeLocked(u *usage) {
	if u.sessions == 0 && u.requests == 0 && u.calls == 0 {
		delete(s.byKey, u.who.Key)
	}
}

// enter counts a request; leave must be called when it ends.
func (s *sessions) enter(v *requestInfo, cancel context.CancelFunc, answer *deadlineWriter) (leave func(), denied *refusal) {
	s.lock.Lock()
	defer s.lock.Unlock()
	u := s.usageLocked(v.caller)
	if u.requests >= MaxKeyRequests {
		return nil, refuse(refusedRequests, devices.CodeRateLimited, "this key has too many requests and streams in progress")
	}
	r := &request{v: v, cancel: cancel, response: answer, done: make(chan struct{})}
	v.request = r
	s.requests[r] = struct{}{}
	u.requests++
	s.stats.Streams.Store(int64(len(s.requests)))
	return func() {
		close(r.done)
		s.lock.Lock()
		defer s.lock.Unlock()
		delete(s.requests, r)
		u.requests--
		s.freeLocked(u)
		s.stats.Streams.Store(int64(len(s.requests)))
	}, nil
}

// call counts a call. It returns false if the caller has too many in progress. In
// revisions with sessions, a call continues when its client disconnects.
func (s *sessions) call(v *requestInfo) (done func(), ok bool) {
	s.lock.Lock()
	defer s.lock.Unlock()
	u := s.usageLocked(v.caller)
	if u.calls >= MaxKeyCalls {
		return nil, false
	}
	u.calls++
	s.calls.Add(1)
	x := v.session.Load()
	x.beginLocked()
	return func() {
		s.calls.Add(-1)
		s.lock.Lock()
		defer s.lock.Unlock()
		x.endLocked()
		u.calls--
		s.freeLocked(u)
	}, true
}

// sessionSlot is reserved before a session exists.
type sessionSlot struct {
	s    *sessions
	u    *usage
	done bool // bound, or released; under s.lock
}

func (s *sessions) reserve(v *requestInfo) (*sessionSlot, *refusal) {
	s.lock.Lock()
	defer s.lock.Unlock()
	u := s.usageLocked(v.caller)
	switch {
	case s.draining:
		return nil, refuse(refusedDraining, devices.CodeUnavailable, "this node is stopping; send the request to another node")
	case s.total >= MaxSessions && !s.evictLocked(""):
		return nil, refuse(refusedTotal, devices.CodeUnavailable, "this node has its maximum of MCP sessions, and all are in use; try again later or at another node")
	case u.sessions >= MaxKeySessions && !s.evictLocked(v.caller.Key):
		return nil, refuse(refusedKey, devices.CodeRateLimited, "this key has its maximum of MCP sessions, and all are in use; end some with DELETE")
	}
	s.total++
	u.sessions++
	s.stats.Sessions.Store(int64(s.total))
	return &sessionSlot{s: s, u: u}, nil
}

// evictLocked ends the session of a key that was idle longest. If key is empty, it
// chooses the key with the most sessions. It returns false if all sessions are in use.
// Many clients disconnect without a DELETE.
func (s *sessions) evictLocked(key string) bool {
	var idle *session
	most := 0
	for _, x := range s.byID {
		if x.busy > 0 || x.closing || key != "" && x.v.caller.Key != key {
			continue
		}
		of := s.usageLocked(x.v.caller).sessions
		if idle == nil || of > most || of == most && x.used.Before(idle.used) {
			idle, most = x, of
		}
	}
	if idle == nil {
		return false
	}
	idle.closing = true
	idle.cancel()
	delete(s.byID, idle.id)
	s.releaseSlotLocked(s.usageLocked(idle.v.caller))
	s.stats.Evicted.Add(1)
	s.ends.Go(func() {
		_ = idle.server.Close() // no request is in progress
		s.onEnd(idle.server)
	})
	return true
}

// beginLocked and endLocked count the requests of a session; x may be nil.
func (x *session) beginLocked() {
	if x != nil {
		x.busy++
	}
}

func (x *session) endLocked() {
	if x != nil {
		x.busy--
		x.used = time.Now()
	}
}

func (s *sessions) releaseSlotLocked(u *usage) {
	s.total--
	u.sessions--
	s.freeLocked(u)
	s.stats.Sessions.Store(int64(s.total))
}

// release frees a slot that was not bound to a session.
func (p *sessionSlot) release() {
	p.s.lock.Lock()
	defer p.s.lock.Unlock()
	if !p.done {
		p.done = true
		p.s.releaseSlotLocked(p.u)
	}
}

// bind binds the slot to a session. It returns false if the slot is no longer valid.
func (p *sessionSlot) bind(server *mcp.ServerSession, id string, v *requestInfo) bool {
	p.s.lock.Lock()
	defer p.s.lock.Unlock()
	if p.done || p.s.draining {
		return false
	}
	p.done = true
	x := &session{id: id, v: v, server: server, used: time.Now()}
	x.ctx, x.cancel = context.WithCancel(context.Background())
	v.session.Store(x)
	p.s.byID[x.id] = x
	return true
}

// enterSession counts a request of a session; leave must be called when it ends.
// Unknown sessions are refused by the SDK.
func (s *sessions) enterSession(id string, v *requestInfo) (leave func(), denied *refusal) {
	s.lock.Lock()
	defer s.lock.Unlock()
	x := s.byID[id]
	if x != nil && (!x.v.caller.Is(v.caller) || x.v.device != v.device) {
		return nil, refuse(refusedOwner, devices.CodeForbidden, "this session was opened by another key, or at another address")
	}
	x.beginLocked()
	return func() {
		s.lock.Lock()
		defer s.lock.Unlock()
		x.endLocked()
	}, nil
}

// Open opens a stream and records the request whose response it is.
func (s *sessions) Open(ctx context.Context, id, stream string) error {
	if r := requestInfoOf(ctx).request; r != nil && stream != "" {
		r.events.Store(&eventStream{id, stream})
	}
	return s.replays.Open(ctx, id, stream)
}

// takeOver ends older requests that carry the stream which a client resumes, because their connection may be dead. The
// call that the stream belongs to continues.
//
// A client that asks for the stream of the session without an event id resumes nothing, and is refused while another
// request carries that stream: the TypeScript SDK asks so after every JSON-RPC error, beside the stream that it reads, and
// each of two such requests would end the other for ever. A dead connection ends with its next heartbeat.
func (s *sessions) takeOver(ctx context.Context, id, lastEvent string, newer *request) *refusal {
	stream, _, _ := strings.Cut(lastEvent, "_")
	of := eventStream{id, stream}
	s.lock.Lock()
	var older []*request
	for r := range s.requests {
		if e := r.events.Load(); r != newer && e != nil && *e == of {
			older = append(older, r)
		}
	}
	if len(older) > 0 && lastEvent == "" {
		s.lock.Unlock()
		return refuse(refusedStream, devices.CodeConflict, "this session has a stream open already; resume it with Last-Event-ID")
	}
	newer.events.Store(&of)
	s.lock.Unlock()
	for _, r := range older {
		r.cancel()
		r.response.abort()
		select {
		case <-r.done:
		case <-ctx.Done():
		}
	}
	return nil
}

// SessionClosed is called by the SDK when a session has ended.
func (s *sessions) SessionClosed(_ context.Context, id string) error {
	s.closeSession(id)
	s.sessionEnded(id)
	return nil
}

func (s *sessions) sessionEnded(id string) {
	s.lock.Lock()
	x := s.byID[id]
	if x != nil {
		delete(s.byID, id)
		x.cancel()
		s.releaseSlotLocked(s.usageLocked(x.v.caller))
	}
	s.lock.Unlock()
	if x != nil {
		s.onEnd(x.server)
	}
}

// heartbeatsDue returns the streams for which a heartbeat is due.
func (s *sessions) heartbeatsDue(now time.Time) (due []*deadlineWriter) {
	s.lock.Lock()
	defer s.lock.Unlock()
	for r := range s.requests {
		if r.response.heartbeatDue(now) {
			due = append(due, r.response)
		}
	}
	return due
}

// endInvalid ends the sessions and requests of callers that valid rejects.
func (s *sessions) endInvalid(valid func(*access.Caller) bool) {
	s.lock.Lock()
	var out map[*access.Caller]bool
	for _, u := range s.byKey {
		if !valid(u.who) {
			if out == nil {
				out = map[*access.Caller]bool{}
			}
			out[u.who] = true
		}
	}
	s.lock.Unlock()
	if out != nil {
		s.endWhere(func(v *requestInfo) bool { return out[v.caller] }, true)
	}
}

// endWhere ends the sessions and requests that of selects. If calls is set, it also
// cancels calls that wait for a device.
func (s *sessions) endWhere(of func(*requestInfo) bool, calls bool) {
	s.lock.Lock()
	var list []*session
	for _, x := range s.byID {
		if of(x.v) {
			list = append(list, x)
		}
	}
	for r := range s.requests {
		if of(r.v) && (calls || r.stream.Load()) {
			r.cancel()
		}
	}
	for _, x := range list {
		if calls {
			x.cancel()
		}
		if x.closing {
			continue
		}
		x.closing = true
		s.ends.Go(func() { _ = x.server.Close() }) // waits for calls in progress
	}
	s.lock.Unlock()
}

// drain refuses new sessions, and ends existing ones as soon as their calls have
// ended.
func (s *sessions) drain() {
	s.lock.Lock()
	s.draining = true
	s.lock.Unlock()
	s.endWhere(func(*requestInfo) bool { return true }, false)
}

// wait waits for calls in progress, at most for limit.
func (s *sessions) wait(limit time.Duration) {
	for end := time.Now().Add(limit); s.calls.Load() > 0 && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
}

// endAll ends all sessions and requests at once.
func (s *sessions) endAll() {
	s.endWhere(func(*requestInfo) bool { return true }, true)
	s.ends.Wait()
}

// sweep ends the sessions and streams of keys that were revoked or have expired, ends
// all of them when the node stops, and detects policy changes. It never blocks: the lists are compared by another goroutine,
// which asks other nodes for most sessions. What changes meanwhile is compared once more, however often it does.
func (s *Server) sweep() {
	guard, drained := s.opt.Service.Guard(), false
	changed := make(chan struct{}, 1)
	defer close(changed)
	s.tasks.Go(func() {
		for range changed {
			s.toolLists.recheck("")
		}
	})
	for now := range clock.Ticks(s.ctx, sweepEvery) {
		for _, answer := range s.sessions.heartbeatsDue(now) {
			s.tasks.Go(answer.writeHeartbeat) // each may block on a slow client
		}
		s.wordIndex.keeper.Expire(now)
		registry := s.opt.Service.Keys()
		s.sessions.endInvalid(func(who *access.Caller) bool { return registry.Valid(who, now) == nil })
		if g := s.opt.Service.Guard(); g != guard {
			guard = g
			tasks.Signal(changed)
		}
		if !drained && s.opt.Draining() {
			drained = true
			s.sessions.drain()
		}
	}
}
