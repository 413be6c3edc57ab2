package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

const (
	// maxAhead is by how many revisions an early change may be ahead to be kept; later
	// ones are read from the log.
	maxAhead = 10_000
	// maxRecent is how many changes a node keeps for other nodes.
	maxRecent = 2048
	// gapDelay is how long a gap may wait for the hint that fills it.
	gapDelay = 50 * time.Millisecond
	// readPage is how many changes are read at a time.
	readPage = 1_000
)

// Offer adds changes that this or another node committed. They come into force in order
// of revision; missing ones in between are read from the log.
func (r *Registry) Offer(list []devices.Change) {
	r.follow.Lock()
	defer r.follow.Unlock()
	for _, c := range list {
		switch {
		case c.Revision <= r.at.Revision:
			r.diverged = r.diverged || r.recent.contradicts(c)
		case c.Revision <= r.at.Revision+maxAhead:
			r.ahead[c.Revision] = c
		}
		r.maxHint = max(r.maxHint, c.Revision)
	}
	if !r.diverged {
		r.advanceLocked()
	}
	if r.diverged || r.maxHint > r.at.Revision {
		tasks.Signal(r.gap)
	}
}

// hasApplied reports whether a change is among the latest ones in force.
func (r *Registry) hasApplied(c devices.Change) bool {
	r.follow.Lock()
	defer r.follow.Unlock()
	i, found := r.recent.find(c.Revision)
	return found && r.recent.list[i].ID == c.ID
}

// advanceLocked applies the changes that are next in order.
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
	close(r.advanced)
	r.advanced = make(chan struct{})
}

// applyLocked applies the next change.
func (r *Registry) applyLocked(c devices.Change) {
	if c.Device == "" {
		r.applyFleet(c)
	} else {
		r.applyDevice(c)
	}
	r.at.Revision, r.at.ID = c.Revision, c.ID
	r.recent.add(c)
	r.rows.fold(c)
	r.removeRevocation(c)
	r.opt.Observer.OnChange(c)
}

// applyDevice updates the roster and the exceptions. It folds the change into the state
// that the roster has.
func (r *Registry) applyDevice(c devices.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.roster.Load()
	all.update(c.Device, func(old record, found bool) (record, bool) {
		x := r.exceptions[c.Device]
		m := devices.Member{ID: c.Device, Generation: x.Generation, Previous: x.Previous, PreviousUntil: x.PreviousUntil, Reason: x.Reason, Refused: x.Refused}
		if found {
			m.Admission, m.Prefer = devices.AdmissionMember, old.prefer()
			if old.flags&flagRevoked != 0 {
				m.Admission = devices.AdmissionRevoked
			}
			m.ClientID = sameClient
		}
		if err := m.Fold(c); err != nil {
			r.opt.Log.Error("a change cannot be applied", "error", err)
			return old, found
		}
		if x, ok := m.Exception(); ok {
			x.ChangedAt = c.At
			r.exceptions[c.Device] = x
		} else {
			delete(r.exceptions, c.Device)
		}
		next := record{client: old.client}.withTransport(m.Prefer).withAdmission(m.Admission)
		if m.ClientID != sameClient {
			next.client = all.client(c.Device, m.ClientID)
		}
		return next, m.Known()
	})
}

// sameClient stands for the admitted client, whose id is not in the roster.
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
			now := clock.Now()
			maps.DeleteFunc(r.keys, func(_ string, k access.Key) bool { return k.IsForgotten(now) && !k.Narrow && k.Grant == nil })
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
	default:
		err = errors.New("this version of fleetd does not know the aspect")
	}
	if err != nil {
		r.opt.Log.Error("a change of the fleet cannot be applied; this node needs a newer version of fleetd", "revision", c.Revision, "aspect", c.Aspect, "error", err)
	}
}

// replace replaces the whole state.
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
	r.rotation, r.policy, r.clientKey = s.Rotation, s.Policy, s.ClientKey
	r.mu.Unlock()
	r.at = s.Position
	r.diverged = false
	r.recent = recent{}
	r.rows.clear()
	r.opt.Observer.OnReplace(s)
	for _, c := range since {
		r.applyLocked(c)
	}
	for revision := range r.ahead {
		if revision <= r.at.Revision || restored {
			delete(r.ahead, revision)
		}
	}
	if restored {
		r.maxHint = 0
	}
	close(r.advanced)
	r.advanced = make(chan struct{})
}

// Refresh reads the changes since the last one in force, or everything if that is not
// possible. The registry is ready if it returns nil.
func (r *Registry) Refresh(ctx context.Context) error {
	r.reading.Lock()
	defer r.reading.Unlock()
	at, suspect := r.state() // read before the head: later commits may come into force at any time
	head, err := r.opt.Ledger.Head(ctx)
	if err != nil {
		return fmt.Errorf("read the fleet's revision: %w", err)
	}
	switch {
	case at.Lineage == "", r.incomplete:
		err = r.reload(ctx, false)
	case suspect, head.Lineage != at.Lineage, head.Revision < at.Revision, head.Revision == at.Revision && head.ID != at.ID:
		r.opt.Log.Warn("the log of changes went backwards, as after a restore of the database; the registry is read again", "revision", head.Revision, "before", at.Revision)
		r.Stats.Restored.Add(1)
		err = r.reload(ctx, true)
	case head.Revision > at.Revision:
		err = r.readLog(ctx)
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

// readLog reads the log from the last change in force on, which must still have the same
// id. The caller holds r.reading.
func (r *Registry) readLog(ctx context.Context) error {
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
			return fmt.Errorf("read the log of changes: %w", err)
		}
		if at.Revision > 0 {
			if len(list) == 0 || list[0].Revision != at.Revision || list[0].ID != at.ID {
				r.opt.Log.Warn("the log of changes differs from the one that this node applied, as after a restore of the database; the registry is read again", "revision", at.Revision)
				r.Stats.Restored.Add(1)
				return r.reload(ctx, true)
			}
		}
		whole := len(list) < readPage
		r.Offer(list)
		if _, suspect := r.state(); suspect { // a hint of another history arrived meanwhile, and no change is applied
			r.Stats.Restored.Add(1)
			return r.reload(ctx, true)
		}
		if whole {
			return nil
		}
	}
}

// reload reads the whole registry. The caller holds r.reading.
func (r *Registry) reload(ctx context.Context, restored bool) error {
	all := newRoster(r.key)
	r.Stats.Snapshots.Add(1)
	s, err := r.opt.Ledger.Snapshot(ctx, func(m devices.Member) {
		all.update(m.ID, func(record, bool) (record, bool) {
			return record{client: all.client(m.ID, m.ClientID)}.withTransport(m.Prefer).withAdmission(m.Admission), true
		})
	})
	if err != nil {
		return fmt.Errorf("read the registry: %w", err)
	}
	r.replace(all, s, nil, restored)
	r.incomplete = false
	r.file.reset()
	if restored && r.opt.OnRestored != nil {
		r.opt.OnRestored(s.Lineage)
	}
	return r.readLog(ctx) // changes that came into force meanwhile are not in the snapshot
}

// run reads the changes that no hint delivered.
func (r *Registry) run() {
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-r.gap:
		}
		if !clock.Sleep(r.ctx, gapDelay) {
			return
		}
		if !r.hasGap() {
			continue
		}
		ctx, cancel := context.WithTimeout(r.ctx, decideLimit)
		err := r.readMissing(ctx)
		cancel()
		if err != nil { // retried at the next beat
			r.opt.Log.Debug("missing changes not read yet", "error", err)
		}
	}
}

func (r *Registry) hasGap() bool {
	r.follow.Lock()
	defer r.follow.Unlock()
	return (r.diverged || r.maxHint > r.at.Revision) && r.at.Lineage != ""
}

// readMissing reads the changes that no hint delivered, or everything if a hint is of
// another history.
func (r *Registry) readMissing(ctx context.Context) error {
	if _, suspect := r.state(); suspect {
		return r.Refresh(ctx)
	}
	r.reading.Lock()
	defer r.reading.Unlock()
	return r.readLog(ctx)
}

func (r *Registry) state() (at devices.Position, suspect bool) {
	r.follow.Lock()
	defer r.follow.Unlock()
	return r.at, r.diverged
}

// await returns once the changes up to a revision are in force and written to the file.
// It reads missing changes of other nodes if no hint delivers them.
func (r *Registry) await(ctx context.Context, revision int64) error {
	read := time.After(gapDelay / 2)
	for {
		r.follow.Lock()
		done, moved := r.at.Revision >= revision, r.advanced
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
			if r.Position().Revision < revision { // else another caller has read it while this one waited
				err = r.readLog(ctx)
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

// recent holds the latest changes, in order and without gaps.
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

// contradicts reports whether recent has another change with the same revision.
func (x *recent) contradicts(c devices.Change) bool {
	i, found := x.find(c.Revision)
	return found && x.list[i].ID != c.ID
}

// after returns the changes after a position; ok is false if some of them, or the
// position itself, are no longer here.
func (x *recent) after(at devices.Position) (list []devices.Change, ok bool) {
	i, found := x.find(at.Revision)
	if found {
		return slices.Clone(x.list[i+1:]), x.list[i].ID == at.ID
	}
	return slices.Clone(x.list[i:]), i < len(x.list) && x.list[i].Revision == at.Revision+1
}
