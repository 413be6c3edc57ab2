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

// newNotes reads the record. One that is damaged is as good as none: it is worth
// something only while there is no database.
func newNotes(dir *dataDir, log *slog.Logger) *notes {
	n := &notes{dir: dir}
	if err := dir.readJSON(fileKnown, &n.last); err != nil {
		n.last = known{} // what was read before the damage is not all there was
		log.Error("this node's notes of its members cannot be used; it goes by the database alone", "error", err)
	}
	return n
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
