package node

import (
	"log/slog"
	"sync/atomic"

	"fleetd/internal/devices"
)

// notes is the node's own record of its members, for a start without a
// database.
type notes struct {
	dir  *dataDir
	last known // as read at the start
}

func newNotes(dir *dataDir) (*notes, error) {
	n := &notes{dir: dir}
	return n, dir.readJSON(fileKnown, &n.last)
}

// write notes the members, keys and rules. A node that never learnt its members
// keeps the old note of them.
func (n *notes) write(s *devices.Service, log *slog.Logger) {
	k := n.last
	if s.Loaded() {
		k.Devices, k.Exceptions = s.Known()
		k.Rotation = s.KnownRotation()
	}
	k.Doors = s.Doors()
	if err := n.dir.writeJSON(fileKnown, k); err != nil {
		log.Warn("members not noted", "error", err)
	}
}

// drainFlag is set once the node begins to stop.
type drainFlag struct{ v atomic.Bool }

func (d *drainFlag) set()      { d.v.Store(true) }
func (d *drainFlag) get() bool { return d.v.Load() }
