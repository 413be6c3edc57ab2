package devices

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
)

// hub is everything this node knows of devices, and who holds a session: one
// entry per known device, in shards so that fleets of connecting devices do
// not queue at one lock.
type hub struct {
	seed    maphash.Seed
	shards  [64]shard
	count   atomic.Int64
	orphans sync.Map // ID to the Exception of a device that has no entry
}

type shard struct {
	mu      sync.RWMutex
	entries map[ID]*entry
}

// entry is one known device. device and session are read without a lock;
// writers hold mu.
type entry struct {
	id      ID
	device  atomic.Pointer[Device] // immutable snapshot; never nil
	session atomic.Pointer[Session]
	// conversation is the open audio channel; over UDP it outlives a session.
	conversation atomic.Pointer[Conversation]

	mu        sync.Mutex
	lastEpoch Epoch
	secrets
	forgotten bool // removed from the hub; nobody may hold on to it
	catalog   Hash // of the last listing; zero if never listed
	listedFW  string
	partial   bool
	elsewhere bool // another node held it since it was listed here
	takeovers takeovers
	// disputedUntil is when a refused proof is forgotten, unix nanoseconds.
	disputedUntil int64
	reconnects    bucket // a device that fights itself makes two events and two log lines each time
	recorded      bucket // bytes of lists and entries that go to the database
	chatter       bucket // of notifications and messages, over all its connections
}

func newHub() *hub {
	h := &hub{seed: maphash.MakeSeed()}
	for i := range h.shards {
		h.shards[i].entries = map[ID]*entry{}
	}
	return h
}

func (h *hub) shard(id ID) *shard {
	return &h.shards[maphash.String(h.seed, string(id))%uint64(len(h.shards))]
}

// get returns the entry of a known device, else nil.
func (h *hub) get(id ID) *entry {
	s := h.shard(id)
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.entries[id]
}

// session returns the session a device has on this node, else nil.
func (h *hub) session(id ID) *Session {
	if e := h.get(id); e != nil {
		return e.session.Load()
	}
	return nil
}

// ensure returns the entry of a device, made with first if there was none.
func (h *hub) ensure(id ID, first func() *Device) (e *entry, created bool) {
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
	if x, ok := h.orphans.LoadAndDelete(id); ok {
		e.secrets = secretsOf(x.(Exception))
	}
	e.device.Store(first())
	s.entries[id] = e
	h.count.Add(1)
	return e, true
}

func (h *hub) remove(id ID) {
	s := h.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.entries[id]; ok {
		delete(s.entries, id)
		h.count.Add(-1)
	}
}

// each calls f for every entry of one shard after another, with no lock held.
func (h *hub) each(f func(*entry)) {
	var batch []*entry
	for i := range h.shards {
		s := &h.shards[i]
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
func (e *entry) update(change func(*Device)) *Device {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.updateLocked(change)
}

func (e *entry) updateLocked(change func(*Device)) *Device {
	before := e.device.Load()
	d := *before
	change(&d)
	if d.Decided == before.Decided && d.EditedAt.Equal(before.EditedAt) { // else it was taken over
		d.decide(before)
	}
	e.device.Store(&d)
	return &d
}

// leave keeps what is left of a device that is forgotten, if that is anything.
func (h *hub) leave(x Exception) {
	if x.Generation > 0 || x.Revoked {
		h.orphans.Store(x.Device, x)
	}
}

// evict ends what the device has on this node: its session, and a conversation
// that waits for its connection to come back.
func (e *entry) evict() {
	if session := e.session.Load(); session != nil {
		session.Close(CloseRevoked)
	}
	if c := e.conversation.Load(); c != nil {
		c.end()
	}
}
