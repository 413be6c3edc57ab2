package fleet

import (
	"encoding/json"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// observer is the Service as the registry tells it of changes. Its methods are
// called with the registry's lock held: what takes time they leave to tasks.
type observer Service

// Changed takes a change that has come into force.
func (o *observer) Changed(c devices.Change) {
	s := (*Service)(o)
	if c.Device == "" {
		s.changedFleet(c)
		return
	}
	s.Admission.Changed(c)
	s.Hub.Changed(c)
	s.tellDecision(c.Device)
}

// OnDecision has f called for each device of which something was decided, on any node;
// with an empty id if anything may have changed. f must not wait.
func (s *Service) OnDecision(f func(devices.ID)) { s.decided.Store(&f) }

func (s *Service) tellDecision(id devices.ID) {
	if f := s.decided.Load(); f != nil {
		(*f)(id)
	}
}

// Replaced looks at everything again: any of it may differ.
func (o *observer) Replaced(snapshot registry.Snapshot) {
	s := (*Service)(o)
	now := time.Now()
	for _, k := range snapshot.Keys {
		s.learnKey(k)
	}
	for _, k := range s.Keys().Keys() {
		if _, still := findKey(snapshot.Keys, k.ID); !still {
			k.Revoked = now // of a history that was lost
			s.learnKey(k)
		}
	}
	s.replacePolicy(snapshot.Policy)
	s.Hub.Replaced()
	s.tellDecision("")
	for _, p := range s.registry.Revocations() {
		o.Revoked(p)
	}
}

func findKey(keys []access.Key, id string) (access.Key, bool) {
	for _, k := range keys {
		if k.ID == id {
			return k, true
		}
	}
	return access.Key{}, false
}

// Revoked takes a revocation that is in force and not in the log yet.
func (o *observer) Revoked(p registry.Revocation) {
	s := (*Service)(o)
	if p.Key != "" {
		if k, ok := s.Keys().Find(p.Key, time.Now()); ok && k.Revoked.IsZero() {
			k.Revoked = p.At
			s.learnKey(k)
		}
		return
	}
	s.Hub.Revoked(p.Device)
}

func (s *Service) changedFleet(c devices.Change) {
	switch c.Aspect {
	case devices.AspectKey:
		var k access.Key
		if json.Unmarshal(c.Value, &k) == nil { // else the registry has logged it
			s.learnKey(k)
			for _, p := range s.registry.Revocations() {
				if p.Key == k.ID { // its end was heard of before
					(*observer)(s).Revoked(p)
				}
			}
		}
	case devices.AspectPolicy:
		var p access.Policy
		if json.Unmarshal(c.Value, &p) == nil {
			s.learnPolicy(p)
		}
	case devices.AspectRotation: // what it ends, it ends after its grace: see sweep
	}
}

// Row takes the row of a device that was asked for.
func (o *observer) Row(row devices.Row) { o.Hub.Row(row) }
