package records

import (
	"context"

	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// OnlineOf returns the devices that a node left online, in order of ids: at most limit devices with ids above after.
func (s *Records) OnlineOf(ctx context.Context, node string, after devices.ID, limit int) ([]devices.Presence, error) {
	return database.Read(ctx, s.host, "reading a node's devices", func(scan func(...any) error) (p devices.Presence, err error) {
		return p, scanPresence(&p, scan, &p.Device)
	}, "SELECT p.device, "+presenceColumns+` FROM presence p WHERE p.online AND p.node COLLATE "binary" = $1 AND p.device > $2 ORDER BY p.device LIMIT $3`,
		database.Clean(node), string(after), limit)
}

// maxNodes limits the number of names that NodesOnline returns.
const maxNodes = 10_000

// NodesOnline returns the names of at most maxNodes nodes that have devices online.
func (s *Records) NodesOnline(ctx context.Context) ([]string, error) {
	ctx, cancel, err := s.host.BeginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	names, err := s.distinct(ctx, "presence", `node COLLATE "binary"`, "online", nil, maxNodes)
	if err != nil {
		return nil, s.host.UseError(ctx, "looking for devices of lost nodes", err)
	}
	return names, nil
}
