package fleet

import (
	"encoding/json"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// observer is the Service as the registry's Observer. Its methods are called with the
// registry's lock held: they start tasks for anything that takes time.
type observer Service

// OnChange handles a change that is now in force.
func (o *observer) OnChange(c devices.Change) {
	s := (*Service)(o)
	if c.Device == "" {
		s.changedFleet(c)
		return
	}
	s.Admission.OnChange(c)
	s.Hub.OnChange(c)
	if s.ports.Recorder != nil && !s.registry.Status(c.Device, "").Known {
		s.tasks.Run(func() { s.ports.Recorder.Forget(c.Device) })
	}
	s.notifyDecision(c.Device)
}

// OnDecision adds a function that is called for each device with a new decision, on
// any node; the id is empty if any device may have changed. f must not block.
func (s *Service) OnDecision(f func(devices.ID)) { s.onDecision.Add(f) }

func (s *Service) notifyDecision(id devices.ID) {
	s.onDecision.Each(func(f func(devices.ID)) { f(id) })
}

// OnReplace compares all keys, rules and sessions with the new state.
func (o *observer) OnReplace(snapshot registry.Snapshot) {
	s := (*Service)(o)
	now := clock.Now()
	for _, k := range snapshot.Keys {
		s.applyKey(k)
	}
	for _, k := range s.Keys().Keys() {
		if _, still := findKey(snapshot.Keys, k.ID); !still {
			k.Revoked = now // of a history that was lost
			s.applyKey(k)
		}
	}
	s.replacePolicy(snapshot.Policy)
	s.Hub.OnReplace()
	s.notifyDecision("")
	for _, p := range s.registry.PendingRevocations() {
		o.OnRevocation(p)
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

// OnRevocation applies a revocation that is not in the log yet.
func (o *observer) OnRevocation(p registry.Revocation) {
	s := (*Service)(o)
	if p.Key != "" {
		if k, ok := s.Keys().Find(p.Key, clock.Now()); ok && k.Revoked.IsZero() {
			k.Revoked = p.At
			s.applyKey(k)
		}
		return
	}
	s.Hub.OnRevocation(p.Device)
}

func (s *Service) changedFleet(c devices.Change) {
	switch c.Aspect {
	case devices.AspectKey:
		var k access.Key
		if json.Unmarshal(c.Value, &k) == nil { // else the registry has logged it
			s.applyKey(k)
			for _, p := range s.registry.PendingRevocations() {
				if p.Key == k.ID { // its revocation arrived first
					(*observer)(s).OnRevocation(p)
				}
			}
		}
	case devices.AspectPolicy:
		var p access.Policy
		if json.Unmarshal(c.Value, &p) == nil {
			s.applyPolicy(p)
		}
	case devices.AspectRotation: // Hub.sweep ends the credentials after the grace period
	}
}

// OnRow passes on a row that was requested.
func (o *observer) OnRow(row devices.Row) { o.Hub.OnRow(row) }
