package mcpserver

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"
)

// Bounds of what is kept so that a client whose stream broke off can go on
// where it was. Revision 2026-07-28 does not know that any more.
const (
	maxReplay        = 64 << 20  // bytes of all sessions
	maxSessionReplay = 256 << 10 // bytes of one session; a photo is over it and comes once
	maxReplayStreams = 32        // of one session, besides the one for everything unasked
)

var errReplayGone = errors.New("what the stream said then is not kept any more")

// replays is the SDK's event store. The SDK's own never forgets a stream while
// its session lives, so that one client can fill the memory with pings.
type replays struct {
	stats *Stats

	mu       sync.Mutex
	bytes    int
	sessions map[string]*replaySession
}

type replaySession struct {
	bytes   int
	streams map[string]*replayStream
	opened  []string        // streams in the order of their beginning
	order   []*replayStream // of every message kept
}

type replayStream struct {
	first int // index of data[0]
	data  [][]byte
}

func newReplays(stats *Stats) *replays {
	return &replays{stats: stats, sessions: map[string]*replaySession{}}
}

// Open begins a stream.
func (r *replays) Open(_ context.Context, session, stream string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sessions[session]
	if s == nil {
		s = &replaySession{streams: map[string]*replayStream{}}
		r.sessions[session] = s
	}
	if stream != "" {
		if len(s.opened) == maxReplayStreams {
			r.forgetLocked(s, s.opened[0])
			s.opened = slices.Delete(s.opened, 0, 1)
		}
		s.opened = append(s.opened, stream)
	}
	s.streams[stream] = &replayStream{}
	return nil
}

// forgetLocked drops a stream with what is kept of it.
func (r *replays) forgetLocked(s *replaySession, stream string) {
	old := s.streams[stream]
	delete(s.streams, stream)
	s.order = slices.DeleteFunc(s.order, func(o *replayStream) bool { return o == old })
	for _, data := range old.data {
		r.countLocked(s, -len(data))
	}
}

func (r *replays) countLocked(s *replaySession, n int) {
	s.bytes += n
	r.bytes += n
	r.stats.ReplayBytes.Store(int64(r.bytes))
}

// Append keeps a message; the session's oldest make room for it.
func (r *replays) Append(_ context.Context, session, stream string, data []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sessions[session]
	if s == nil {
		return errReplayGone
	}
	to := s.streams[stream]
	if to == nil { // many streams began since
		r.stats.ReplayDropped.Add(1)
		return nil
	}
	to.data = append(to.data, data)
	s.order = append(s.order, to)
	r.countLocked(s, len(data))
	for len(s.order) > 0 && (s.bytes > maxSessionReplay || r.bytes > maxReplay) {
		from := s.order[0]
		s.order = s.order[1:]
		r.countLocked(s, -len(from.data[0]))
		from.data[0] = nil
		from.data = from.data[1:]
		from.first++
		r.stats.ReplayDropped.Add(1)
	}
	return nil
}

// After yields what a stream said behind an index.
func (r *replays) After(_ context.Context, session, stream string, index int) iter.Seq2[[]byte, error] {
	r.mu.Lock()
	var data [][]byte
	err := errReplayGone
	if s := r.sessions[session]; s != nil && s.streams[stream] != nil {
		from := s.streams[stream]
		if start := index + 1 - from.first; start >= 0 {
			err = nil
			data = slices.Clone(from.data[min(start, len(from.data)):])
		}
	}
	r.mu.Unlock()
	return func(yield func([]byte, error) bool) {
		if err != nil {
			yield(nil, err)
			return
		}
		for _, d := range data {
			if !yield(d, nil) {
				return
			}
		}
	}
}

// closed drops a session.
func (r *replays) closed(session string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sessions[session]
	if s == nil {
		return
	}
	delete(r.sessions, session)
	r.countLocked(s, -s.bytes)
}
