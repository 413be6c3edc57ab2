package ledger

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// transaction is one attempt to write decisions.
type transaction struct {
	*Ledger
	tx        *sql.Tx
	committed func()            // called after COMMIT
	rotation  *devices.Rotation // of the fleet, once a decision has requested it
}

// pending is added to revisions that are counted from the start of the transaction, until its end
// gives the real ones. Real revisions never get that high.
const pending = 1 << 62

// settle converts a pending revision into a real one.
func settle(revision, base int64) int64 {
	if revision >= pending {
		return revision - pending + base
	}
	return revision
}

// state is the state of a device within a transaction.
type state struct {
	before, now devices.Member // in the tables; after the decisions so far
	exception   bool           // a row of its credentials exists
	changed     bool           // by a change
	joined      bool           // only the column joined must be written
	expires     bool           // because of a decision
	left        bool           // its row is deleted, and with it its history
	at          time.Time      // of the last change
	made        []string       // ids of the decisions that changed it
}

// decide makes the decisions of all parts and writes the results.
func (t *transaction) decide(ctx context.Context, parts []part) error {
	ids := idsOf(parts)
	states, err := t.load(ctx, ids)
	if err != nil {
		return err
	}
	at := t.now().UTC().Truncate(time.Microsecond)
	var changes []devices.Change
	for _, p := range parts {
		for i := range p.list {
			p.outcomes[i] = devices.Outcome{} // of an earlier attempt
			d := &p.list[i]
			s := states[d.Device]
			if s == nil {
				p.outcomes[i].Err = errors.New("a decision needs a device id that is valid text")
				continue
			}
			made, err := t.decideOne(ctx, d, s, at, int64(len(changes)), &p.outcomes[i])
			if err != nil {
				return err
			}
			changes = append(changes, made...)
		}
	}
	base, err := t.write(ctx, ids, states, changes)
	if err != nil {
		return err
	}
	t.committed = func() {
		for _, p := range parts {
			for i := range p.outcomes {
				o := &p.outcomes[i]
				o.Before.Revision, o.After.Revision = settle(o.Before.Revision, base), settle(o.After.Revision, base)
				for k := range o.Changes {
					o.Changes[k].Revision = settle(o.Changes[k].Revision, base)
				}
			}
		}
	}
	return nil
}

// idsOf returns the devices of the decisions, sorted.
func idsOf(parts []part) []string {
	var ids []string
	for _, p := range parts {
		for i := range p.list {
			if id := string(p.list[i].Device); id != "" && database.IsText(id) {
				ids = append(ids, id)
			}
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// decideOne makes one decision, based on the state after the previous ones.
func (t *transaction) decideOne(ctx context.Context, d *devices.Decision, s *state, at time.Time, made int64, out *devices.Outcome) ([]devices.Change, error) {
	out.Before, out.After = s.now, s.now
	if d.Once && slices.Contains(s.made, d.ID) {
		return nil, nil
	}
	if d.Once && s.now.Revision > 0 {
		again, err := t.isMade(ctx, d)
		if err != nil || again {
			return nil, err
		}
	}
	after := s.now.Clone()
	var rotation devices.Rotation
	if d.DecideWith != nil {
		var err error
		if rotation, err = t.fleetRotation(ctx); err != nil {
			return nil, err
		}
	}
	if out.Err = d.Make(&after, rotation); out.Err != nil {
		return nil, nil
	}
	clean(&after)
	after.ID = d.Device
	if !s.now.Known() && !after.Known() {
		after.Admission = s.now.Admission // it cannot be removed twice
	}
	expires := after.Admission == devices.AdmissionExpired
	if expires {
		came, err := t.hasConnected(ctx, d.Device)
		if err != nil {
			return nil, err
		}
		if came { // then it is like any other device
			after, expires = s.now.Clone(), false
			after.JoinTransport = devices.TransportNone
		}
	}
	changes := devices.ChangesOf(&s.now, &after, d.Import)
	if len(changes) == 0 {
		if s.now.Known() && after.JoinTransport != s.now.JoinTransport {
			s.now.JoinTransport, s.joined = after.JoinTransport, true
			out.After = s.now
		}
		return nil, nil
	}
	now := s.now.Clone()
	for i := range changes {
		c := &changes[i]
		c.Revision, c.ID, c.Who, c.At = pending+made+int64(i)+1, d.ID, database.Clean(d.Who), at
		if i > 0 {
			c.ID += "." + strconv.Itoa(i)
		}
		if d.Import { // the single change has everything; folding it would parse what was just encoded
			now, now.Revision, now.JoinTransport = after, c.Revision, devices.TransportNone
			if !s.now.Known() {
				now.FirstSeen = at
			}
		} else if err := now.Fold(*c); err != nil {
			out.Err = err
			return nil, nil
		}
	}
	s.now, s.changed, s.at = now, true, at
	s.expires = s.expires || expires
	s.left = s.left || s.before.Known() && !now.Known()
	s.made = append(s.made, d.ID)
	out.After, out.Changes = now, changes
	return changes, nil
}

// clean replaces text that the tables cannot store.
func clean(m *devices.Member) {
	for _, text := range []*string{&m.ClientID, &m.Name, &m.Serial, &m.Reason, (*string)(&m.Prefer), (*string)(&m.JoinTransport)} {
		*text = database.Clean(*text)
	}
	m.PreviousUntil = clock.Instant(clock.Micros(m.PreviousUntil))
	m.Labels = cleanLabels(m.Labels)
}

// cleanLabels returns labels as in device_labels.
func cleanLabels(labels map[string]string) map[string]string {
	for key, value := range labels {
		if database.IsText(key) && database.IsText(value) {
			continue
		}
		cleaned := map[string]string{}
		for _, key := range slices.Sorted(maps.Keys(labels)) {
			cleaned[database.Clean(key)] = database.Clean(labels[key])
		}
		return cleaned
	}
	return labels
}

// isMade reports whether a decision was written before.
func (t *transaction) isMade(ctx context.Context, d *devices.Decision) (made bool, err error) {
	err = t.tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM changes WHERE device = $1 AND id = $2)`, string(d.Device), d.ID).Scan(&made)
	return made, err
}

// hasConnected reports whether a device ever connected. Its row of presence is not locked yet:
// remove checks again.
func (t *transaction) hasConnected(ctx context.Context, id devices.ID) (came bool, err error) {
	err = t.tx.QueryRowContext(ctx, `SELECT epoch > 0 FROM presence WHERE device = $1`, string(id)).Scan(&came)
	if errors.Is(err, sql.ErrNoRows) {
		err = nil
	}
	return came, err
}

// among runs a query, with %s for a condition on the column device, over some devices.
func (t *transaction) among(ctx context.Context, ids []string, query string, row func(scan func(...any) error) error) error {
	if len(ids) == 0 {
		return nil
	}
	condition, arg := database.IDSet(t.db.Postgres(), "device", "$1", ids)
	_, err := database.Collect(ctx, t.tx, func(scan func(...any) error) (none struct{}, err error) { return none, row(scan) }, fmt.Sprintf(query, condition), arg)
	return err
}

// execAmong is among for a statement without rows.
func (t *transaction) execAmong(ctx context.Context, ids []string, statement string) error {
	if len(ids) == 0 {
		return nil
	}
	condition, arg := database.IDSet(t.db.Postgres(), "device", "$1", ids)
	_, err := t.tx.ExecContext(ctx, fmt.Sprintf(statement, condition), arg)
	return err
}

// load reads and locks devices and their credentials, in the order of ids.
func (t *transaction) load(ctx context.Context, ids []string) (map[devices.ID]*state, error) {
	states := make(map[devices.ID]*state, len(ids))
	for _, id := range ids {
		states[devices.ID(id)] = &state{before: devices.Member{ID: devices.ID(id)}}
	}
	err := t.among(ctx, ids, `SELECT device, admission, client_id, name, labels, preferred_transport, serial, joined, first_seen, revision
 FROM devices WHERE %s ORDER BY device`+t.db.Lock("FOR UPDATE"), func(scan func(...any) error) error {
		var m devices.Member
		var labels string
		var firstSeen int64
		if err := scan(&m.ID, &m.Admission, &m.ClientID, &m.Name, &labels, &m.Prefer, &m.Serial, &m.JoinTransport, &firstSeen, &m.Revision); err != nil {
			return err
		}
		m.Labels, m.FirstSeen = cleanLabels(database.DecodeLabels(labels)), clock.Instant(firstSeen)
		states[m.ID].before = m
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = t.among(ctx, ids, `SELECT device, generation, previous, previous_until, reason, refused FROM credential_exceptions WHERE %s ORDER BY device`+t.db.Lock("FOR UPDATE"),
		func(scan func(...any) error) error {
			var id devices.ID
			var generation, previous, until int64
			var reason string
			var refused devices.Refused
			if err := scan(&id, &generation, &previous, &until, &reason, &refused); err != nil {
				return err
			}
			s := states[id]
			s.exception = true
			m := &s.before
			m.Generation, m.Previous, m.PreviousUntil, m.Reason, m.Refused = generation, previous, clock.Instant(until), reason, refused
			return nil
		})
	for _, s := range states {
		s.now = s.before
	}
	return states, err
}
