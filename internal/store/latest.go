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
