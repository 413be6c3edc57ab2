// Package registrytest contains a ledger in memory. Only tests import it.
package registrytest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// Ledger is a registry.Ledger in memory that several nodes of a test share. It can be
// unreachable, slow, or pruned, and its history can go backwards. It is safe for
// concurrent use.
type Ledger struct {
	mu        sync.Mutex
	away      bool
	delay     time.Duration
	lineage   string
	members   map[devices.ID]devices.Member
	rotation  devices.Rotation
	keys      map[string]access.Key
	codes     map[string]code // by hash
	grants    map[string]access.GrantUse
	policy    access.Policy
	clientKey devices.ClientKey
	log       []devices.Change
	kept      int // changes up to this index of the log are pruned
	late      []func([]devices.Change)
	// commitLate commits decisions whose caller has left.
	commitLate bool
}

type code struct {
	document []byte
	expires  time.Time
}

// New returns an empty Ledger.
func New() *Ledger {
	return &Ledger{lineage: "first", clientKey: "key", members: map[devices.ID]devices.Member{}, keys: map[string]access.Key{}, codes: map[string]code{}, grants: map[string]access.GrantUse{}}
}

func (l *Ledger) enter() (func(), error) {
	l.mu.Lock()
	if l.away {
		l.mu.Unlock()
		return nil, fmt.Errorf("%w: away", devices.ErrDatabase)
	}
	return l.mu.Unlock, nil
}

// SetAway makes all methods fail, or work again, like an unreachable database.
func (l *Ledger) SetAway(away bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.away = away
}

// SetDelay delays each decision.
func (l *Ledger) SetDelay(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = d
}

// SetLate delays each decision for longer than its caller waits, and commits it
// nevertheless.
func (l *Ledger) SetLate(delay time.Duration) {
	l.SetDelay(delay)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.commitLate = true
}

// OnLateChanges implements registry.Ledger.
func (l *Ledger) OnLateChanges(take func([]devices.Change)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.late = append(l.late, take)
}

// Prune removes the changes up to a revision.
func (l *Ledger) Prune(revision int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept = int(revision)
}

// Members returns all devices that have a state, including forgotten ones.
func (l *Ledger) Members() map[devices.ID]devices.Member {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.members)
}

// Member returns the state of one device.
func (l *Ledger) Member(id devices.ID) (m devices.Member, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, ok := l.members[id]
	return m, ok && m.Known()
}

// Exceptions returns the devices whose credentials do not have generation 0.
func (l *Ledger) Exceptions() (list []devices.Exception) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.members {
		if x, ok := m.Exception(); ok {
			list = append(list, x)
		}
	}
	return list
}

// Keys returns the API keys by id.
func (l *Ledger) Keys() map[string]access.Key {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.keys)
}

// Policy returns the latest policy.
func (l *Ledger) Policy() access.Policy {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.policy
}

// Rotation returns the rotation of the fleet.
func (l *Ledger) Rotation() devices.Rotation {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rotation
}

// Log returns the changes after a revision, including pruned ones.
func (l *Ledger) Log(after int64) []devices.Change {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.log[after:])
}

// Connected records that a device has connected, and therefore does not expire.
func (l *Ledger) Connected(id devices.ID) {
	l.update(id, func(m *devices.Member) { m.JoinTransport = devices.TransportNone })
}

// Reported sets the serial number that a device reported.
func (l *Ledger) Reported(id devices.ID, serial string) {
	l.update(id, func(m *devices.Member) { m.Serial = serial })
}

// update changes state of a known device that is not part of a decision.
func (l *Ledger) update(id devices.ID, change func(m *devices.Member)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m, ok := l.members[id]; ok && m.Known() {
		change(&m)
		l.members[id] = m
	}
}

// SetRotation replaces the rotation, whatever the current one: for example by one
// whose grace period has ended.
func (l *Ledger) SetRotation(next devices.Rotation) []devices.Change {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rotation = next
	return l.fleetLocked(devices.AspectRotation, fmt.Sprintf("rotation %d", next.Generation), "test", next)
}

// RestoreTo cuts the history at a revision, like a restored backup.
func (l *Ledger) RestoreTo(revision int64, lineage string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lineage = lineage
	log := l.log[:revision]
	l.log, l.members = nil, map[devices.ID]devices.Member{}
	for _, c := range log {
		l.log = append(l.log, c)
		if c.Device == "" {
			continue
		}
		m := l.members[c.Device]
		m.ID = c.Device
		if err := m.Fold(c); err != nil {
			panic(err)
		}
		l.members[c.Device] = m
	}
}

func (l *Ledger) addLocked(c devices.Change) devices.Change {
	c.Revision = int64(len(l.log)) + 1
	c.At = time.Now().UTC()
	l.log = append(l.log, c)
	return c
}

func (l *Ledger) wait(ctx context.Context) error {
	l.mu.Lock()
	delay := l.delay
	l.mu.Unlock()
	if delay == 0 {
		return nil
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Decide implements registry.Ledger.
func (l *Ledger) Decide(ctx context.Context, list []devices.Decision) ([]devices.Outcome, error) {
	if err := l.wait(ctx); err != nil {
		l.decideLate(list)
		return nil, err
	}
	leave, err := l.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	out := make([]devices.Outcome, len(list))
	for i, d := range list {
		out[i] = l.decideLocked(d)
	}
	return out, nil
}

// decideLate makes decisions whose caller has left.
func (l *Ledger) decideLate(list []devices.Decision) {
	l.mu.Lock()
	var changes []devices.Change
	takers := l.late
	if l.commitLate {
		for _, d := range list {
			changes = append(changes, l.decideLocked(d).Changes...)
		}
	}
	l.mu.Unlock()
	for _, take := range takers {
		take(changes)
	}
}

func (l *Ledger) decideLocked(d devices.Decision) (out devices.Outcome) {
	before, ok := l.members[d.Device]
	if !ok {
		before = devices.Member{ID: d.Device}
	}
	if d.Once && slices.ContainsFunc(l.log, func(c devices.Change) bool { return c.ID == d.ID }) {
		return devices.Outcome{Before: before, After: before}
	}
	after := before.Clone()
	if err := d.Make(&after, l.rotation); err != nil {
		return devices.Outcome{Err: err, Before: before, After: before}
	}
	folded := before.Clone()
	for j, c := range devices.ChangesOf(&before, &after, d.Import) {
		c.ID, c.Who = d.ID, d.Who
		if j > 0 {
			c.ID = fmt.Sprintf("%s.%d", d.ID, j)
		}
		c = l.addLocked(c)
		if err := folded.Fold(c); err != nil {
			panic(err)
		}
		out.Changes = append(out.Changes, c)
	}
	if folded.JoinTransport != after.JoinTransport && after.Known() { // a decision was made, but nothing else differs
		folded.JoinTransport = after.JoinTransport
	}
	if ok || len(out.Changes) > 0 {
		l.members[d.Device] = folded
	}
	out.Before, out.After = before, folded
	return out
}

func (l *Ledger) fleetLocked(aspect devices.Aspect, id, who string, v any) []devices.Change {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return []devices.Change{l.addLocked(devices.Change{ID: id, Aspect: aspect, Value: text, Who: who})}
}

// SaveKey implements registry.Ledger.
func (l *Ledger) SaveKey(_ context.Context, who, id string, k access.Key) ([]devices.Change, error) {
	leave, err := l.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	if old, ok := l.keys[k.ID]; ok && !old.Revoked.IsZero() {
		return nil, nil
	}
	l.keys[k.ID] = k
	return l.fleetLocked(devices.AspectKey, id, who, k), nil
}

// SaveCode implements fleet.Codes.
func (l *Ledger) SaveCode(_ context.Context, hash string, document []byte, expires time.Time) error {
	leave, err := l.enter()
	if err != nil {
		return err
	}
	defer leave()
	if _, ok := l.codes[hash]; ok {
		return devices.ErrConflict
	}
	l.codes[hash] = code{document, expires}
	return nil
}

// ReadCode implements fleet.Codes.
func (l *Ledger) ReadCode(_ context.Context, hash string, now time.Time) ([]byte, error) {
	return l.code(hash, now, false)
}

// TakeCode implements fleet.Codes.
func (l *Ledger) TakeCode(_ context.Context, hash string, now time.Time) ([]byte, error) {
	return l.code(hash, now, true)
}

func (l *Ledger) code(hash string, now time.Time, take bool) ([]byte, error) {
	leave, err := l.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	code, ok := l.codes[hash]
	if take {
		delete(l.codes, hash)
	}
	if !ok || !now.Before(code.expires) {
		return nil, devices.ErrNotFound
	}
	return code.document, nil
}

// SaveGrant implements fleet.Grants.
func (l *Ledger) SaveGrant(_ context.Context, use access.GrantUse) error {
	leave, err := l.enter()
	if err != nil {
		return err
	}
	defer leave()
	use.Rotated = use.Used
	l.grants[use.ID] = use
	return nil
}

// RotateGrant implements fleet.Grants.
func (l *Ledger) RotateGrant(_ context.Context, old string, next access.GrantUse) (access.GrantUse, bool, error) {
	leave, err := l.enter()
	if err != nil {
		return access.GrantUse{}, false, err
	}
	defer leave()
	use, ok := l.grants[next.ID]
	switch {
	case !ok:
		return use, false, devices.ErrNotFound
	case use.Refresh != old || next.Used.Sub(use.Used) >= access.GrantIdle:
		return use, false, nil
	}
	next.Previous, next.Rotated = old, next.Used
	l.grants[next.ID] = next
	return next, true, nil
}

// GrantUses implements fleet.Grants.
func (l *Ledger) GrantUses(context.Context) ([]access.GrantUse, error) {
	leave, err := l.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	return slices.Collect(maps.Values(l.grants)), nil
}

// SavePolicy implements registry.Ledger.
func (l *Ledger) SavePolicy(_ context.Context, who string, p access.Policy) ([]devices.Change, error) {
	leave, err := l.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	if p.Version <= l.policy.Version {
		return nil, devices.ErrConflict
	}
	l.policy = p
	return l.fleetLocked(devices.AspectPolicy, fmt.Sprintf("policy %d", p.Version), who, p), nil
}

// Rotate implements registry.Ledger.
func (l *Ledger) Rotate(_ context.Context, who string, decide func(devices.Rotation, int64) (devices.Rotation, error)) ([]devices.Change, error) {
	leave, err := l.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	var highest int64
	for _, m := range l.members {
		highest = max(highest, m.Generation)
	}
	next, err := decide(l.rotation, highest)
	if err != nil {
		return nil, err
	}
	l.rotation = next
	return l.fleetLocked(devices.AspectRotation, fmt.Sprintf("rotation %d", next.Generation), who, next), nil
}

// Head implements registry.Ledger.
func (l *Ledger) Head(context.Context) (devices.Position, error) {
	leave, err := l.enter()
	if err != nil {
		return devices.Position{}, err
	}
	defer leave()
	return l.headLocked(), nil
}

func (l *Ledger) headLocked() devices.Position {
	p := devices.Position{Lineage: l.lineage, Revision: int64(len(l.log))}
	if p.Revision > 0 {
		p.ID = l.log[p.Revision-1].ID
	}
	return p
}

// Changes implements registry.Ledger.
func (l *Ledger) Changes(_ context.Context, from int64, limit int) ([]devices.Change, error) {
	leave, err := l.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	if int(from) <= l.kept && l.kept > 0 {
		return nil, devices.ErrPruned
	}
	list := l.log[min(int(from)-1, len(l.log)):]
	return slices.Clone(list[:min(limit, len(list))]), nil
}

// Snapshot implements registry.Ledger.
func (l *Ledger) Snapshot(_ context.Context, member func(devices.Member)) (registry.Snapshot, error) {
	leave, err := l.enter()
	if err != nil {
		return registry.Snapshot{}, err
	}
	defer leave()
	s := registry.Snapshot{Position: l.headLocked(), Rotation: l.rotation, Policy: l.policy, ClientKey: l.clientKey}
	for _, m := range l.members {
		if m.Known() {
			member(m)
		}
		if x, ok := m.Exception(); ok {
			s.Exceptions = append(s.Exceptions, x)
		}
	}
	for _, k := range l.keys {
		s.Keys = append(s.Keys, k)
	}
	return s, nil
}

// Device returns the row of a member.
func Device(m devices.Member) devices.Device {
	return devices.Device{ID: m.ID, Admission: m.Admission, ClientID: m.ClientID, Name: m.Name, Labels: maps.Clone(m.Labels), Prefer: m.Prefer,
		FirstSeen: m.FirstSeen, Revision: m.Revision, Facts: devices.Facts{Serial: m.Serial}}
}

// Rows makes a Ledger the Records of a Registry, too.
func (l *Ledger) Rows(_ context.Context, ids []devices.ID) ([]devices.Row, error) {
	leave, err := l.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	var rows []devices.Row
	for _, id := range ids {
		if m, ok := l.members[id]; ok && m.Known() {
			rows = append(rows, devices.Row{Device: Device(m)})
		}
	}
	return rows, nil
}
