package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/timescale"
)

// Limits of a Registry.
const (
	// MaxMembers is the default of Options.Limit.
	MaxMembers = 1_000_000
	// decideLimit is how long an operator waits for a decision.
	decideLimit = 5 * time.Second
	// peerLimit is how long a node that starts without the database waits for what
	// other nodes know.
	peerLimit = 2 * time.Second
	// maxLate bounds the decisions that go on when their caller has left.
	maxLate = 1024
)

// JoinLimit is how long an OTA check waits for its device to become a member.
var JoinLimit = timescale.Patience(250 * time.Millisecond)

// Observer receives changes in their order, once they are in force. It is called
// with a lock held, so it must neither wait nor do I/O, nor call the Registry's
// decisions.
type Observer interface {
	// Changed is called for each change.
	Changed(c devices.Change)
	// Replaced is called when everything was read anew and any of it may differ.
	Replaced(s Snapshot)
	// Revoked is called for a revocation that is in force and not written yet.
	Revoked(p Revocation)
	// Row is called with a row that was asked for, as of the changes before.
	Row(row devices.Row)
}

// Options of a Registry. All but Peers, Limit and Dir are required.
type Options struct {
	Ledger   Ledger
	Records  Records
	Peers    Peers // nil: there is no other node
	Observer Observer
	Node     string
	Dir      string   // where the snapshot is kept; empty: nowhere
	Fleet    string   // fingerprint of the secret: the snapshot of another fleet is not used
	Key      [16]byte // of the roster's hashes, from the secret
	Limit    int      // members at most; 0: MaxMembers
	// OnRotation is called with the fleet's rotation before it is in force here, by one
	// goroutine at a time; fresh: other nodes may not know it yet. It must not block.
	OnRotation func(rotation devices.Rotation, fresh bool)
	Log        *slog.Logger
}

// Registry knows who the devices are. It is safe for concurrent use.
type Registry struct {
	opt  Options
	key  sipKey
	file *file
	rows rows

	ready  atomic.Bool // it may judge
	roster atomic.Pointer[roster]

	reading sync.Mutex // one reader of the log at a time
	kick    chan struct{}

	follow  sync.Mutex
	at      devices.Position
	ahead   map[int64]devices.Change // that came before their turn
	recent  recent
	heard   int64         // the highest revision of a hint
	suspect bool          // a change came that contradicts what is in force
	moved   chan struct{} // closed when at moves

	mu         sync.RWMutex
	exceptions map[devices.ID]devices.Exception
	rotation   devices.Rotation
	keys       map[string]access.Key
	policy     access.Policy
	revokes    map[string]Revocation // not written yet, by id

	revokeFile sync.Mutex

	late  chan struct{} // a place for each decision that may outlast its caller
	ctx   context.Context
	stop  context.CancelFunc
	tasks sync.WaitGroup

	Stats Stats
}

// Stats are counters, to be read at any time.
type Stats struct {
	Applied   atomic.Uint64 // changes
	Reads     atomic.Uint64 // of the log, for what no hint brought
	Snapshots atomic.Uint64 // of the whole registry, read from the database
	Restored  atomic.Uint64 // times that the history went backwards
	FullJoins atomic.Uint64 // devices that could not join since the fleet is full
	LateJoins atomic.Uint64 // devices that could not join in JoinLimit
}

// New returns a Registry that knows nobody; Start makes it read.
func New(opt Options) *Registry {
	if opt.Limit <= 0 {
		opt.Limit = MaxMembers
	}
	r := &Registry{opt: opt, key: newSipKey(opt.Key), kick: make(chan struct{}, 1), late: make(chan struct{}, maxLate), ahead: map[int64]devices.Change{}, moved: make(chan struct{}),
		exceptions: map[devices.ID]devices.Exception{}, keys: map[string]access.Key{}, revokes: map[string]Revocation{}}
	r.roster.Store(newRoster(r.key))
	r.file = newFile(opt.Dir, opt.Fleet, opt.Log)
	r.ctx, r.stop = context.WithCancel(context.Background())
	r.rows.init(r)
	return r
}

// Start reads what the node knew when it stopped, and what was decided since:
// from the database, else from other nodes. Without either the Registry stays as
// it is, judges nobody, and becomes ready with the first Refresh that reads the
// database. An error is none of the database's.
func (r *Registry) Start(ctx context.Context) error {
	r.opt.Ledger.Late(r.tell)
	r.loadRevocations()
	saved, err := r.file.load(r.key)
	if err != nil {
		r.opt.Log.Warn("the node's snapshot of the registry is not used; the database has everything", "error", err)
	}
	if saved != nil {
		r.replace(saved.roster, saved.Snapshot, saved.changes, false)
	}
	r.tasks.Go(func() { r.file.run(r.ctx, r.save) })
	r.tasks.Go(r.run)
	r.tasks.Go(r.rows.run)
	err = r.Refresh(ctx)
	switch {
	case err == nil:
	case !errors.Is(err, devices.ErrDatabase):
		return err
	case saved != nil && r.askPeers(ctx):
		r.goBySnapshot()
	case saved != nil:
		r.opt.Log.Warn("the database does not answer, and other nodes know more than this node's snapshot and cannot complete it; nobody is admitted", "revision", r.Position().Revision)
		r.tasks.Go(r.askAgain)
	default:
		r.opt.Log.Warn("the database does not answer and this node has no snapshot; nobody is admitted")
	}
	return nil
}

// goBySnapshot admits devices without the database.
func (r *Registry) goBySnapshot() {
	if !r.ready.Swap(true) {
		r.opt.Log.Warn("the database does not answer; devices are admitted by this node's snapshot", "revision", r.Position().Revision, "members", r.Members())
	}
}

// askAgain asks other nodes until they complete what this node knows, or the
// database did.
func (r *Registry) askAgain() {
	for !r.Ready() {
		select {
		case <-r.ctx.Done():
			return
		case <-time.After(peerLimit):
		}
		if r.askPeers(r.ctx) {
			r.goBySnapshot()
		}
	}
}

// Close writes what waits to be written and ends the tasks.
func (r *Registry) Close() {
	r.stop()
	r.tasks.Wait()
}

// Ready tells whether the node knows who its members are.
func (r *Registry) Ready() bool { return r.ready.Load() }

// Judge is why nobody can be judged yet, nil if the registry is ready.
func (r *Registry) Judge() error {
	if r.ready.Load() {
		return nil
	}
	return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "this node has neither the database nor a snapshot of the fleet's devices yet; try again"}
}

// Members is how many devices are known.
func (r *Registry) Members() int { return int(r.roster.Load().n.Load()) }

// Limit is how many devices may be known.
func (r *Registry) Limit() int { return r.opt.Limit }

// Position is the place in the log up to which changes are in force here.
func (r *Registry) Position() devices.Position {
	r.follow.Lock()
	defer r.follow.Unlock()
	return r.at
}

// Standing is what the roster knows of a device.
type Standing struct {
	Known   bool
	Revoked bool
	Prefer  devices.Transport
	// Client is how the Client-Id that was asked about compares with the admitted
	// one.
	Client ClientMatch
}

// ClientMatch compares a Client-Id with the admitted one.
type ClientMatch uint8

// Matches.
const (
	ClientNone  ClientMatch = iota // none is admitted yet: the first that comes will be
	ClientSame                     // it is the admitted one, or neither is given
	ClientOther                    // another is admitted
)

// Member tells whether the device is admitted.
func (s Standing) Member() bool { return s.Known && !s.Revoked }

// Admits tells whether the client that was asked about is the admitted one.
func (s Standing) Admits() bool { return s.Member() && s.Client == ClientSame }

// Standing tells what is known of a device, and of this client.
func (r *Registry) Standing(id devices.ID, clientID string) Standing {
	all := r.roster.Load()
	rec, known := all.get(id)
	s := Standing{Known: known, Revoked: rec.flags&flagRevoked != 0 || r.revocationOf(id), Prefer: rec.prefer()}
	switch rec.client {
	case all.client(id, clientID):
		s.Client = ClientSame
	case 0:
	default:
		s.Client = ClientOther
	}
	return s
}

// Secrets are the generations of a device's credentials, known here or not.
func (r *Registry) Secrets(id devices.ID) devices.Secrets {
	r.mu.RLock()
	s := devices.SecretsOf(r.exceptions[id])
	r.mu.RUnlock()
	s.Revoked = s.Revoked || r.revocationOf(id)
	return s
}

// Rotation is that of the whole fleet.
func (r *Registry) Rotation() devices.Rotation {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.rotation
}

// Exceptions is how many devices have credentials of their own generation.
func (r *Registry) Exceptions() int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return len(r.exceptions)
}

// Recent returns the changes after a position that are still in memory; ok is
// false if some are not.
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

func (r *Registry) wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, err)
}
