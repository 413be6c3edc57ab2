package dispatch

import (
	"context"
	"sync"
	"sync/atomic"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// rules hold the keys and the policy of the fleet in memory, so that no decision waits for
// the database.
type rules struct {
	keys  *access.Registry
	guard atomic.Pointer[access.Guard]
	// loaded means that the operator's rules were read, even if there are none: before that
	// it is unknown what they forbid.
	loaded atomic.Bool

	mu sync.Mutex // serializes changes of guard
}

func newRules() *rules {
	d := &rules{keys: access.NewRegistry()}
	d.guard.Store(access.DefaultGuard())
	return d
}

// Keys returns the keys of the fleet.
func (s *Dispatcher) Keys() *access.Registry { return s.rules.keys }

// Guard returns the current policy.
func (s *Dispatcher) Guard() *access.Guard { return s.rules.guard.Load() }

// InstallGuard applies a newer version of the policy. It reports false if the current one is
// not older.
func (s *Dispatcher) InstallGuard(g *access.Guard) bool {
	s.rules.mu.Lock()
	defer s.rules.mu.Unlock()
	if g.Policy().Version <= s.rules.guard.Load().Policy().Version {
		return false
	}
	s.rules.guard.Store(g)
	s.rules.loaded.Store(true)
	return true
}

// ReplaceGuard applies a policy, whatever its version.
func (s *Dispatcher) ReplaceGuard(g *access.Guard) {
	s.rules.mu.Lock()
	defer s.rules.mu.Unlock()
	s.rules.guard.Store(g)
	s.rules.loaded.Store(true)
}

// Permit returns an error if the principal may not do this to a device, or, with an empty
// id, at all. A key that depends on labels gets the same refusal for an unknown device, so
// that it does not reveal which devices exist. If the labels matter and cannot be read, the
// error has CodeUnavailable.
func (s *Dispatcher) Permit(ctx context.Context, principal access.Principal, scope access.Scope, id devices.ID) error {
	if id != "" && principal.Caller.NeedsLabels() {
		labels, known, err := s.labelsOf(ctx, id)
		switch {
		case err != nil:
			return err
		case known:
			return permitError(principal.Permit(scope, string(id), labels))
		}
		return permitError(principal.PermitUnknown(scope, string(id)))
	}
	return permitError(principal.Permit(scope, string(id), nil))
}

// PermitNow is Permit without waiting for the database: labels that are not in memory are
// CodeUnavailable, and are read meanwhile.
func (s *Dispatcher) PermitNow(principal access.Principal, scope access.Scope, id devices.ID) error {
	return s.Permit(noWait, principal, scope, id)
}

// noWait is an ended context.
var noWait = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func permitError(no *access.Refusal) error {
	if no != nil {
		return RefusalError(no)
	}
	return nil
}

// RefusalError returns a refusal of package access as *devices.Error.
func RefusalError(no *access.Refusal) *devices.Error {
	code := devices.CodeForbidden
	if no.Tool {
		code = devices.CodeToolDenied
	}
	return &devices.Error{Code: code, Detail: no.Detail, Rule: no.Rule}
}

// labelsOf returns the labels of a device on any node: from memory, else from the database,
// for which it waits at most registry.RowLimit. known is false for an unknown device.
func (s *Dispatcher) labelsOf(ctx context.Context, id devices.ID) (labels map[string]string, known bool, err error) {
	if d, ok := s.hub.Device(id); ok {
		return d.Labels, true, nil
	}
	m, err := s.ports.Registry.Member(ctx, id)
	if err != nil && devices.AsError(err).Code == devices.CodeDeviceUnknown {
		return nil, false, nil
	}
	return m.Labels, err == nil, err
}
