package store

import (
	"context"
	"fmt"
	"strings"

	"fleetd/internal/devices"
)

// OnOutranked has stored called with each presence that stands in front of a row
// which says that a device is online: that row changed nothing. Where the rows
// could not be looked at, unsure is called with the devices for which that may
// be. Both run on the writer's goroutine and must not block.
func OnOutranked(stored func(devices.Presence), unsure func(devices.ID)) Option {
	return func(s *Store) { s.onOutranked, s.onUnsure = stored, unsure }
}

// outranked finds the rows of a committed group that the fence refused, and
// reports what refused them. A row saved again after a commit whose answer was
// lost finds itself, which is no refusal.
func (w *writer) outranked(ctx context.Context, rows []devices.Presence) {
	ctx, cancel := context.WithTimeout(ctx, groupTimeout)
	defer cancel()
	saved := map[devices.ID]devices.Presence{}
	var places []string
	var args []any
	for _, p := range rows {
		if p.Online { // what has ended gives way to anything
			saved[p.Device] = p
			args = append(args, string(p.Device))
			places = append(places, fmt.Sprintf("$%d", len(args)))
		}
	}
	if len(args) == 0 {
		return
	}
	stored, err := collect(ctx, w.store.backend.read, func(scan func(...any) error) (p devices.Presence, err error) {
		err = scan(&p.Device, &p.Epoch, &p.Seq, &p.Online, &p.Node, &p.Session)
		return p, err
	}, "SELECT device, epoch, seq, online, node, session FROM presence WHERE device IN ("+strings.Join(places, ", ")+")", args...)
	if err != nil {
		w.store.log.Debug("refused rows not looked up", "error", err)
		for id := range saved {
			w.store.onUnsure(id)
		}
		return
	}
	for _, p := range stored {
		mine := saved[p.Device]
		above := p.Epoch > mine.Epoch || p.Epoch == mine.Epoch && p.Seq > mine.Seq
		if above || p.Epoch == mine.Epoch && p.Seq == mine.Seq && (!p.Online || p.Session != mine.Session) {
			w.store.onOutranked(p)
		}
	}
}
