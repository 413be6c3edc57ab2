package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

const (
	// maxAhead is how far a change may be ahead of those in force to wait for them;
	// what is further is read from the log.
	maxAhead = 10_000
	// maxRecent is how many changes a node keeps for others.
	maxRecent = 2048
	// gapPatience is how long a gap may wait for the hint that fills it.
	gapPatience = 50 * time.Millisecond
	// readPage is how many changes are read at once.
	readPage = 1_000
)

// Offer takes changes that were committed here or by another node. They come into
// force in the order of their revisions; what is missing between them is read.
func (r *Registry) Offer(list []devices.Change) {
	r.follow.Lock()
	defer r.follow.Unlock()
	for _, c := range list {
		switch {
		case c.Revision <= r.at.Revision:
			r.suspect = r.suspect || r.recent.contradicts(c)
		case c.Revision <= r.at.Revision+maxAhead:
			r.ahead[c.Revision] = c
		}
		r.heard = max(r.heard, c.Revision)
	}
	if !r.suspect {
		r.advanceLocked()
	}
	if r.suspect || r.heard > r.at.Revision {
		r.wake()
	}
}

// hasApplied tells whether a change is among the last that came into force.
func (r *Registry) hasApplied(c devices.Change) bool {
	r.follow.Lock()
	defer r.follow.Unlock()
	i, found := r.recent.find(c.Revision)
	return found && r.recent.list[i].ID == c.ID
}

// advanceLocked applies what has come in order.
func (r *Registry) advanceLocked() {
	var applied []devices.Change
	for {
		c, ok := r.ahead[r.at.Revision+1]
		if !ok {
			break
		}
		delete(r.ahead, c.Revision)
		r.applyLocked(c)
		applied = append(applied, c)
	}
	r.appliedLocked(applied)
}

func (r *Registry) appliedLocked(list []devices.Change) {
	if len(list) == 0 {
		return
	}
	r.file.append(list)
	r.Stats.Applied.Add(uint64(len(list)))
	close(r.moved)
	r.moved = make(chan struct{})
}

// applyLocked brings one change into force. It is the next one.
func (r *Registry) applyLocked(c devices.Change) {
	if c.Device == "" {
		r.applyFleet(c)
	} else {
		r.applyDevice(c)
	}
	r.at.Revision, r.at.ID = c.Revision, c.ID
	r.recent.add(c)
	r.rows.fold(c)
	r.settled(c)
	r.opt.Observer.Changed(c)
}

// applyDevice updates the roster and the exceptions. Folding the change into what
// the roster knows gives the rest.
func (r *Registry) applyDevice(c devices.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.roster.Load()
	all.update(c.Device, func(old record, known bool) (record, bool) {
		x := r.exceptions[c.Device]
		m := devices.Member{ID: c.Device, Generation: x.Generation, Previous: x.Previous, PreviousUntil: x.PreviousUntil, Reason: x.Reason}
		if known {
			m.Admission, m.Prefer = devices.AdmissionMember, old.prefer()
			if old.flags&flagRevoked != 0 {
				m.Admission = devices.AdmissionRevoked
			}
			m.ClientID = sameClient
		}
		if err := m.Fold(c); err != nil {
			r.opt.Log.Error("a change cannot be applied", "error", err)
			return old, known
		}
		if x, ok := m.Exception(); ok {
			x.ChangedAt = c.At
			r.exceptions[c.Device] = x
		} else {
			delete(r.exceptions, c.Device)
		}
		next := record{client: old.client}.with(m.Prefer).admitted(m.Admission)
		if m.ClientID != sameClient {
			next.client = all.client(c.Device, m.ClientID)
		}
		return next, m.Known()
	})
}

// sameClient stands for the admitted client, whose id the roster does not have.
const sameClient = "\x00"

func (r *Registry) applyFleet(c devices.Change) {
	var rotation devices.Rotation
	var err error
	if c.Aspect == devices.AspectRotation {
		if err = json.Unmarshal(c.Value, &rotation); err == nil {
			r.opt.OnRotation(rotation, true)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch c.Aspect {
	case devices.AspectKey:
		var k access.Key
		if err = json.Unmarshal(c.Value, &k); err == nil {
			r.keys[k.ID] = k
		}
	case devices.AspectPolicy:
		var p access.Policy
		if err = json.Unmarshal(c.Value, &p); err == nil {
			r.policy = p
		}
	case devices.AspectRotation:
		if err == nil {
			r.rotation = rotation
		}
	}
	if err != nil {
		r.opt.Log.Error("a change of the fleet cannot be applied", "revision", c.Revision, "aspect", c.Aspect, "error", err)
	}
}

// replace puts another state in place of what is known.
func (r *Registry) replace(all *roster, s Snapshot, since []devices.Change, restored bool) {
	r.follow.Lock()
	defer r.follow.Unlock()
	r.opt.OnRotation(s.Rotation, false)
	r.mu.Lock()
	r.roster.Store(all)
	r.exceptions = make(map[devices.ID]devices.Exception, len(s.Exceptions))
	for _, x := range s.Exceptions {
		r.exceptions[x.Device] = x
	}
	r.keys = make(map[string]access.Key, len(s.Keys))
	for _, k := range s.Keys {
		r.keys[k.ID] = k
	}
	r.rotation, r.policy = s.Rotation, s.Policy
	r.mu.Unlock()
	r.at = s.Position
	r.suspect = false
	r.recent = recent{}
	r.rows.clear()
	r.opt.Observer.Replaced(s)
	for _, c := range since {
		r.applyLocked(c)
	}
	for revision := range r.ahead {
		if revision <= r.at.Revision || restored {
			delete(r.ahead, revision)
		}
	}
	if restored {
		r.heard = 0
	}
	close(r.moved)
	r.moved = make(chan struct{})
}

// Refresh reads what was decided since the last change that is in force here, or
// everything where that is not possible. Without an error the registry is ready.
func (r *Registry) Refresh(ctx context.Context) error {
	r.reading.Lock()
	defer r.reading.Unlock()
	at, suspect := r.state() // before the head: what is committed meanwhile may come into force at once
	head, err := r.opt.Ledger.Head(ctx)
	if err != nil {
		return r.wrap("read the fleet's revision", err)
	}
	switch {
	case at.Lineage == "":
		err = r.reload(ctx, false)
	case suspect, head.Lineage != at.Lineage, head.Revision < at.Revision, head.Revision == at.Revision && head.ID != at.ID:
		r.opt.Log.Warn("the fleet's history went backwards, as after a restore; everything is read anew", "revision", head.Revision, "before", at.Revision)
		r.Stats.Restored.Add(1)
		err = r.reload(ctx, true)
	case head.Revision > at.Revision:
		err = r.readOn(ctx)
	}
	if err != nil {
		return err
	}
	if !r.ready.Swap(true) {
		r.opt.Log.Info("the registry is ready", "revision", head.Revision, "members", r.Members())
	}
	r.retryRevocations()
	return nil
}

// readOn reads the log from the last change that is in force. That one must still
// be there, under the same id. The caller holds r.reading.
func (r *Registry) readOn(ctx context.Context) error {
	for {
		at := r.Position()
		if at.Lineage == "" {
			return r.reload(ctx, false)
		}
		list, err := r.opt.Ledger.Changes(ctx, max(at.Revision, 1), readPage)
		r.Stats.Reads.Add(1)
		if errors.Is(err, devices.ErrPruned) {
			return r.reload(ctx, false)
		}
		if err != nil {
			return r.wrap("read the log of changes", err)
		}
		if at.Revision > 0 {
			if len(list) == 0 || list[0].Revision != at.Revision || list[0].ID != at.ID {
				r.opt.Log.Warn("the log of changes is not the one this node has followed, as after a restore; everything is read anew", "revision", at.Revision)
				r.Stats.Restored.Add(1)
				return r.reload(ctx, true)
			}
		}
		whole := len(list) < readPage
		r.Offer(list)
		if _, suspect := r.state(); suspect { // a hint of another history came meanwhile, and nothing is applied
			r.Stats.Restored.Add(1)
			return r.reload(ctx, true)
		}
		if whole {
			return nil
		}
	}
}

// reload reads everything. The caller holds r.reading.
func (r *Registry) reload(ctx context.Context, restored bool) error {
	all := newRoster(r.key)
	r.Stats.Snapshots.Add(1)
	s, err := r.opt.Ledger.Snapshot(ctx, func(m devices.Member) {
		all.update(m.ID, func(record, bool) (record, bool) {
			return record{client: all.client(m.ID, m.ClientID)}.with(m.Prefer).admitted(m.Admission), true
		})
	})
	if err != nil {
		return r.wrap("read the registry", err)
	}
	r.replace(all, s, nil, restored)
	r.file.reset()
	return r.readOn(ctx) // what came into force meanwhile is not in the snapshot
}

// wake has run look at a gap.
func (r *Registry) wake() {
	select {
	case r.kick <- struct{}{}:
	default:
	}
}

// run reads what hints did not bring.
func (r *Registry) run() {
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-r.kick:
		}
		select {
		case <-r.ctx.Done():
			return
		case <-time.After(gapPatience):
		}
		if !r.hasGap() {
			continue
		}
		ctx, cancel := context.WithTimeout(r.ctx, decideLimit)
		err := r.readMissing(ctx)
		cancel()
		if err != nil { // the next beat tries again
			r.opt.Log.Debug("missing changes not read yet", "error", err)
		}
	}
}

func (r *Registry) hasGap() bool {
	r.follow.Lock()
	defer r.follow.Unlock()
	return (r.suspect || r.heard > r.at.Revision) && r.at.Lineage != ""
}

// readMissing reads what hints did not bring, or everything if one of them is of
// another history.
func (r *Registry) readMissing(ctx context.Context) error {
	if _, suspect := r.state(); suspect {
		return r.Refresh(ctx)
	}
	r.reading.Lock()
	defer r.reading.Unlock()
	return r.readOn(ctx)
}

func (r *Registry) state() (at devices.Position, suspect bool) {
	r.follow.Lock()
	defer r.follow.Unlock()
	return r.at, r.suspect
}

// await returns once the changes up to a revision are in force and noted on
// disk. Those of other nodes before them are read if no hint brings them.
func (r *Registry) await(ctx context.Context, revision int64) error {
	read := time.After(gapPatience / 2)
	for {
		r.follow.Lock()
		done, moved := r.at.Revision >= revision, r.moved
		r.follow.Unlock()
		if done {
			r.file.await(ctx, revision)
			return nil
		}
		select {
		case <-moved:
		case <-read:
			r.reading.Lock()
			var err error
			if r.Position().Revision < revision { // else somebody else has read it while this waited
				err = r.readOn(ctx)
			}
			r.reading.Unlock()
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// recent keeps the last changes, in order and without gaps.
type recent struct {
	list []devices.Change
}

func (x *recent) add(c devices.Change) {
	if len(x.list) >= 2*maxRecent {
		x.list = slices.Clone(x.list[maxRecent:])
	}
	x.list = append(x.list, c)
}

func (x *recent) find(revision int64) (i int, found bool) {
	return slices.BinarySearchFunc(x.list, revision, func(c devices.Change, revision int64) int { return cmp.Compare(c.Revision, revision) })
}

// contradicts tells whether there is another change in place of this one.
func (x *recent) contradicts(c devices.Change) bool {
	i, found := x.find(c.Revision)
	return found && x.list[i].ID != c.ID
}

// after returns those after a place in the log; ok is false if some of them, or
// the place itself, are not here.
func (x *recent) after(at devices.Position) (list []devices.Change, ok bool) {
	i, found := x.find(at.Revision)
	if found {
		return slices.Clone(x.list[i+1:]), x.list[i].ID == at.ID
	}
	return slices.Clone(x.list[i:]), i < len(x.list) && x.list[i].Revision == at.Revision+1
}
