package registry

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/durable"
)

// RevocationsFile contains the revocations that are not in the database yet.
const RevocationsFile = "revocations.json"

// maxRevocations is how many may be pending; further ones are refused.
const maxRevocations = 10_000

// peerConfirm is how long a revocation waits for confirmations of other nodes.
const peerConfirm = time.Second

// Revocation is a revocation of a device or an API key that was decided while the
// database was unreachable. It is in force on every node that has received it, and each of
// them writes it to the database as soon as possible. Its change has the same id, so that
// it is written once.
type Revocation struct {
	ID     string     `json:"id"`
	Device devices.ID `json:"device,omitempty"`
	Key    string     `json:"key,omitempty"` // id of an API key
	Who    string     `json:"who"`
	At     time.Time  `json:"at"`
}

// RevokeResult reports whether a revocation is in the database, and if not, which nodes
// have written it to disk.
type RevokeResult struct {
	Recorded bool
	Nodes    []string
}

// revocationOf reports whether a revocation of the device is pending.
func (r *Registry) revocationOf(id devices.ID) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if len(r.revokes) == 0 {
		return false
	}
	for _, p := range r.revokes {
		if p.Device == id {
			return true
		}
	}
	return false
}

// IsKeyRevocationPending reports whether the revocation of an API key is not in the database yet.
func (r *Registry) IsKeyRevocationPending(key string) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, p := range r.revokes {
		if p.Key == key {
			return true
		}
	}
	return false
}

// PendingRevocations returns the revocations that are not in the database yet, oldest first.
func (r *Registry) PendingRevocations() []Revocation {
	r.mu.RLock()
	defer r.mu.RUnlock()
	list := make([]Revocation, 0, len(r.revokes))
	for _, p := range r.revokes {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b Revocation) int { return a.At.Compare(b.At) })
	return list
}

// AddRevocation adds a revocation of this or another node. It is in force and on disk if
// AddRevocation returns nil.
func (r *Registry) AddRevocation(p Revocation) error {
	r.mu.Lock()
	_, found := r.revokes[p.ID]
	switch {
	case found:
	case len(r.revokes) >= maxRevocations:
		r.mu.Unlock()
		return devices.Errorf(devices.CodeUnavailable, "%d revocations wait for the database already; revoke again when it is reachable", maxRevocations)
	default:
		r.revokes[p.ID] = p
	}
	r.mu.Unlock()
	if found {
		return nil
	}
	r.follow.Lock()
	r.opt.Observer.OnRevocation(p)
	r.follow.Unlock()
	return r.saveRevocations()
}

// revokeWithoutDatabase applies a revocation that the database did not accept.
func (r *Registry) revokeWithoutDatabase(ctx context.Context, p Revocation) (RevokeResult, error) {
	var out RevokeResult
	unwritten := r.AddRevocation(p)
	switch {
	case unwritten == nil:
		out.Nodes = []string{r.opt.Node}
	case !r.isPending(p.ID):
		return RevokeResult{}, unwritten
	default: // it is in force here until the node stops; the disks of other nodes may work
		r.opt.Log.Error("a revocation is in force but not on this node's disk", "device", p.Device, "key", p.Key, "error", unwritten)
	}
	r.opt.Log.Warn("revoked without the database; the revocation is written when the database is reachable", "device", p.Device, "key", p.Key, "by", p.Who)
	if r.opt.Peers != nil {
		ctx, cancel := context.WithTimeout(ctx, peerConfirm)
		defer cancel()
		out.Nodes = append(out.Nodes, r.opt.Peers.Revoke(ctx, p)...)
	}
	if len(out.Nodes) == 0 {
		return out, unwritten
	}
	return out, nil
}

// isPending reports whether a revocation is in force but not in the database.
func (r *Registry) isPending(id string) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	_, waits := r.revokes[id]
	return waits
}

// removeRevocation removes a revocation whose change is in force. The caller holds r.follow.
func (r *Registry) removeRevocation(c devices.Change) {
	r.mu.Lock()
	_, waits := r.revokes[c.ID]
	delete(r.revokes, c.ID)
	r.mu.Unlock()
	if waits {
		r.tasks.Go(func() {
			if err := r.saveRevocations(); err != nil {
				r.opt.Log.Warn("the file of pending revocations cannot be updated; a revocation that is recorded remains in it", "error", err)
			}
		})
	}
}

// retryRevocations writes pending revocations to the database.
func (r *Registry) retryRevocations() {
	for _, p := range r.PendingRevocations() {
		r.tasks.Go(func() {
			ctx, cancel := context.WithTimeout(r.ctx, decideLimit)
			defer cancel()
			if err := r.record(ctx, p); err != nil {
				r.opt.Log.Warn("a revocation is in force but not in the database yet; it is retried", "device", p.Device, "key", p.Key, "error", err)
			}
		})
	}
}

// record writes a revocation. If it changes nothing, because the device was forgotten or
// revoked meanwhile, it is removed as well.
func (r *Registry) record(ctx context.Context, p Revocation) (err error) {
	var changes []devices.Change
	if p.Key != "" {
		changes, err = r.revokeKey(ctx, p)
	} else {
		changes, err = r.decide(ctx, devices.Decision{ID: p.ID, Device: p.Device, Who: p.Who, Once: true, DecideWith: revoke()})
		if isCode(err, devices.CodeDeviceUnknown) {
			err = nil
		}
	}
	if err == nil && len(changes) == 0 {
		r.removeRevocation(devices.Change{ID: p.ID})
	}
	return err
}

func (r *Registry) revokeKey(ctx context.Context, p Revocation) ([]devices.Change, error) {
	r.mu.RLock()
	k, found := r.keys[p.Key]
	r.mu.RUnlock()
	if !found {
		return nil, nil
	}
	if k.Revoked.IsZero() {
		k.Revoked = p.At
	}
	return r.saveKey(ctx, p.Who, p.ID, k)
}

// loadRevocations loads the revocations that were pending when the node stopped. They
// are in force before anything else.
func (r *Registry) loadRevocations() {
	if r.opt.Dir == "" {
		return
	}
	text, err := os.ReadFile(filepath.Join(r.opt.Dir, RevocationsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var list []Revocation
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	if err != nil {
		r.opt.Log.Error("pending revocations cannot be read; repeat the revocations that were made while the database was unreachable", "file", RevocationsFile, "error", err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range list {
		r.revokes[p.ID] = p
	}
}

func (r *Registry) saveRevocations() error {
	if r.opt.Dir == "" {
		return nil
	}
	r.revokeFile.Lock() // the last writer writes all of them
	defer r.revokeFile.Unlock()
	path := filepath.Join(r.opt.Dir, RevocationsFile)
	list := r.PendingRevocations()
	if len(list) == 0 {
		return errors.Join(removeIfThere(path), durable.SyncDir(r.opt.Dir))
	}
	text, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return err
	}
	return durable.WriteFile(path, text)
}

// catchUpFromPeers completes this node's snapshot from other nodes. It reports false if
// one of them has changes that it could not get: then no device may be admitted based on
// the snapshot.
func (r *Registry) catchUpFromPeers(ctx context.Context) (caughtUp bool) {
	if r.opt.Peers == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, peerLimit)
	defer cancel()
	for again := true; again && ctx.Err() == nil; {
		again = false
		at := r.Position()
		caughtUp = true
		for _, a := range r.opt.Peers.Query(ctx, at) {
			r.applyAnswer(a)
			now := r.Position()
			again = again || !a.Complete && now.Revision > at.Revision
			caughtUp = caughtUp && a.At.Lineage == now.Lineage && a.At.Revision <= now.Revision
		}
	}
	return caughtUp
}

// applyAnswer adds the revocations and changes of another node.
func (r *Registry) applyAnswer(a PeerAnswer) {
	for _, p := range a.Revocations {
		if err := r.AddRevocation(p); err != nil {
			r.opt.Log.Warn("a revocation of another node cannot be written to disk", "device", p.Device, "key", p.Key, "error", err)
		}
	}
	at := r.Position()
	switch {
	case a.At.Lineage == at.Lineage && len(a.Changes) > 0:
		r.Offer(a.Changes)
	case a.At != at && !a.Complete:
		r.opt.Log.Warn("this node's snapshot is too old to be completed by another node; later changes are missing until the database is reachable", "node", a.Node, "revision", at.Revision, "theirs", a.At.Revision)
	}
}

// Answer returns this node's changes after a position.
func (r *Registry) Answer(at devices.Position) PeerAnswer {
	a := PeerAnswer{Node: r.opt.Node, At: r.Position(), Revocations: r.PendingRevocations()}
	a.Changes, a.Complete = r.Recent(at)
	return a
}
