package registry

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/timescale"
)

// Limits of a Registry.
const (
	// MaxMembers is the default of Options.Limit.
	MaxMembers = 1_000_000
	// decideLimit is the time limit of an operator's decision.
	decideLimit = 5 * time.Second
	// peerLimit is how long a node that starts without the database waits for the answers
	// of other nodes.
	peerLimit = 2 * time.Second
	// maxDetached is how many decisions may continue after their caller has left.
	maxDetached = 1024
)

// JoinLimit is how long an OTA check waits until its device is a member.
var JoinLimit = timescale.Patience(250 * time.Millisecond)

// Observer receives changes in order, once they are in force. Its methods are called with
// a lock held: they must not block, do I/O, or make decisions.
type Observer interface {
	// Changed is called for each change.
	OnChange(c devices.Change)
	// OnReplace is called after everything was read again; any part may differ.
	OnReplace(s Snapshot)
	// OnRevocation is called for a revocation that is in force but not in the log yet.
	OnRevocation(p Revocation)
	// OnRow is called with a requested row, as of the changes so far.
	OnRow(row devices.Row)
}

// Options of a Registry. All but Peers, Limit and Dir are required.
type Options struct {
	Ledger   Ledger
	Records  Records
	Peers    Peers // nil: there are no other nodes
	Observer Observer
	Node     string
	Dir      string   // directory of the snapshot; empty: none is kept
	Fleet    string   // fingerprint of the secret: a snapshot of another fleet is not used
	Key      [16]byte // of the roster's hashes, derived from the secret
	Limit    int      // maximum number of members; 0: MaxMembers
	// OnRotation is called with the fleet's rotation before it is in force here, by one
	// goroutine at a time. fresh: other nodes may not have it yet. It must not block.
	OnRotation func(rotation devices.Rotation, fresh bool)
	// OnRestored is called with the lineage after the registry was read again because the history of the database went
	// backwards. May be nil. It must not block.
	OnRestored func(lineage string)
	Log        *slog.Logger
}

// Registry holds the members of the fleet. It is safe for concurrent use.
type Registry struct {
	opt  Options
	key  sipKey
	file *file
	rows rows

	ready  atomic.Bool // it can answer questions about devices
	roster atomic.Pointer[roster]

	reading    sync.Mutex    // one reader of the log at a time
	incomplete bool          // of reading: the state was written by an older version, which ignored what it did not know
	gap        chan struct{} // signals run

	follow   sync.Mutex
	at       devices.Position
	ahead    map[int64]devices.Change // changes that arrived before their turn
	recent   recent
	maxHint  int64         // the highest revision of a hint
	diverged bool          // a change contradicts those in force
	advanced chan struct{} // closed when at changes

	mu         sync.RWMutex
	exceptions map[devices.ID]devices.Exception
	rotation   devices.Rotation
	keys       map[string]access.Key
	policy     access.Policy
	clientKey  devices.ClientKey
	revokes    map[string]Revocation // not in the database yet, by id

	revokeFile sync.Mutex

	detached chan struct{} // a slot for each decision that may outlast its caller
	ctx      context.Context
	stop     context.CancelFunc
	tasks    sync.WaitGroup

	Stats Stats
}

// Stats are counters that may be read at any time.
type Stats struct {
	Applied   atomic.Uint64 // changes
	Reads     atomic.Uint64 // of the log, for changes that no hint delivered
	Snapshots atomic.Uint64 // of the whole registry, read from the database
	Restored  atomic.Uint64 // how often the history went backwards
	FullJoins atomic.Uint64 // devices that could not join because the fleet is full
	LateJoins atomic.Uint64 // devices that could not join within JoinLimit
}

// New returns an empty Registry. It reads the fleet after Start.
func New(opt Options) *Registry {
	if opt.Limit <= 0 {
		opt.Limit = MaxMembers
	}
	r := &Registry{opt: opt, key: newSipKey(opt.Key), gap: make(chan struct{}, 1), detached: make(chan struct{}, maxDetached), ahead: map[int64]devices.Change{}, advanced: make(chan struct{}),
		exceptions: map[devices.ID]devices.Exception{}, keys: map[string]access.Key{}, revokes: map[string]Revocation{}}
	r.roster.Store(newRoster(r.key))
	r.file = newFile(opt.Dir, opt.Fleet, opt.Log)
	r.ctx, r.stop = context.WithCancel(context.Background())
	r.rows.init(r)
	return r
}

// Start loads the node's snapshot, and the changes since from the database, or else from
// other nodes. If neither is possible, the Registry stays empty, refuses all devices, and
// becomes ready with the first successful Refresh. The error is never one of the
// database.
func (r *Registry) Start(ctx context.Context) error {
	r.opt.Ledger.OnLateChanges(r.publish)
	r.loadRevocations()
	saved, err := r.file.load(r.key)
	if err != nil {
		r.opt.Log.Warn("the node's snapshot of the registry is not used; the registry is read from the database", "error", err)
	}
	if saved != nil {
		r.replace(saved.roster, saved.Snapshot, saved.changes, false)
		r.incomplete = saved.incomplete
	}
	r.tasks.Go(func() { r.file.run(r.ctx, r.save) })
	r.tasks.Go(r.run)
	r.tasks.Go(r.rows.run)
	err = r.Refresh(ctx)
	switch {
	case err == nil:
	case !errors.Is(err, devices.ErrDatabase):
		return err
	case saved != nil && r.catchUpFromPeers(ctx):
		r.admitBySnapshot()
	case saved != nil:
		r.opt.Log.Warn("the database does not answer, and this node's snapshot is older than that of other nodes, which cannot complete it; no device is admitted", "revision", r.Position().Revision)
		r.tasks.Go(r.retryPeers)
	default:
		r.opt.Log.Warn("the database does not answer and this node has no snapshot; no device is admitted")
	}
	return nil
}

// admitBySnapshot makes the registry ready without the database.
func (r *Registry) admitBySnapshot() {
	if !r.ready.Swap(true) {
		r.opt.Log.Warn("the database does not answer; devices are admitted based on this node's snapshot", "revision", r.Position().Revision, "members", r.Members())
	}
}

// retryPeers queries other nodes until they complete this node's state, or the database
// did.
func (r *Registry) retryPeers() {
	for !r.Ready() {
		if !clock.Sleep(r.ctx, peerLimit) {
			return
		}
		if r.catchUpFromPeers(r.ctx) {
			r.admitBySnapshot()
		}
	}
}

// Close writes pending data and ends the tasks.
func (r *Registry) Close() {
	r.stop()
	r.tasks.Wait()
}

// Ready reports whether the node has the members of the fleet.
func (r *Registry) Ready() bool { return r.ready.Load() }

// CheckReady returns an error unless the registry is ready.
func (r *Registry) CheckReady() error {
	if r.ready.Load() {
		return nil
	}
	return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "this node has neither the database nor a snapshot of the fleet's devices yet; try again"}
}

// CheckKnown returns an error unless the registry is ready and knows the device.
func (r *Registry) CheckKnown(id devices.ID) error {
	if err := r.CheckReady(); err != nil {
		return err
	}
	if !r.Status(id, "").Known {
		return UnknownDevice(id)
	}
	return nil
}

// Members returns the number of known devices.
func (r *Registry) Members() int { return int(r.roster.Load().n.Load()) }

// Limit returns the maximum number of known devices.
func (r *Registry) Limit() int { return r.opt.Limit }

// Position returns the position of the last change in force here.
func (r *Registry) Position() devices.Position {
	r.follow.Lock()
	defer r.follow.Unlock()
	return r.at
}

// Status is the roster's state of a device.
type Status struct {
	Known   bool
	Revoked bool
	Prefer  devices.Transport
	// Client compares the given Client-Id with the admitted one.
	Client ClientMatch
}

// ClientMatch is the comparison of a Client-Id with the admitted one.
type ClientMatch uint8

// Matches.
const (
	ClientNone  ClientMatch = iota // no client is admitted yet: the first one will be
	ClientSame                     // it is the admitted one, or both are empty
	ClientOther                    // another client is admitted
)

// Member reports whether the device is admitted.
func (s Status) Member() bool { return s.Known && !s.Revoked }

// Admits reports whether the given client is the admitted one of a member.
func (s Status) Admits() bool { return s.Member() && s.Client == ClientSame }

// Status returns the status of a device and of this client.
func (r *Registry) Status(id devices.ID, clientID string) Status {
	all := r.roster.Load()
	rec, found := all.get(id)
	s := Status{Known: found, Revoked: rec.flags&flagRevoked != 0 || r.revocationOf(id), Prefer: rec.prefer()}
	switch rec.client {
	case all.client(id, clientID):
		s.Client = ClientSame
	case 0:
	default:
		s.Client = ClientOther
	}
	return s
}

// Client returns how a Client-Id is shown: its hash under the fleet's key.
func (r *Registry) Client(clientID string) string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.clientKey.Hash(clientID)
}

// Refused returns the refused clients of a device, also of an unknown device.
func (r *Registry) Refused(id devices.ID) devices.Refused {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.exceptions[id].Refused
}

// Generations returns the generations of a device's credentials, also of an unknown device.
func (r *Registry) Generations(id devices.ID) devices.Generations {
	r.mu.RLock()
	s := devices.GenerationsOf(r.exceptions[id])
	r.mu.RUnlock()
	s.Revoked = s.Revoked || r.revocationOf(id)
	return s
}

// Rotation returns the rotation of the fleet.
func (r *Registry) Rotation() devices.Rotation {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.rotation
}

// Exceptions returns the number of devices with credentials of their own generation.
func (r *Registry) Exceptions() int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return len(r.exceptions)
}

// Recent returns the changes after a position that are in memory; ok is false if some are
// not.
func (r *Registry) Recent(after devices.Position) (list []devices.Change, ok bool) {
	r.follow.Lock()
	defer r.follow.Unlock()
	switch {
	case after.Lineage != r.at.Lineage || !r.ready.Load():
		return nil, false
	case after == r.at:
		return nil, true
	}
	return r.recent.after(after)
}
