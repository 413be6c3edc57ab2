package registry

import "fleetd/internal/access"

// RenewFile has a snapshot written with all that is known.
func (r *Registry) RenewFile() { r.file.reset() }

// HeldKeys are the API keys by id.
func (r *Registry) HeldKeys() map[string]access.Key {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.keys
}
