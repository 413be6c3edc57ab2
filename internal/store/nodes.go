package store

import (
	"context"
	"math"
	"time"

	"fleetd/internal/devices"
)

// Beat writes the lease of one start of a node, one beat on, and returns all
// leases, in order of name. begun says that there was no such lease: this is the
// first beat, or somebody took the lease away because it stood still.
func (s *Store) Beat(ctx context.Context, l devices.Lease) (leases []devices.Lease, begun bool, err error) {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return nil, false, err
	}
	defer cancel()
	changed := func(statement string, args ...any) (bool, error) {
		result, err := s.backend.write.ExecContext(ctx, statement, args...)
		if err != nil {
			return false, s.useError(ctx, "renewing the node's lease", err)
		}
		n, err := result.RowsAffected()
		return n > 0, err
	}
	renewed, err := changed(`UPDATE nodes SET beat = $3, devices = $4, api = $5 WHERE node = $1 AND instance = $2`, clean(l.Node), l.Instance, l.Beat, l.Devices, clean(l.API))
	if err == nil && !renewed {
		begun, err = changed(`INSERT INTO nodes (node, instance, beat, started_at, version, api, devices, stamps) VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (node, instance) DO NOTHING`,
			clean(l.Node), l.Instance, l.Beat, micros(l.Started), clean(l.Version), clean(l.API), l.Devices, l.Stamps)
	}
	if err != nil {
		return nil, false, err
	}
	leases, err = s.Leases(ctx)
	return leases, begun, err
}

// Leases returns the leases of all nodes, in order of name.
func (s *Store) Leases(ctx context.Context) ([]devices.Lease, error) {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	leases, err := collect(ctx, s.backend.read, func(scan func(...any) error) (l devices.Lease, err error) {
		var started int64
		err = scan(&l.Node, &l.Instance, &l.Beat, &started, &l.Version, &l.API, &l.Devices, &l.Stamps)
		l.Started = instant(started)
		return l, err
	}, `SELECT node, instance, beat, started_at, version, api, devices, stamps FROM nodes ORDER BY node, instance`)
	if err != nil {
		return nil, s.useError(ctx, "reading the nodes", err)
	}
	return leases, nil
}

// OnlineOf returns what a node left online, at most limit devices behind one in
// id order: those that connected before a time, unless that is zero.
func (s *Store) OnlineOf(ctx context.Context, node string, before time.Time, after devices.ID, limit int) ([]devices.Presence, error) {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	until := int64(math.MaxInt64)
	if !before.IsZero() {
		until = micros(before)
	}
	rows, err := collect(ctx, s.backend.read, scanRow, "SELECT "+rowColumns+" WHERE p.node = $1 AND p.online AND p.connected_at < $2 AND d.device > $3 ORDER BY d.device LIMIT $4",
		clean(node), until, string(after), limit)
	if err != nil {
		return nil, s.useError(ctx, "reading a node's devices", err)
	}
	out := make([]devices.Presence, len(rows))
	for i, row := range rows {
		out[i] = row.Presence
	}
	return out, nil
}

// Orphans are the names of nodes that have devices online and no lease.
func (s *Store) Orphans(ctx context.Context) ([]string, error) {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	names, err := collect(ctx, s.backend.read, func(scan func(...any) error) (name string, err error) {
		err = scan(&name)
		return name, err
	}, `SELECT DISTINCT p.node FROM presence p WHERE p.online AND NOT EXISTS (SELECT 1 FROM nodes n WHERE n.node = p.node)`)
	if err != nil {
		return nil, s.useError(ctx, "looking for devices of lost nodes", err)
	}
	return names, nil
}

// DropNode removes a lease, unless it went on since it was read.
func (s *Store) DropNode(ctx context.Context, l devices.Lease) error {
	return s.endLease(ctx, `DELETE FROM nodes WHERE node = $1 AND instance = $2 AND beat = $3`, clean(l.Node), l.Instance, l.Beat)
}

// EndLease removes a lease even if it went on: the node's devices were marked
// as lost, and it has to learn of that.
func (s *Store) EndLease(ctx context.Context, l devices.Lease) error {
	return s.endLease(ctx, `DELETE FROM nodes WHERE node = $1 AND instance = $2`, clean(l.Node), l.Instance)
}

func (s *Store) endLease(ctx context.Context, statement string, args ...any) error {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	if _, err := s.backend.write.ExecContext(ctx, statement, args...); err != nil {
		return s.useError(ctx, "removing a lease", err)
	}
	return nil
}
