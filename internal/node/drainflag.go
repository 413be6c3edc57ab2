package node

import "sync/atomic"

// drainFlag is set when the node starts to stop.
type drainFlag struct{ v atomic.Bool }

func (d *drainFlag) set()      { d.v.Store(true) }
func (d *drainFlag) get() bool { return d.v.Load() }
