package registry

import (
	"sync"
	"sync/atomic"

	"fleetd/internal/devices"
)

// record is the roster's record of one device.
type record struct {
	client uint64 // keyed hash of the admitted Client-Id; 0: the first client is admitted
	flags  uint8
}

const (
	flagRevoked   = 1 << iota
	flagWebSocket // preferred transport; neither: the node's default
	flagMQTT
	flagUsed // the slot contains a record
)

func (r record) withTransport(prefer devices.Transport) record {
	r.flags &^= flagWebSocket | flagMQTT
	switch prefer {
	case devices.TransportWebSocket:
		r.flags |= flagWebSocket
	case devices.TransportMQTT:
		r.flags |= flagMQTT
	}
	return r
}

func (r record) withAdmission(to devices.Admission) record {
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

// roster holds a record for each device, by a keyed hash of its id.
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

// grow allocates space for n devices.
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

// client returns the hash of a device's Client-Id; 0 for the empty one, else never 0.
func (r *roster) client(id devices.ID, clientID string) uint64 {
	if clientID == "" {
		return 0
	}
	return max(r.key.sum(string(id)+"\x00"+clientID), 1)
}

// update replaces the record of a device by the result of change; found is false if there
// is none. The record is removed if change returns false.
func (r *roster) update(id devices.ID, change func(old record, found bool) (record, bool)) {
	r.updateHash(r.key.sum(string(id)), change)
}

func (r *roster) updateHash(h uint64, change func(old record, found bool) (record, bool)) {
	s := &r.shards[h%rosterShards]
	s.mu.Lock()
	defer s.mu.Unlock()
	var old record
	i, found := s.table.find(h)
	if found {
		old = s.table.at(i)
	}
	next, stays := change(old, found)
	switch {
	case stays && found:
		s.table.set(i, next)
	case stays:
		s.table.insert(h, next)
		r.n.Add(1)
	case found:
		s.table.remove(i)
		r.n.Add(-1)
	}
}

// each calls f for all records, one shard after another, with the lock of the shard held.
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
