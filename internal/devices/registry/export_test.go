package registry

import "fleetd/internal/access"

// RenewFile requests a new snapshot.
func (r *Registry) RenewFile() { r.file.reset() }

// HeldKeys returns the API keys by id.
func (r *Registry) HeldKeys() map[string]access.Key {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.keys
}
