package store

import (
	"context"
	"slices"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// Beat renews the lease of a node's process, and returns all leases in order of name. begun
// means that there was no lease: this is the first beat, or another node removed the lease
// because it had expired. Leases use the administrative connection, so they do not wait for
// rows or lists.
func (s *Store) Beat(ctx context.Context, l devices.Lease) (leases []devices.Lease, begun bool, err error) {
	ctx, cancel, err := s.BeginRead(ctx) // of all statements together
	if err != nil {
		return nil, false, err
	}
	defer cancel()
	changed := func(statement string, args ...any) (bool, error) {
		n, err := database.Change(ctx, s, s.backend.Admin, "renewing the node's lease", statement, args...)
		return n > 0, err
	}
	renewed, err := changed(`UPDATE nodes SET beat = $3, devices = $4, api = $5 WHERE node = $1 AND instance = $2`, database.Clean(l.Node), l.Instance, l.Beat, l.Devices, database.Clean(l.API))
	if err == nil && !renewed {
		begun, err = changed(`INSERT INTO nodes (node, instance, beat, started_at, version, api, devices, schema) VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (node, instance) DO NOTHING`,
			database.Clean(l.Node), l.Instance, l.Beat, clock.Micros(l.Started), database.Clean(l.Version), database.Clean(l.API), l.Devices, database.SchemaVersion())
	}
	if err != nil {
		return nil, false, err
	}
	leases, err = s.Leases(ctx)
	return leases, begun, err
}

// Leases returns the leases of all nodes, in order of name.
func (s *Store) Leases(ctx context.Context) ([]devices.Lease, error) {
	return database.ReadFrom(ctx, s, s.backend.Admin, "reading the nodes", func(scan func(...any) error) (l devices.Lease, err error) {
		var started int64
		err = scan(&l.Node, &l.Instance, &l.Beat, &started, &l.Version, &l.API, &l.Devices)
		l.Started = clock.Instant(started)
		return l, err
	}, `SELECT node, instance, beat, started_at, version, api, devices FROM nodes ORDER BY node, instance`)
}

// NodesWithoutLease returns the names of nodes that have devices online but no lease.
func (s *Store) NodesWithoutLease(ctx context.Context) ([]string, error) {
	names, err := s.NodesOnline(ctx)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, nil
	}
	leases, err := s.Leases(ctx)
	return slices.DeleteFunc(names, func(name string) bool {
		return slices.ContainsFunc(leases, func(l devices.Lease) bool { return l.Node == name })
	}), err
}

// DropNode removes a lease, unless it was renewed since it was read.
func (s *Store) DropNode(ctx context.Context, l devices.Lease) error {
	return s.endLease(ctx, `DELETE FROM nodes WHERE node = $1 AND instance = $2 AND beat = $3`, database.Clean(l.Node), l.Instance, l.Beat)
}

// EndLease removes a lease even if it was renewed: the node's devices were marked as lost, and
// its next Beat must report that.
func (s *Store) EndLease(ctx context.Context, l devices.Lease) error {
	return s.endLease(ctx, `DELETE FROM nodes WHERE node = $1 AND instance = $2`, database.Clean(l.Node), l.Instance)
}

func (s *Store) endLease(ctx context.Context, statement string, args ...any) error {
	_, err := database.Change(ctx, s, s.backend.Admin, "removing a lease", statement, args...)
	return err
}
