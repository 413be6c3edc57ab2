package mcpserver

import (
	"context"
	"crypto/rand"
	"sync"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// sessions knows whose the sessions and requests are, bounds them, and ends
// them. It is also the SDK's event store, which is how it hears of a session's
// end.
type sessions struct {
	*replays
	stats *Stats
	calls atomic.Int64 // requests in progress that may wait for a device
	over  func(*mcp.ServerSession)
	ends  sync.WaitGroup

	lock     sync.Mutex
	byID     map[string]*session
	requests map[*request]struct{}
	byKey    map[string]*use
	total    int // places given
	draining bool
}

// session is one that a client opened.
type session struct {
	id     string
	v      *visit
	server *mcp.ServerSession
	ctx    context.Context // ends with it, calls in progress included
	cancel context.CancelFunc

	// under sessions.lock:
	closing bool
	busy    int       // requests, streams and calls in progress
	used    time.Time // when the last of them ended
}

// request is one being answered.
type request struct {
	v      *visit
	cancel context.CancelFunc
	answer *patient
	stream atomic.Bool // it goes on until somebody ends it
	events atomic.Pointer[eventStream]
	gone   chan struct{} // closed when it is answered
}

// eventStream is the one that an answer is, in its session.
type eventStream struct{ session, stream string }

// use is what one caller has open.
type use struct {
	who      *access.Caller
	sessions int
	requests int
	calls    int // in progress, whether somebody waits for them or not
}

func newSessions(stats *Stats, over func(*mcp.ServerSession)) *sessions {
	return &sessions{replays: newReplays(stats), stats: stats, over: over, byID: map[string]*session{}, requests: map[*request]struct{}{}, byKey: map[string]*use{}}
}

// newSessionID begins with the node's name: a load balancer that reads it sends
// a session to the node that has it.
func (s *Server) newSessionID() string { return s.opt.Node + "." + rand.Text() }

func (s *sessions) useLocked(who *access.Caller) *use {
	u := s.byKey[who.Key]
	if u == nil {
		u = &use{who: who}
		s.byKey[who.Key] = u
	}
	return u
}

func (s *sessions) freeLocked(u *use) {
	if u.sessions == 0 && u.requests == 0 && u.calls == 0 {
		delete(s.byKey, u.who.Key)
	}
}

// enter counts a request in; leave must be called at its end.
func (s *sessions) enter(v *visit, cancel context.CancelFunc, answer *patient) (leave func(), no *refusal) {
	s.lock.Lock()
	defer s.lock.Unlock()
	u := s.useLocked(v.who)
	if u.requests >= MaxKeyRequests {
		return nil, refuse(refusedRequests, devices.CodeDeviceBusy, "this key has too many requests and streams in progress")
	}
	r := &request{v: v, cancel: cancel, answer: answer, gone: make(chan struct{})}
	v.request = r
	s.requests[r] = struct{}{}
	u.requests++
	s.stats.Streams.Store(int64(len(s.requests)))
	return func() {
		close(r.gone)
		s.lock.Lock()
		defer s.lock.Unlock()
		delete(s.requests, r)
		u.requests--
		s.freeLocked(u)
		s.stats.Streams.Store(int64(len(s.requests)))
	}, nil
}

// call counts a call in; false if its caller has too many in progress. A host
// that goes away does not end its call in revisions with sessions.
func (s *sessions) call(v *visit) (done func(), ok bool) {
	s.lock.Lock()
	defer s.lock.Unlock()
	u := s.useLocked(v.who)
	if u.calls >= MaxKeyCalls {
		return nil, false
	}
	u.calls++
	s.calls.Add(1)
	x := v.session.Load()
	x.begunLocked()
	return func() {
		s.calls.Add(-1)
		s.lock.Lock()
		defer s.lock.Unlock()
		x.endedLocked()
		u.calls--
		s.freeLocked(u)
	}, true
}

// place is room for one session. It is taken before the session exists.
type place struct {
	s    *sessions
	u    *use
	done bool // bound, or released; under s.lock
}

func (s *sessions) reserve(v *visit) (*place, *refusal) {
	s.lock.Lock()
	defer s.lock.Unlock()
	u := s.useLocked(v.who)
	switch {
	case s.draining:
		return nil, refuse(refusedDraining, devices.CodeUnavailable, "this node is stopping; ask another one")
	case s.total >= MaxSessions && !s.evictLocked(""):
		return nil, refuse(refusedTotal, devices.CodeUnavailable, "this node has as many MCP sessions as it may, all of them in use")
	case u.sessions >= MaxKeySessions && !s.evictLocked(v.who.Key):
		return nil, refuse(refusedKey, devices.CodeDeviceBusy, "this key has as many MCP sessions as it may, all of them in use; end some with DELETE")
	}
	s.total++
	u.sessions++
	s.stats.Sessions.Store(int64(s.total))
	return &place{s: s, u: u}, nil
}

// evictLocked ends the session of a key that was idle longest, or with no key that of
// the key with the most sessions; false if all are in use. Many clients leave without a
// DELETE.
func (s *sessions) evictLocked(key string) bool {
	var idle *session
	most := 0
	for _, x := range s.byID {
		if x.busy > 0 || x.closing || key != "" && x.v.who.Key != key {
			continue
		}
		of := s.useLocked(x.v.who).sessions
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
	s.vacateLocked(s.useLocked(idle.v.who))
	s.stats.Evicted.Add(1)
	s.ends.Go(func() {
		_ = idle.server.Close() // nothing was asked in it
		s.over(idle.server)
	})
	return true
}

// begunLocked and endedLocked count what a session does; there may be none.
func (x *session) begunLocked() {
	if x != nil {
		x.busy++
	}
}

func (x *session) endedLocked() {
	if x != nil {
		x.busy--
		x.used = time.Now()
	}
}

func (s *sessions) vacateLocked(u *use) {
	s.total--
	u.sessions--
	s.freeLocked(u)
	s.stats.Sessions.Store(int64(s.total))
}

// release gives a place back that no session took.
func (p *place) release() {
	p.s.lock.Lock()
	defer p.s.lock.Unlock()
	if !p.done {
		p.done = true
		p.s.vacateLocked(p.u)
	}
}

// bind gives the place to a session; false if it came too late.
func (p *place) bind(server *mcp.ServerSession, id string, v *visit) bool {
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

// enterSession counts a request of a session in; leave must be called at its end. A
// session that does not exist is for the SDK to refuse.
func (s *sessions) enterSession(id string, v *visit) (leave func(), no *refusal) {
	s.lock.Lock()
	defer s.lock.Unlock()
	x := s.byID[id]
	if x != nil && (x.v.who.Key != v.who.Key || x.v.device != v.device) {
		return nil, refuse(refusedOwner, devices.CodeForbidden, "this session was opened by another key, or at another address")
	}
	x.begunLocked()
	return func() {
		s.lock.Lock()
		defer s.lock.Unlock()
		x.endedLocked()
	}, nil
}

// Open begins a stream: the SDK's event store says which request is its answer.
func (s *sessions) Open(ctx context.Context, id, stream string) error {
	if r := visitOf(ctx).request; r != nil && stream != "" {
		r.events.Store(&eventStream{id, stream})
	}
	return s.replays.Open(ctx, id, stream)
}

// takeOver ends the requests that carry a stream which a newer request is to have:
// their connection may be long dead. The call that the stream is of goes on.
func (s *sessions) takeOver(ctx context.Context, id, stream string, newer *request) {
	of := eventStream{id, stream}
	s.lock.Lock()
	var older []*request
	for r := range s.requests {
		if e := r.events.Load(); r != newer && e != nil && *e == of {
			older = append(older, r)
		}
	}
	newer.events.Store(&of)
	s.lock.Unlock()
	for _, r := range older {
		r.cancel()
		r.answer.abort()
		select {
		case <-r.gone:
		case <-ctx.Done():
		}
	}
}

// SessionClosed is called by the SDK when a session has ended.
func (s *sessions) SessionClosed(_ context.Context, id string) error {
	s.closed(id)
	s.ended(id)
	return nil
}

func (s *sessions) ended(id string) {
	s.lock.Lock()
	x := s.byID[id]
	if x != nil {
		delete(s.byID, id)
		x.cancel()
		s.vacateLocked(s.useLocked(x.v.who))
	}
	s.lock.Unlock()
	if x != nil {
		s.over(x.server)
	}
}

// silent are the streams that are to show a sign of life.
func (s *sessions) silent(now time.Time) (due []*patient) {
	s.lock.Lock()
	defer s.lock.Unlock()
	for r := range s.requests {
		if r.answer.due(now) {
			due = append(due, r.answer)
		}
	}
	return due
}

// judge ends what belongs to callers who may not go on.
func (s *sessions) judge(valid func(*access.Caller) bool) {
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
		s.endWhere(func(v *visit) bool { return out[v.who] }, true)
	}
}

// endWhere ends the sessions and requests of some visits; with calls, those
// that wait for a device, too.
func (s *sessions) endWhere(of func(*visit) bool, calls bool) {
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

// drain takes no new session, and ends those that exist as soon as their calls
// are over.
func (s *sessions) drain() {
	s.lock.Lock()
	s.draining = true
	s.lock.Unlock()
	s.endWhere(func(*visit) bool { return true }, false)
}

// wait waits for calls in progress.
func (s *sessions) wait(limit time.Duration) {
	for end := time.Now().Add(limit); s.calls.Load() > 0 && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
}

// endAll ends everything now.
func (s *sessions) endAll() {
	s.endWhere(func(*visit) bool { return true }, true)
	s.ends.Wait()
}

// sweep ends the sessions and streams of keys that were revoked or have
// expired, all of them when the node stops, and looks whether the rules have
// changed. It never waits: what a session sees now is looked up elsewhere, on
// other nodes for the most part, and by as many questions as there are sessions.
func (s *Server) sweep() {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	guard, drained := s.opt.Service.Guard(), false
	for {
		select {
		case <-s.ctx.Done():
			return
		case now := <-ticker.C:
			for _, answer := range s.sessions.silent(now) {
				s.tasks.Go(answer.beat) // each may have a slow reader
			}
			s.words.keeper.Expire(now)
			registry := s.opt.Service.Keys()
			s.sessions.judge(func(who *access.Caller) bool { return registry.Valid(who, now) == nil })
			if g := s.opt.Service.Guard(); g != guard {
				guard = g
				select {
				case s.rules <- struct{}{}:
				default: // the lookup that is due sees this change, too
				}
			}
			if !drained && s.opt.Draining() {
				drained = true
				s.sessions.drain()
			}
		}
	}
}

// relist tells sessions what a change of the rules did to their tools.
func (s *Server) relist() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.rules:
			s.lists.changed("")
		}
	}
}
