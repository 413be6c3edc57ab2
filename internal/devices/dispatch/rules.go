package dispatch

import (
	"context"
	"sync"
	"sync/atomic"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// rules are what the node has of keys and of the policy: all of it, in memory, so that
// nobody is judged by a database that may be away.
type rules struct {
	keys  *access.Registry
	guard atomic.Pointer[access.Guard]
	// known says that the operator's rules were read, if only that there are
	// none: before that nobody can tell what they forbid.
	known atomic.Bool

	mu sync.Mutex // of changes of guard
}

func newRules() *rules {
	d := &rules{keys: access.NewRegistry()}
	d.guard.Store(access.DefaultGuard())
	return d
}

// Keys is where all keys of the fleet are.
func (s *Dispatcher) Keys() *access.Registry { return s.rules.keys }

// Guard is the policy in force.
func (s *Dispatcher) Guard() *access.Guard { return s.rules.guard.Load() }

// InstallGuard brings a newer version of the policy into force; false if that in
// force is not older.
func (s *Dispatcher) InstallGuard(g *access.Guard) bool {
	s.rules.mu.Lock()
	defer s.rules.mu.Unlock()
	if g.Policy().Version <= s.rules.guard.Load().Policy().Version {
		return false
	}
	s.rules.guard.Store(g)
	s.rules.known.Store(true)
	return true
}

// ReplaceGuard brings a policy into force, whatever its version.
func (s *Dispatcher) ReplaceGuard(g *access.Guard) {
	s.rules.mu.Lock()
	defer s.rules.mu.Unlock()
	s.rules.guard.Store(g)
	s.rules.known.Store(true)
}

// Permit tells why the caller may not do this to a device, or, with an empty
// id, at all; nil if it may. A device that is not known is refused to a key that
// depends on labels, so that it learns nothing of which others there are. Where the
// labels matter and cannot be read, the error is CodeUnavailable.
func (s *Dispatcher) Permit(ctx context.Context, by access.By, scope access.Scope, id devices.ID) error {
	if id != "" && by.Who.NeedsLabels() {
		labels, known, err := s.labelsOf(ctx, id)
		switch {
		case err != nil:
			return err
		case known:
			return permitted(by.Permit(scope, string(id), labels))
		}
		return permitted(by.PermitUnknown(scope, string(id)))
	}
	return permitted(by.Permit(scope, string(id), nil))
}

// PermitNow is Permit where nobody may wait for the database: labels that are not
// in memory are CodeUnavailable, and are read meanwhile.
func (s *Dispatcher) PermitNow(by access.By, scope access.Scope, id devices.ID) error {
	return s.Permit(noWait, by, scope, id)
}

// noWait is a context that has ended.
var noWait = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func permitted(no *access.Refusal) error {
	if no != nil {
		return Refused(no)
	}
	return nil
}

// Refused is a refusal of access as an error of the core.
func Refused(no *access.Refusal) *devices.Error {
	code := devices.CodeForbidden
	if no.Tool {
		code = devices.CodeToolDenied
	}
	return &devices.Error{Code: code, Detail: no.Detail, Rule: no.Rule}
}

// labelsOf are the labels of a device, wherever it is: from memory, else from the
// database, for which it waits at most registry.RowLimit.
// known is false for a device that is not known.
func (s *Dispatcher) labelsOf(ctx context.Context, id devices.ID) (labels map[string]string, known bool, err error) {
	if d, ok := s.hub.Device(id); ok {
		return d.Labels, true, nil
	}
	m, err := s.ports.Registry.Decided(ctx, id)
	if err != nil && devices.AsError(err).Code == devices.CodeDeviceUnknown {
		return nil, false, nil
	}
	return m.Labels, err == nil, err
}
