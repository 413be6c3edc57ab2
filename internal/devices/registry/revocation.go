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

// RevocationsFile has the revocations that the database has not taken yet.
const RevocationsFile = "revocations.json"

// maxRevocations bounds those that wait; further ones are refused.
const maxRevocations = 10_000

// peerConfirm is how long a revocation waits for other nodes to confirm it.
const peerConfirm = time.Second

// Revocation is one that was decided while the database was away: of a device, or
// of an API key. It is in force on every node that has heard of it, and each of
// them writes it to the database as soon as that answers. The change it makes has
// its id, so that it is made once.
type Revocation struct {
	ID     string     `json:"id"`
	Device devices.ID `json:"device,omitempty"`
	Key    string     `json:"key,omitempty"` // id of an API key
	Who    string     `json:"who"`
	At     time.Time  `json:"at"`
}

// Revoked tells what became of a revocation: whether it is in the database, and if
// not, which other nodes have written it down.
type Revoked struct {
	Recorded bool
	Nodes    []string
}

// revocationOf tells whether a revocation of the device waits.
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

// Waits tells whether the end of an API key is not written yet.
func (r *Registry) Waits(key string) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, p := range r.revokes {
		if p.Key == key {
			return true
		}
	}
	return false
}

// Revocations are those that wait.
func (r *Registry) Revocations() []Revocation {
	r.mu.RLock()
	defer r.mu.RUnlock()
	list := make([]Revocation, 0, len(r.revokes))
	for _, p := range r.revokes {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b Revocation) int { return a.At.Compare(b.At) })
	return list
}

// Confirm takes a revocation of another node: it is in force and on disk when
// Confirm returns nil.
func (r *Registry) Confirm(p Revocation) error {
	r.mu.Lock()
	_, known := r.revokes[p.ID]
	switch {
	case known:
	case len(r.revokes) >= maxRevocations:
		r.mu.Unlock()
		return devices.Errorf(devices.CodeUnavailable, "%d revocations wait for the database already", maxRevocations)
	default:
		r.revokes[p.ID] = p
	}
	r.mu.Unlock()
	if known {
		return nil
	}
	r.follow.Lock()
	r.opt.Observer.Revoked(p)
	r.follow.Unlock()
	return r.saveRevocations()
}

// pend puts a revocation into force that the database did not take.
func (r *Registry) pend(ctx context.Context, p Revocation) (Revoked, error) {
	var out Revoked
	unwritten := r.Confirm(p)
	switch {
	case unwritten == nil:
		out.Nodes = []string{r.opt.Node}
	case !r.waits(p.ID):
		return Revoked{}, unwritten
	default: // it is in force here until the node stops; others may have a disk that takes it
		r.opt.Log.Error("a revocation is in force and not on this node's disk", "device", p.Device, "key", p.Key, "error", unwritten)
	}
	r.opt.Log.Warn("revoked without the database; it is written when that answers", "device", p.Device, "key", p.Key, "by", p.Who)
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

// waits tells whether a revocation is in force and not in the database.
func (r *Registry) waits(id string) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	_, waits := r.revokes[id]
	return waits
}

// settled ends the wait of a revocation whose change is in force. r.follow is held.
func (r *Registry) settled(c devices.Change) {
	r.mu.Lock()
	_, waits := r.revokes[c.ID]
	delete(r.revokes, c.ID)
	r.mu.Unlock()
	if waits {
		r.tasks.Go(func() {
			if err := r.saveRevocations(); err != nil {
				r.opt.Log.Warn("a revocation that is recorded by now is still noted as waiting", "error", err)
			}
		})
	}
}

// retryRevocations writes what waits to the database.
func (r *Registry) retryRevocations() {
	for _, p := range r.Revocations() {
		r.tasks.Go(func() {
			ctx, cancel := context.WithTimeout(r.ctx, decideLimit)
			defer cancel()
			if err := r.record(ctx, p); err != nil {
				r.opt.Log.Warn("a revocation is not in the database yet; it is in force and tried again", "device", p.Device, "key", p.Key, "error", err)
			}
		})
	}
}

// record writes a revocation. Where it changes nothing, as of a device that was
// forgotten or revoked meanwhile, it is settled as well.
func (r *Registry) record(ctx context.Context, p Revocation) (err error) {
	var changes []devices.Change
	if p.Key != "" {
		changes, err = r.endKey(ctx, p)
	} else {
		changes, err = r.decide(ctx, devices.Decision{ID: p.ID, Device: p.Device, Who: p.Who, Once: true, DecideWith: revoke()})
		if isCode(err, devices.CodeDeviceUnknown) {
			err = nil
		}
	}
	if err == nil && len(changes) == 0 {
		r.settled(devices.Change{ID: p.ID})
	}
	return err
}

func (r *Registry) endKey(ctx context.Context, p Revocation) ([]devices.Change, error) {
	r.mu.RLock()
	k, known := r.keys[p.Key]
	r.mu.RUnlock()
	if !known {
		return nil, nil
	}
	if k.Revoked.IsZero() {
		k.Revoked = p.At
	}
	return r.saveKey(ctx, p.Who, p.ID, k)
}

// loadRevocations reads those that waited when the node stopped. They are in force
// before anything else is.
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
		r.opt.Log.Error("revocations that the database had not taken cannot be read; revoke again what was revoked while it was away", "file", RevocationsFile, "error", err)
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
	r.revokeFile.Lock() // the last to write has all of them
	defer r.revokeFile.Unlock()
	path := filepath.Join(r.opt.Dir, RevocationsFile)
	list := r.Revocations()
	if len(list) == 0 {
		return errors.Join(removeIfThere(path), durable.SyncDir(r.opt.Dir))
	}
	text, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return err
	}
	return durable.WriteFile(path, text)
}

// askPeers takes over what other nodes know beyond this node's snapshot. It is false
// if one of them knows more than could be taken over: then this node must admit
// nobody by what it has.
func (r *Registry) askPeers(ctx context.Context) (caughtUp bool) {
	if r.opt.Peers == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, peerLimit)
	defer cancel()
	for again := true; again && ctx.Err() == nil; {
		again = false
		at := r.Position()
		caughtUp = true
		for _, a := range r.opt.Peers.Ask(ctx, at) {
			r.take(a)
			now := r.Position()
			again = again || !a.Whole && now.Revision > at.Revision
			caughtUp = caughtUp && a.At.Lineage == now.Lineage && a.At.Revision <= now.Revision
		}
	}
	return caughtUp
}

// take takes over what another node knows.
func (r *Registry) take(a PeerAnswer) {
	for _, p := range a.Revocations {
		if err := r.Confirm(p); err != nil {
			r.opt.Log.Warn("a revocation of another node is not written down", "device", p.Device, "key", p.Key, "error", err)
		}
	}
	at := r.Position()
	switch {
	case a.At.Lineage == at.Lineage && len(a.Changes) > 0:
		r.Offer(a.Changes)
	case a.At != at && !a.Whole:
		r.opt.Log.Warn("this node's snapshot is too old for another node to complete it; what was decided since is not known here", "node", a.Node, "revision", at.Revision, "theirs", a.At.Revision)
	}
}

// Answer is what this node knows beyond a position.
func (r *Registry) Answer(at devices.Position) PeerAnswer {
	a := PeerAnswer{Node: r.opt.Node, At: r.Position(), Revocations: r.Revocations()}
	a.Changes, a.Whole = r.Recent(at)
	return a
}
