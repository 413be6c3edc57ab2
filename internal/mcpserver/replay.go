package mcpserver

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"
)

// Limits of the messages that are kept so that a client can resume an interrupted
// stream. Revision 2026-07-28 has no resumption.
const (
	maxReplay        = 64 << 20  // bytes of all sessions
	maxSessionReplay = 256 << 10 // bytes of one session; a larger message, such as a photo, is sent once
	maxReplayStreams = 32        // of one session, besides the stream for unsolicited messages
)

var errReplayGone = errors.New("the messages of the stream after this event id are no longer kept")

// replays is the event store of the SDK. The SDK's own store keeps every stream until
// its session ends, so that one client could fill the memory with pings.
type replays struct {
	stats *Stats

	mu       sync.Mutex
	bytes    int
	sessions map[string]*replaySession
}

type replaySession struct {
	bytes   int
	streams map[string]*replayStream
	opened  []string        // streams in the order in which they were opened
	order   []*replayStream // the stream of every stored message, oldest first
}

type replayStream struct {
	first int // index of data[0]
	data  [][]byte
}

func newReplays(stats *Stats) *replays {
	return &replays{stats: stats, sessions: map[string]*replaySession{}}
}

// Open opens a stream.
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
			r.dropStreamLocked(s, s.opened[0])
			s.opened = slices.Delete(s.opened, 0, 1)
		}
		s.opened = append(s.opened, stream)
	}
	s.streams[stream] = &replayStream{}
	return nil
}

// dropStreamLocked drops a stream and its messages.
func (r *replays) dropStreamLocked(s *replaySession, stream string) {
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

// Append stores a message and drops the oldest messages over the limits.
func (r *replays) Append(_ context.Context, session, stream string, data []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sessions[session]
	if s == nil {
		return errReplayGone
	}
	to := s.streams[stream]
	if to == nil { // it was dropped for newer streams
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

// After returns the messages of a stream after an index.
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

// closeSession drops a session.
func (r *replays) closeSession(session string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sessions[session]
	if s == nil {
		return
	}
	delete(r.sessions, session)
	r.countLocked(s, -s.bytes)
}
