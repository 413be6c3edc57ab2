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

// write notes the members. A node that never learnt them keeps the old note.
func (n *notes) write(s *devices.Service, log *slog.Logger) {
	if !s.Loaded() {
		return
	}
	var k known
	k.Devices, k.Exceptions = s.Known()
	if err := n.dir.writeJSON(fileKnown, k); err != nil {
		log.Warn("members not noted", "error", err)
	}
}

// drainFlag is set once the node begins to stop.
type drainFlag struct{ v atomic.Bool }

func (d *drainFlag) set()      { d.v.Store(true) }
func (d *drainFlag) get() bool { return d.v.Load() }
