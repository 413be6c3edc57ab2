package devices

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
)

// doors is what the node knows of keys and rules: all of it, in memory, so that
// nobody is judged by a database that may be away.
type doors struct {
	keys  *access.Registry
	guard atomic.Pointer[access.Guard]
	// known says that the operator's rules were read, if only that there are
	// none: before that nobody can tell what they forbid.
	known atomic.Bool

	mu      sync.Mutex
	unsaved map[string]access.Key // ended while the database was away
}

func newDoors() *doors {
	d := &doors{keys: access.NewRegistry(), unsaved: map[string]access.Key{}}
	d.guard.Store(access.DefaultGuard())
	return d
}

// Registry is where all keys of the fleet are.
func (s *Service) Registry() *access.Registry { return s.doors.keys }

// Guard is the policy in force.
func (s *Service) Guard() *access.Guard { return s.doors.guard.Load() }

// Permit tells why the caller may not do this to a device, or, with an empty
// id, at all; nil if it may. A device that is not known has no labels, so that
// a key for some devices learns nothing of which others there are.
func (s *Service) Permit(by access.By, scope access.Scope, id ID) error {
	var labels map[string]string
	if by.Who.Limited() {
		labels = s.labels(id)
	}
	if no := by.Permit(scope, string(id), labels); no != nil {
		return refused(no)
	}
	return nil
}

// PermitCatalog tells why the caller may not read a tool list by its hash; nil
// if it may. A key for some devices reads the lists that those have.
func (s *Service) PermitCatalog(by access.By, h Hash) error {
	if err := s.Permit(by, access.ScopeRead, ""); err != nil || !by.Who.Limited() {
		return err
	}
	found := false
	s.hub.each(func(e *entry) {
		if found || !by.Who.Devices.Matches(string(e.id), e.device.Load().Labels) {
			return
		}
		e.mu.Lock()
		found = e.catalog == h
		e.mu.Unlock()
	})
	if found {
		return nil
	}
	return refused(&access.Refusal{Rule: access.RuleDevices, Detail: fmt.Sprintf("none of the devices with %s has this tool list", by.Who.Devices)})
}

func (s *Service) labels(id ID) map[string]string {
	if id == "" {
		return nil
	}
	if e := s.hub.get(id); e != nil {
		return e.device.Load().Labels
	}
	return nil
}

// refused is a refusal of access as an error of the core.
func refused(no *access.Refusal) *Error {
	code := CodeForbidden
	if no.Tool {
		code = CodeToolDenied
	}
	return &Error{Code: code, Detail: no.Detail, Rule: no.Rule}
}

// KeyWish is what a new key shall be.
type KeyWish struct {
	Name    string
	Scopes  access.Scopes
	Devices access.Selector
	Tools   []string
	Expires time.Time // zero: never
}

// CreateKey makes a key and returns its token, which is shown this once. The
// key is in the database before anybody has it.
func (s *Service) CreateKey(ctx context.Context, by access.By, wish KeyWish) (access.Key, string, error) {
	k, token, err := s.createKey(ctx, by, wish)
	s.auditChange(by, audit.KindKey, "create", "", strings.TrimSpace(k.ID+" "+wish.Name), err)
	return k, token, err
}

func (s *Service) createKey(ctx context.Context, by access.By, wish KeyWish) (access.Key, string, error) {
	if err := s.Permit(by, access.ScopeAdmin, ""); err != nil {
		return access.Key{}, "", err
	}
	now := time.Now()
	if old, ok := s.doors.keys.Find(wish.Name, now); ok && old.Name == wish.Name && old.Ended(now) == nil {
		return access.Key{}, "", fail(CodeBadRequest, "there is a key named %q; revoke it, or choose another name", wish.Name)
	}
	k, token, err := access.NewKey(wish.Name, wish.Scopes, wish.Devices, wish.Tools, now, wish.Expires)
	if err != nil {
		return access.Key{}, "", fail(CodeBadRequest, "%v", err)
	}
	if err := s.ports.Warden.SaveKey(ctx, k); err != nil {
		return access.Key{}, "", err
	}
	if _, err := s.doors.keys.Put(k, now); err != nil {
		return access.Key{}, "", fail(CodeBadRequest, "%v", err)
	}
	s.ports.Directory.Tell(News{Key: &k})
	s.noted()
	return k, token, nil
}

// RevokeKey ends a key, given by id or name, at once and on all nodes. It takes
// effect whether the database answers or not; what could not be written is
// written when it does.
func (s *Service) RevokeKey(ctx context.Context, by access.By, name string) (access.Key, error) {
	k, err := s.revokeKey(ctx, by, name)
	s.auditChange(by, audit.KindKey, "revoke", "", strings.TrimSpace(k.ID+" "+name), err)
	return k, err
}

func (s *Service) revokeKey(ctx context.Context, by access.By, name string) (access.Key, error) {
	if err := s.Permit(by, access.ScopeAdmin, ""); err != nil {
		return access.Key{}, err
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	k, ok := s.doors.keys.Find(name, now)
	if !ok {
		return access.Key{}, fail(CodeNotFound, "there is no key %q", name)
	}
	if !k.Revoked.IsZero() {
		return k, nil
	}
	k.Revoked = now
	if _, err := s.doors.keys.Put(k, now); err != nil {
		return k, fmt.Errorf("revoke key %s: %w", k.ID, err)
	}
	s.ports.Directory.Tell(News{Key: &k})
	s.doors.mu.Lock()
	s.doors.unsaved[k.ID] = k
	s.doors.mu.Unlock()
	s.noted()
	if err := s.SettleKeys(ctx); err != nil {
		s.log.Warn("the end of a key is in force, and written when the database answers", "id", k.ID, "error", err)
	}
	return k, nil
}

// SettleKeys writes the ends of keys that the database has not taken yet.
func (s *Service) SettleKeys(ctx context.Context) error {
	s.doors.mu.Lock()
	var waiting []access.Key
	for _, k := range s.doors.unsaved {
		waiting = append(waiting, k)
	}
	s.doors.mu.Unlock()
	for _, k := range waiting {
		if err := s.ports.Warden.SaveKey(ctx, k); err != nil {
			return err
		}
		s.doors.mu.Lock()
		delete(s.doors.unsaved, k.ID)
		s.doors.mu.Unlock()
	}
	return nil
}

// learnKey takes over what another node, the database or this node's notes know
// of a key.
func (s *Service) learnKey(k access.Key) {
	if _, err := s.doors.keys.Put(k, time.Now()); err != nil {
		s.log.Warn("an API key cannot be used", "id", k.ID, "error", err)
	}
}

// ErrConflict means that somebody else changed a thing first.
var ErrConflict = errors.New("it was changed meanwhile")

// MaxUnmatched bounds the globs that UnmatchedTools names.
const MaxUnmatched = 20

// UnmatchedTools are the globs of a policy that match no tool of any list that
// this node has in memory, each with its place: most often a spelling mistake.
// It returns nil while the node has no list.
func (s *Service) UnmatchedTools(p access.Policy) (unmatched []string) {
	names := s.catalogs.toolNames()
	if len(names) == 0 {
		return nil
	}
	look := func(place string, globs []string) {
		for _, glob := range globs {
			matches := func(name string) bool { return access.Match(glob, name) }
			if len(unmatched) < MaxUnmatched && !slices.ContainsFunc(names, matches) {
				unmatched = append(unmatched, fmt.Sprintf("%s: no known tool matches %q", place, glob))
			}
		}
	}
	for _, r := range p.Rules {
		look(fmt.Sprintf("rule %q", r.Name), r.Tools)
	}
	for i, r := range p.Reads {
		look(fmt.Sprintf("reads %d", i+1), r.Tools)
	}
	for i, r := range p.URLs {
		look(fmt.Sprintf("urls %d", i+1), r.Tools)
	}
	look("audit_arguments", p.AuditArguments)
	return unmatched
}

// SetPolicy replaces the policy of the tool guard. base is the version that the
// writer has seen: if another came meanwhile, nothing changes.
func (s *Service) SetPolicy(ctx context.Context, by access.By, p access.Policy, base int64) (access.Policy, error) {
	p, err := s.setPolicy(ctx, by, p, base)
	s.auditChange(by, audit.KindPolicy, "set", "", fmt.Sprintf("version %d", p.Version), err)
	return p, err
}

func (s *Service) setPolicy(ctx context.Context, by access.By, p access.Policy, base int64) (access.Policy, error) {
	if err := s.Permit(by, access.ScopeAdmin, ""); err != nil {
		return access.Policy{}, err
	}
	if s.cfg.PolicyFixed {
		return access.Policy{}, fail(CodeForbidden, "the policy of this fleet is a file (--policy-file); change that")
	}
	if now := s.Guard().Policy().Version; base != now {
		return access.Policy{}, fail(CodeBadRequest, "the policy is at version %d, not %d: read it again and make your change there", now, base)
	}
	p.Warnings = nil
	p.Version, p.Changed, p.By = base+1, time.Now().UTC().Truncate(time.Microsecond), by.Name()+" ("+by.Key()+")"
	guard, err := access.Compile(p)
	if err != nil {
		return access.Policy{}, fail(CodeBadRequest, "%v", err)
	}
	switch err := s.ports.Warden.SavePolicy(ctx, p); {
	case errors.Is(err, ErrConflict):
		return access.Policy{}, fail(CodeBadRequest, "another version %d was written at the same time: read it and make your change there", p.Version)
	case err != nil:
		return access.Policy{}, err
	}
	s.installPolicy(guard)
	s.ports.Directory.Tell(News{Policy: &p})
	s.noted()
	return p, nil
}

// UsePolicy brings the policy of a file into force, whatever its version.
func (s *Service) UsePolicy(g *access.Guard) {
	s.doors.guard.Store(g)
	s.doors.known.Store(true)
	s.log.Info("policy in force", "rules", len(g.Policy().Rules))
}

// installPolicy brings a newer version into force.
func (s *Service) installPolicy(g *access.Guard) {
	s.doors.mu.Lock()
	defer s.doors.mu.Unlock()
	if s.cfg.PolicyFixed || g.Policy().Version <= s.doors.guard.Load().Policy().Version {
		return
	}
	s.doors.guard.Store(g)
	s.doors.known.Store(true)
	s.log.Info("policy in force", "version", g.Policy().Version, "rules", len(g.Policy().Rules), "by", g.Policy().By)
}

// learnPolicy takes over a version that was checked where it was written.
func (s *Service) learnPolicy(p access.Policy) {
	guard, err := access.Compile(p)
	if err != nil {
		s.log.Error("a version of the policy cannot be used; the one before stays in force", "version", p.Version, "error", err)
		return
	}
	s.installPolicy(guard)
}

// loadDoors reads keys and policy from the database.
func (s *Service) loadDoors(ctx context.Context) error {
	keys, err := s.ports.Warden.LoadKeys(ctx)
	if err != nil {
		return fmt.Errorf("load keys: %w", err)
	}
	for _, k := range keys {
		s.learnKey(k)
		// A key that ended here while the database was away, before a restart.
		if mine, ok := s.doors.keys.Find(k.ID, time.Now()); ok && k.Revoked.IsZero() && !mine.Revoked.IsZero() {
			s.doors.mu.Lock()
			s.doors.unsaved[k.ID] = mine
			s.doors.mu.Unlock()
		}
	}
	p, err := s.ports.Warden.LoadPolicy(ctx)
	if err != nil {
		return fmt.Errorf("load the policy: %w", err)
	}
	if p.Version > 0 {
		s.learnPolicy(p)
	} else {
		s.doors.known.Store(true)
	}
	return s.SettleKeys(ctx)
}

// Doors is what a node notes of keys and rules, for a start without a database.
type Doors struct {
	Keys   []access.Key  `json:"keys,omitempty"`
	Policy access.Policy `json:"policy"`
	Known  bool          `json:"known"` // the rules, if only that there are none
}

// Doors returns what RestoreDoors takes.
func (s *Service) Doors() Doors {
	return Doors{Keys: s.doors.keys.Keys(), Policy: s.Guard().Policy(), Known: s.doors.known.Load()}
}

// RestoreDoors takes the node's own notes. The database is read later, if it
// answers; what ended stays ended.
func (s *Service) RestoreDoors(d Doors) {
	for _, k := range d.Keys {
		s.learnKey(k)
	}
	switch {
	case !d.Known:
	case d.Policy.Version > 0:
		s.learnPolicy(d.Policy)
	default:
		s.doors.known.Store(true)
	}
}

// noted has the node write its notes.
func (s *Service) noted() {
	if s.cfg.Excepted != nil {
		s.cfg.Excepted()
	}
}

// auditChange records a change that somebody made, or tried to make.
func (s *Service) auditChange(by access.By, kind audit.Kind, action string, id ID, detail string, err error) {
	e := entryOf(time.Now(), by, kind, action, id)
	e.Detail, e.Outcome = detail, outcomeOK
	if err != nil {
		refusal := AsError(err)
		e.Outcome, e.Rule, e.Detail = string(refusal.Code), refusal.Rule, strings.TrimPrefix(detail+": "+refusal.Detail, ": ")
	}
	s.record(e)
}
