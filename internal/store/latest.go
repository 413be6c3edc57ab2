package store

import "fleetd/internal/devices"

// latest holds the newest row per device, first come first out.
type latest[T any] struct {
	order []devices.ID // may name devices that were removed
	rows  map[devices.ID]T
	merge func(older, newer T) T
	text  func(row *T) int // bytes of what is long in a row; nil: nothing is
}

func (l *latest[T]) put(id devices.ID, row T) {
	if older, ok := l.rows[id]; ok {
		row = l.merge(older, row)
	} else {
		l.order = append(l.order, id)
	}
	l.rows[id] = row
}

// putBack returns a row that was taken out: what came since is newer.
func (l *latest[T]) putBack(id devices.ID, row T) {
	if newer, ok := l.rows[id]; ok {
		l.rows[id] = l.merge(row, newer)
		return
	}
	l.put(id, row)
}

// take removes and returns up to n rows of up to this many bytes of text.
func (l *latest[T]) take(n, bytes int) []T {
	var out []T
	i := 0
	for ; i < len(l.order) && len(out) < n && bytes > 0; i++ {
		if row, ok := l.rows[l.order[i]]; ok {
			out = append(out, row)
			delete(l.rows, l.order[i])
			if l.text != nil {
				bytes -= l.text(&row)
			}
		}
	}
	l.order = l.order[i:]
	return out
}
