package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/registry"
	"fleetd/internal/selector"
)

// PermitCatalog tells why the caller may not read a tool list by its hash; nil
// if it may. A key for some devices reads the lists that those have.
func (s *Service) PermitCatalog(ctx context.Context, by access.By, h devices.Hash) error {
	if err := s.Permit(ctx, by, access.ScopeRead, ""); err != nil || !by.Who.Limited() {
		return err
	}
	lists, err := s.ports.Records.CatalogsOf(ctx, by.Who.Devices)
	if err != nil {
		return err
	}
	for _, list := range lists {
		if list.Catalog == h {
			return nil
		}
	}
	return dispatch.Refused(&access.Refusal{Rule: access.RuleDevices, Detail: fmt.Sprintf("none of the devices with %s has this tool list", by.Who.Devices)})
}

// KeyWish is what a new key shall be.
type KeyWish struct {
	Name    string
	Scopes  access.Scopes
	Devices selector.Selector // without an Identity error
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
	if err := s.Permit(ctx, by, access.ScopeAdmin, ""); err != nil {
		return access.Key{}, "", err
	}
	now := time.Now()
	if old, ok := s.Keys().Find(wish.Name, now); ok && old.Name == wish.Name && old.Ended(now) == nil {
		return access.Key{}, "", devices.Errorf(devices.CodeBadRequest, "there is a key named %q; revoke it, or choose another name", wish.Name)
	}
	k, token, err := access.NewKey(wish.Name, wish.Scopes, wish.Devices, wish.Tools, now, wish.Expires)
	if err != nil {
		return access.Key{}, "", devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	return k, token, s.registry.SaveKey(ctx, by.Key(), k)
}

// RevokeKey ends a key, given by id or name, at once and on all nodes. While the
// database is away it is in force on the nodes that the answer names, and written
// when that is back.
func (s *Service) RevokeKey(ctx context.Context, by access.By, name string) (access.Key, registry.Revoked, error) {
	k, r, err := s.revokeKey(ctx, by, name)
	s.auditChange(by, audit.KindKey, "revoke", "", strings.TrimSpace(k.ID+" "+name), err)
	return k, r, err
}

func (s *Service) revokeKey(ctx context.Context, by access.By, name string) (access.Key, registry.Revoked, error) {
	recorded := registry.Revoked{Recorded: true}
	if err := s.Permit(ctx, by, access.ScopeAdmin, ""); err != nil {
		return access.Key{}, recorded, err
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	k, ok := s.Keys().Find(name, now)
	if !ok {
		return access.Key{}, recorded, devices.Errorf(devices.CodeNotFound, "there is no key %q", name)
	}
	if !k.Revoked.IsZero() && !s.registry.Waits(k.ID) {
		return k, recorded, nil
	}
	k.Revoked = now
	r, err := s.registry.EndKey(ctx, by.Key(), k)
	return k, r, err
}

// learnKey takes over what another node, the database or this node's notes know
// of a key.
func (s *Service) learnKey(k access.Key) {
	if _, err := s.Keys().Put(k, time.Now()); err != nil {
		s.log.Warn("an API key cannot be used", "id", k.ID, "error", err)
	}
}

// MaxUnmatched bounds the globs that UnmatchedTools names.
const MaxUnmatched = 20

// UnmatchedTools are the globs of a policy that match no tool of any list that
// this node has in memory, each with its place: most often a spelling mistake.
// It returns nil while the node has no list.
func (s *Service) UnmatchedTools(p access.Policy) (unmatched []string) {
	names := s.ToolNames()
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
	if err := s.Permit(ctx, by, access.ScopeAdmin, ""); err != nil {
		return access.Policy{}, err
	}
	if s.cfg.PolicyFixed {
		return access.Policy{}, devices.Errorf(devices.CodeForbidden, "the policy of this fleet is a file (--policy-file); change that")
	}
	if now := s.Guard().Policy().Version; base != now {
		return access.Policy{}, devices.Errorf(devices.CodeBadRequest, "the policy is at version %d, not %d: read it again and make your change there", now, base)
	}
	p.Warnings = nil
	p.Version, p.Changed, p.By = base+1, time.Now().UTC().Truncate(time.Microsecond), by.Name()+" ("+by.Key()+")"
	guard, err := access.Compile(p)
	if err != nil {
		return access.Policy{}, devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	switch err := s.registry.SavePolicy(ctx, by.Key(), p); {
	case errors.Is(err, devices.ErrConflict):
		return access.Policy{}, devices.Errorf(devices.CodeBadRequest, "another version %d was written at the same time: read it and make your change there", p.Version)
	case err != nil:
		return access.Policy{}, err
	}
	s.installPolicy(guard) // it is in force by now, unless this node lags behind
	return p, nil
}

// UsePolicy brings the policy of a file into force, whatever its version.
func (s *Service) UsePolicy(g *access.Guard) {
	s.ReplaceGuard(g)
	s.log.Info("policy in force", "rules", len(g.Policy().Rules))
}

// installPolicy brings a newer version into force.
func (s *Service) installPolicy(g *access.Guard) {
	if !s.cfg.PolicyFixed && s.InstallGuard(g) {
		s.log.Info("policy in force", "version", g.Policy().Version, "rules", len(g.Policy().Rules), "by", g.Policy().By)
	}
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

// replacePolicy brings the policy of a whole reading of the registry into force,
// which may be an older one than that before.
func (s *Service) replacePolicy(p access.Policy) {
	if s.cfg.PolicyFixed {
		return
	}
	guard, err := access.Compile(p)
	if err != nil {
		s.log.Error("the stored policy cannot be used; no call is allowed until another is set", "version", p.Version, "error", err)
		return
	}
	s.ReplaceGuard(guard)
}
