package session

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
)

// table holds the devices that this node has to do with: those that have a session
// or a conversation here, and for a while those that had one. In shards, so that
// fleets of connecting devices do not queue at one lock.
type table struct {
	seed   maphash.Seed
	shards [64]shard
	count  atomic.Int64
}

type shard struct {
	mu      sync.RWMutex
	entries map[devices.ID]*entry
}

// entry is one device. device and session are read without a lock; writers hold
// mu.
type entry struct {
	id      devices.ID
	device  atomic.Pointer[devices.Device] // immutable snapshot; never nil
	session atomic.Pointer[Session]
	// conversation is the open audio channel; over UDP it outlives a session.
	conversation atomic.Pointer[speech.Conversation]
	// row is nil once device is what the database holds; until then it has only
	// what this node has heard, and those who wait for more wait here.
	row atomic.Pointer[chan struct{}]

	mu        sync.Mutex
	lastEpoch devices.Epoch
	confirmed int64        // the highest generation of credentials that a connection came with
	removed   bool         // from the hub; nobody may hold on to it
	idleSince int64        // unix nanoseconds; 0: it has, or is about to get, a session
	catalog   devices.Hash // of the last listing; zero if never listed
	listedFW  string
	partial   bool
	elsewhere bool     // another node held it since it was listed here
	listedBy  *Session // whose list is recorded once the row has come
	takeovers devices.Takeovers

	reconnects devices.Bucket // a device that fights itself makes two events and two log lines each time
	recorded   devices.Bucket // bytes of lists and entries that go to the database
	chatter    devices.Bucket // of notifications and messages, over all its connections
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

// get returns the entry of a known device, else nil.
func (h *table) get(id devices.ID) *entry {
	s := h.shard(id)
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.entries[id]
}

// session returns the session a device has on this node, else nil.
func (h *table) session(id devices.ID) *Session {
	if e := h.get(id); e != nil {
		return e.session.Load()
	}
	return nil
}

// ensure returns the entry of a device, made if there was none.
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
	e.device.Store(&devices.Device{ID: id, ClientID: clientID, Admission: devices.AdmissionMember})
	s.entries[id] = e
	h.count.Add(1)
	return e, true
}

// remove takes an entry out, if nobody uses it at this moment.
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

// each calls f for every entry of one shard after another, with no lock held.
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

// update replaces the device's snapshot by what change makes of a copy.
func (e *entry) update(change func(*devices.Device)) *devices.Device {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.updateLocked(change)
}

func (e *entry) updateLocked(change func(*devices.Device)) *devices.Device {
	d := *e.device.Load()
	change(&d)
	e.device.Store(&d)
	return &d
}

// isKnown tells whether the device is what the database holds.
func (e *entry) isKnown() bool { return e.row.Load() == nil }

// evict ends what the device has on this node: its session, and a conversation
// that waits for its connection to come back.
func (e *entry) evict() {
	if session := e.session.Load(); session != nil {
		session.Close(devices.CloseRevoked)
	}
	if c := e.conversation.Load(); c != nil {
		c.End()
	}
}

// fought tells whether clients take the id from each other.
func (e *entry) fought(now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.takeovers.Refuses(now.UnixNano())
}
