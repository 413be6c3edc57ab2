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
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devices/registry"
	"fleetd/internal/jsonspan"
	"fleetd/internal/selector"
)

// PermitCatalog returns an error if the caller may not read a tool list by its hash. A
// key that is limited to devices may read the lists of these devices.
func (s *Service) PermitCatalog(ctx context.Context, principal access.Principal, h devices.Hash) error {
	if err := s.Permit(ctx, principal, access.ScopeRead, ""); err != nil || !principal.Caller.Limited() {
		return err
	}
	lists, err := s.ports.Records.CatalogsOf(ctx, principal.Caller.Devices)
	if err != nil {
		return err
	}
	for _, list := range lists {
		if list.Catalog == h {
			return nil
		}
	}
	return dispatch.RefusalError(&access.Refusal{Rule: access.RuleDevices, Detail: fmt.Sprintf("no device that the key covers (%s) has this tool list", principal.Caller.Devices)})
}

// PermitEvent returns an error if the caller may not see a stored event: one of a device as of
// Permit. Events of webhooks are for the key that created the webhook, and for administrators. A caller that is limited to devices or tools sees events of its own jobs and their tasks alone, and of those of its children. What the caller may not read of
// the event is taken out of it: the question of a photo without the scope of photos.
func (s *Service) PermitEvent(ctx context.Context, principal access.Principal, e *devices.StreamEvent) error {
	if e.Kind.HasOwner() && principal.Caller.OwnJobsOnly() && !principal.Owns(e.Owner) {
		return dispatch.RefusalError(&access.Refusal{Rule: access.RuleDevices, Detail: "the job is not one of this key or grant"})
	}
	if _, ok := e.Kind.OfWebhook(); ok && !principal.Owns(e.Owner) && !principal.Caller.Scopes.Has(access.ScopeAdmin) {
		return dispatch.RefusalError(&access.Refusal{Rule: access.RuleDevices, Detail: "another key created the webhook"})
	}
	if err := s.Permit(ctx, principal, access.ScopeEvents, e.Device); err != nil {
		return err
	}
	if e.Kind == devices.EventPhoto && principal.Permit(access.ScopePhotos, "", nil) != nil {
		e.Data = jsonspan.Without(e.Data, "question")
	}
	return nil
}

// AuditPermit returns a function that reports whether the caller may see an entry of the audit. A key with the scope audit:read sees
// calls, messages and changes of devices, as far as its devices and tools go; administrators see everything. The function fails if
// the labels of a device cannot be read. It judges each device once, and is for one goroutine.
func (s *Service) AuditPermit(ctx context.Context, principal access.Principal) func(e *audit.Line) (bool, error) {
	who := principal.Caller
	if who == nil || who.Scopes.Has(access.ScopeAdmin) {
		return func(*audit.Line) (bool, error) { return who != nil, nil }
	}
	judged := map[string]bool{}
	return func(e *audit.Line) (bool, error) {
		switch {
		case e.Kind != audit.KindCall && e.Kind != audit.KindMessage && e.Kind != audit.KindDevice:
			return false, nil
		case e.Kind == audit.KindCall && !access.MatchAny(who.Tools, e.Action), e.Device == "" && !who.Devices.IsZero():
			return false, nil
		}
		may, known := judged[e.Device]
		if !known {
			err := s.Permit(ctx, principal, access.ScopeAudit, devices.ID(e.Device))
			if code := devices.CodeOf(err); err != nil && code != devices.CodeForbidden && code != devices.CodeUnauthorized && code != devices.CodeDeviceUnknown {
				return false, err
			}
			may = err == nil
			judged[e.Device] = may
		}
		return may, nil
	}
}

// NewKeyParams are the properties of a new API key.
type NewKeyParams struct {
	Name    string
	Scopes  access.Scopes
	Devices selector.Selector // without an Identity error
	Tools   []string
	Expires time.Time // zero: the key does not expire
}

// CreateKey creates an API key. It returns the token, which cannot be shown again. The
// key is in the database before CreateKey returns.
func (s *Service) CreateKey(ctx context.Context, principal access.Principal, params NewKeyParams) (access.Key, string, error) {
	k, token, err := s.createKey(ctx, principal, params)
	s.auditChange(principal, audit.KindKey, "create", "", strings.TrimSpace(k.ID+" "+params.Name), err)
	return k, token, err
}

func (s *Service) createKey(ctx context.Context, principal access.Principal, params NewKeyParams) (access.Key, string, error) {
	if err := s.Permit(ctx, principal, access.ScopeAdmin, ""); err != nil {
		return access.Key{}, "", err
	}
	now := clock.Now()
	if old, ok := s.Keys().Find(params.Name, now); ok && old.Name == params.Name && old.EndedError(now) == nil {
		return access.Key{}, "", devices.Errorf(devices.CodeBadRequest, "a key named %q exists already; revoke it, or choose another name", params.Name)
	}
	k, token, err := access.NewKey(params.Name, params.Scopes, params.Devices, params.Tools, now, params.Expires)
	if err != nil {
		return access.Key{}, "", devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	k.By = principal.Caller.Name
	return k, token, s.registry.SaveKey(ctx, principal.Key(), k)
}

// RevokeKey revokes a key, given by id or name, at once and on all nodes. While the
// database is unreachable it applies on the nodes in the result, and is written later.
func (s *Service) RevokeKey(ctx context.Context, principal access.Principal, name string) (access.Key, registry.RevokeResult, error) {
	k, r, err := s.revokeKey(ctx, principal, name)
	s.auditChange(principal, audit.KindKey, "revoke", "", strings.TrimSpace(k.ID+" "+name), err)
	return k, r, err
}

func (s *Service) revokeKey(ctx context.Context, principal access.Principal, name string) (access.Key, registry.RevokeResult, error) {
	if err := s.Permit(ctx, principal, access.ScopeAdmin, ""); err != nil {
		return access.Key{}, registry.RevokeResult{Recorded: true}, err
	}
	return s.endKey(ctx, principal, name)
}

// EndConsoleKey ends the key of the console with which the caller acts, as RevokeKey does: it is what logging out means.
func (s *Service) EndConsoleKey(ctx context.Context, principal access.Principal) (r registry.RevokeResult, err error) {
	id := principal.Caller.Through
	if id == "" {
		err = devices.Errorf(devices.CodeBadRequest, "only keys of the console end in this way; an administrator revokes others with DELETE /v1/keys/{key}")
	} else {
		_, r, err = s.endKey(ctx, principal, id)
	}
	s.auditChange(principal, audit.KindKey, "console_logout", "", id, err)
	return r, err
}

func (s *Service) endKey(ctx context.Context, principal access.Principal, name string) (access.Key, registry.RevokeResult, error) {
	recorded := registry.RevokeResult{Recorded: true}
	now := clock.Now().Truncate(time.Microsecond)
	k, ok := s.Keys().Find(name, now)
	if !ok {
		return access.Key{}, recorded, devices.Errorf(devices.CodeNotFound, "unknown key %q", name)
	}
	if !k.Revoked.IsZero() && !s.registry.IsKeyRevocationPending(k.ID) {
		return k, recorded, nil
	}
	k.Revoked = now
	r, err := s.registry.RevokeKey(ctx, principal.Key(), k)
	return k, r, err
}

// applyKey adds or updates a key that another node, the database or a file of this
// node contains.
func (s *Service) applyKey(k access.Key) {
	if _, err := s.Keys().Put(k, clock.Now()); err != nil {
		s.log.Warn("an API key is not valid", "id", k.ID, "error", err)
	}
}

// MaxUnmatched is how many globs UnmatchedTools returns at most.
const MaxUnmatched = 20

// UnmatchedTools returns the globs of a policy that match no tool of any list in this
// node's memory, each with its place in the policy: often a typing error. It returns
// nil while the node has no list.
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

// SetPolicy replaces the policy of the tool guard. base must be the current version.
func (s *Service) SetPolicy(ctx context.Context, principal access.Principal, p access.Policy, base int64) (access.Policy, error) {
	p, err := s.setPolicy(ctx, principal, p, base)
	s.auditChange(principal, audit.KindPolicy, "set", "", fmt.Sprintf("version %d", p.Version), err)
	return p, err
}

func (s *Service) setPolicy(ctx context.Context, principal access.Principal, p access.Policy, base int64) (access.Policy, error) {
	if err := s.Permit(ctx, principal, access.ScopeAdmin, ""); err != nil {
		return access.Policy{}, err
	}
	if s.cfg.PolicyFixed {
		return access.Policy{}, devices.Errorf(devices.CodeForbidden, "the policy of this fleet comes from --policy-file; change that file")
	}
	if now := s.Guard().Policy().Version; base != now {
		return access.Policy{}, devices.Errorf(devices.CodeStale, "the policy has version %d, not %d: read it again and repeat your change", now, base)
	}
	p.Warnings = nil
	p.Version, p.Changed, p.By = base+1, clock.Now().Truncate(time.Microsecond), principal.Name()+" ("+principal.Key()+")"
	guard, err := access.Compile(p)
	if err != nil {
		return access.Policy{}, devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	switch err := s.registry.SavePolicy(ctx, principal.Key(), p); {
	case errors.Is(err, devices.ErrConflict):
		return access.Policy{}, devices.Errorf(devices.CodeStale, "another version %d was written at the same time: read it and repeat your change", p.Version)
	case err != nil:
		return access.Policy{}, err
	}
	s.installPolicy(guard) // already in force, unless this node is late
	return p, nil
}

// UsePolicy replaces the policy by that of a file, whatever its version.
func (s *Service) UsePolicy(g *access.Guard) {
	s.ReplaceGuard(g)
	s.log.Info("policy in force", "rules", len(g.Policy().Rules))
}

// installPolicy applies a newer version of the policy.
func (s *Service) installPolicy(g *access.Guard) {
	if !s.cfg.PolicyFixed && s.InstallGuard(g) {
		s.log.Info("policy in force", "version", g.Policy().Version, "rules", len(g.Policy().Rules), "by", g.Policy().By)
	}
}

// applyPolicy applies a version that another node or the database contains.
func (s *Service) applyPolicy(p access.Policy) {
	guard, err := access.Compile(p)
	if err != nil {
		s.log.Error("a version of the policy is not valid; the previous one stays in force", "version", p.Version, "error", err)
		return
	}
	s.installPolicy(guard)
}

// replacePolicy applies the policy of a complete read of the registry, which may be
// older than the current one.
func (s *Service) replacePolicy(p access.Policy) {
	if s.cfg.PolicyFixed {
		return
	}
	guard, err := access.Compile(p)
	if err != nil {
		s.log.Error("the stored policy is not valid; calls are refused until another one is set", "version", p.Version, "error", err)
		return
	}
	s.ReplaceGuard(guard)
}
