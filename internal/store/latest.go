package store

import "fleetd/internal/devices"

// latest holds the newest row per device, first in, first out.
type latest[T any] struct {
	order []devices.ID
	rows  map[devices.ID]T
	merge func(older, newer T) T
}

func (l *latest[T]) put(id devices.ID, row T) {
	if older, ok := l.rows[id]; ok {
		row = l.merge(older, row)
	} else {
		l.order = append(l.order, id)
	}
	l.rows[id] = row
}

// move moves the rows in order to another one, up to the first that stays.
func (l *latest[T]) move(to *latest[T], stays func(T) bool) {
	for ; len(l.order) > 0; l.order = l.order[1:] {
		id := l.order[0]
		row, ok := l.rows[id]
		switch {
		case !ok: // it was removed
		case stays(row):
			return
		default:
			delete(l.rows, id)
			to.put(id, row)
		}
	}
}

// take removes and returns up to n rows.
func (l *latest[T]) take(n int) []T {
	var out []T
	i := 0
	for ; i < len(l.order) && len(out) < n; i++ {
		if row, ok := l.rows[l.order[i]]; ok {
			out = append(out, row)
			delete(l.rows, l.order[i])
		}
	}
	l.order = l.order[i:]
	return out
}
