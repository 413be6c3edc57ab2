package registry

import (
	"sync"
	"sync/atomic"

	"fleetd/internal/devices"
)

// record is what the roster holds of one device.
type record struct {
	client uint64 // keyed hash of the admitted Client-Id; 0: the first that comes is admitted
	flags  uint8
}

const (
	flagRevoked   = 1 << iota
	flagWebSocket // preferred transport; neither: the node's default
	flagMQTT
	flagUsed // a slot of a table with a record
)

func (r record) with(prefer devices.Transport) record {
	r.flags &^= flagWebSocket | flagMQTT
	switch prefer {
	case devices.TransportWebSocket:
		r.flags |= flagWebSocket
	case devices.TransportMQTT:
		r.flags |= flagMQTT
	}
	return r
}

func (r record) admitted(to devices.Admission) record {
	r.flags &^= flagRevoked
	if to == devices.AdmissionRevoked {
		r.flags |= flagRevoked
	}
	return r
}

func (r record) prefer() devices.Transport {
	switch {
	case r.flags&flagWebSocket != 0:
		return devices.TransportWebSocket
	case r.flags&flagMQTT != 0:
		return devices.TransportMQTT
	}
	return devices.TransportNone
}

const rosterShards = 64

// roster holds a record for each device, under a keyed hash of its id.
type roster struct {
	key    sipKey
	n      atomic.Int64
	shards [rosterShards]rosterShard
}

type rosterShard struct {
	mu    sync.RWMutex
	table table
}

func newRoster(key sipKey) *roster { return &roster{key: key} }

// grow makes room for n devices at once.
func (r *roster) grow(n int) {
	for i := range r.shards {
		if t := &r.shards[i].table; t.n == 0 {
			t.resize(n / rosterShards * 5 / 4)
		}
	}
}

func (r *roster) get(id devices.ID) (record, bool) {
	h := r.key.sum(string(id))
	s := &r.shards[h%rosterShards]
	s.mu.RLock()
	defer s.mu.RUnlock()
	i, found := s.table.find(h)
	if !found {
		return record{}, false
	}
	return s.table.at(i), true
}

// client is the hash of a Client-Id under its device's id; never 0, and 0 for
// the empty one.
func (r *roster) client(id devices.ID, clientID string) uint64 {
	if clientID == "" {
		return 0
	}
	return max(r.key.sum(string(id)+"\x00"+clientID), 1)
}

// update replaces the record of a device by what change makes of it; known is
// false for one that has none. A device that change returns as unknown leaves.
func (r *roster) update(id devices.ID, change func(old record, known bool) (record, bool)) {
	r.updateHash(r.key.sum(string(id)), change)
}

func (r *roster) updateHash(h uint64, change func(old record, known bool) (record, bool)) {
	s := &r.shards[h%rosterShards]
	s.mu.Lock()
	defer s.mu.Unlock()
	var old record
	i, known := s.table.find(h)
	if known {
		old = s.table.at(i)
	}
	next, stays := change(old, known)
	switch {
	case stays && known:
		s.table.set(i, next)
	case stays:
		s.table.insert(h, next)
		r.n.Add(1)
	case known:
		s.table.remove(i)
		r.n.Add(-1)
	}
}

// each calls f for all records of one shard after another, with that shard's
// lock held.
func (r *roster) each(f func(h uint64, rec record)) {
	for i := range r.shards {
		s := &r.shards[i]
		s.mu.RLock()
		for k, flags := range s.table.flags {
			if flags&flagUsed != 0 {
				f(s.table.hashes[k], s.table.at(k))
			}
		}
		s.mu.RUnlock()
	}
}
