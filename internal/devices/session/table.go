package session

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
)

// table holds the entries of devices that have a session or a conversation here, or had one
// a short while ago. It is sharded, so that many connecting devices do not wait for one
// lock.
type table struct {
	seed   maphash.Seed
	shards [64]shard
	count  atomic.Int64
}

type shard struct {
	mu      sync.RWMutex
	entries map[devices.ID]*entry
}

// entry is one device. stored and session are read without a lock; writers hold mu.
type entry struct {
	id      devices.ID
	stored  atomic.Pointer[stored] // never nil
	session atomic.Pointer[Session]
	// conversation is the open audio channel; over UDP it may outlive a session.
	conversation atomic.Pointer[speech.Conversation]
	// row is nil once stored contains the database's row. Before that stored has only
	// what was reported to this node, and callers wait on the channel.
	row atomic.Pointer[chan struct{}]

	mu            sync.Mutex
	lastEpoch     devices.Epoch
	confirmed     int64        // the highest generation of credentials that the device connected with
	idleSince     int64        // as clock.Reading; 0: it has a session, or is about to get one
	catalog       devices.Hash // of the last listing; zero if never listed
	listedFW      string
	removed       bool // from the table; the entry must not be used any more
	partial       bool
	heldElsewhere bool               // another node held it since it was listed here
	unrecorded    *Session           // whose list is recorded once the row has arrived
	takeovers     *devices.Takeovers // nil until the first one

	reconnectBucket devices.Bucket  // each reconnect causes two events and two log lines
	recordBucket    devices.Bucket  // bytes of lists and entries written to the database
	messageBucket   *devices.Bucket // of notifications and messages, over all connections; nil: there were none
}

func newTable() *table {
	h := &table{seed: maphash.MakeSeed()}
	for i := range h.shards {
		h.shards[i].entries = map[devices.ID]*entry{}
	}
	return h
}

func (h *table) shard(id devices.ID) *shard {
	return &h.shards[maphash.String(h.seed, string(id))%uint64(len(h.shards))]
}

// get returns the entry of a device, nil if there is none.
func (h *table) get(id devices.ID) *entry {
	s := h.shard(id)
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.entries[id]
}

// session returns the device's session on this node, nil if there is none.
func (h *table) session(id devices.ID) *Session {
	if e := h.get(id); e != nil {
		return e.session.Load()
	}
	return nil
}

// ensure returns the entry of a device, and creates it if necessary.
func (h *table) ensure(id devices.ID, clientID string) (e *entry, created bool) {
	if e := h.get(id); e != nil {
		return e, false
	}
	s := h.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[id]; e != nil {
		return e, false
	}
	e = &entry{id: id}
	row := make(chan struct{})
	e.row.Store(&row)
	e.store(&devices.Device{ClientID: clientID, Admission: devices.AdmissionMember})
	s.entries[id] = e
	h.count.Add(1)
	return e, true
}

// remove removes an entry that is unused.
func (h *table) remove(e *entry, unused func() bool) {
	s := h.shard(e.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.entries[e.id] == e && unused() {
		e.removed = true
		delete(s.entries, e.id)
		h.count.Add(-1)
	}
}

// each calls f for every entry, one shard after another, without a lock.
func (h *table) each(f func(*entry)) {
	h.part(0, 1, f)
}

// part is each for one of n parts of the shards.
func (h *table) part(i, n int, f func(*entry)) {
	var batch []*entry
	for j := i; j < len(h.shards); j += n {
		s := &h.shards[j]
		s.mu.RLock()
		batch = batch[:0]
		for _, e := range s.entries {
			batch = append(batch, e)
		}
		s.mu.RUnlock()
		for _, e := range batch {
			f(e)
		}
	}
}

// update replaces what is kept of a device by what change makes of it.
func (h *table) update(e *entry, change func(*devices.Device)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.device()
	change(&d)
	e.store(&d)
}

// isKnown reports whether stored contains the database's row.
func (e *entry) isKnown() bool { return e.row.Load() == nil }

// evict ends x, which may be nil, and the device's conversation. A session that has replaced x meanwhile stays, and so does
// the conversation, which may be its own.
func (e *entry) evict(x *Session) {
	replaced := e.session.Load() != x
	if x != nil {
		x.Close(devices.CloseRevoked)
	}
	if c := e.conversation.Load(); c != nil && !replaced {
		c.End()
	}
}

// hasTakeovers reports whether clients take the id over from each other.
func (e *entry) hasTakeovers(now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.takeovers.Refuses(clock.Reading(now))
}
