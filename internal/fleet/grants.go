package fleet

import (
	"context"
	"errors"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
)

// Grants stores how grants of applications are used. Errors wrap devices.ErrDatabase.
type Grants interface {
	// SaveGrant stores the first use of a new grant.
	SaveGrant(ctx context.Context, use access.GrantUse) error
	// RotateGrant replaces the refresh token of next.ID whose hash is old by that of next, and returns the use that is stored
	// afterwards. moved is false if old was not valid any more, or the grant unused for access.GrantIdle; devices.ErrNotFound means that there is no such grant.
	RotateGrant(ctx context.Context, old string, next access.GrantUse) (use access.GrantUse, moved bool, err error)
	// GrantUses returns the use of every grant.
	GrantUses(ctx context.Context) ([]access.GrantUse, error)
}

// catchUpLimit is how long a request waits for keys that its node may not know yet.
const catchUpLimit = 3 * time.Second

// Actions of grants in the audit log.
const (
	ActionConsentCode = "consent_code"
	ActionConsent     = "consent" // a person allowed an application, or was refused
	ActionGrant       = "grant"   // the application took its tokens
	ActionGrantEnd    = "grant_end"
)

// ErrConsentCode is the refusal of a wrong, used or expired consent code.
var ErrConsentCode = devices.Errorf(devices.CodeUnauthorized, "the code is not valid: it works once, within five minutes; `fleetd keys allow` prints another one")

// Consent says how far an application is allowed. No scopes means all that a grant of the caller may have.
type Consent struct {
	Scopes  access.Scopes
	Devices selector.Selector
	Tools   []string
}

// SaveConsentCode stores a code with which a person consents in place of the caller's key, once, on any node, until it expires.
func (s *Service) SaveConsentCode(ctx context.Context, principal access.Principal, most Consent, code string, expires time.Time) error {
	if most.Scopes == 0 && principal.Caller != nil {
		most.Scopes = principal.Caller.Scopes.Both(access.GrantScopes)
	}
	k, err := s.Keys().GrantKey(principal.Caller, access.Grant{}, most.Scopes, most.Devices, most.Tools, clock.Now())
	if err != nil {
		err = devices.Errorf(devices.CodeBadRequest, "%v", err)
	} else {
		err = s.saveCode(ctx, access.CodeConsent, code, k, expires)
	}
	s.auditChange(principal, audit.KindKey, ActionConsentCode, "", "", err)
	return err
}

// TakeConsentCode returns who consents with a code, with the rights that the code may give. A wrong, used or expired code is
// CodeUnauthorized.
func (s *Service) TakeConsentCode(ctx context.Context, code string) (*access.Caller, error) {
	var k access.Key
	err := s.takeCode(ctx, access.CodeConsent, code, &k)
	switch {
	case errors.Is(err, devices.ErrNotFound):
		return nil, ErrConsentCode
	case err != nil:
		return nil, err
	}
	if err := s.Keys().EndedError(k, clock.Now()); err != nil {
		return nil, devices.Errorf(devices.CodeUnauthorized, "%v: %q", err, k.Parent.Name)
	}
	return access.NewCaller(k.Parent.Key, k.Parent.Name, k.Scopes, k.Devices, k.Tools), nil
}

// Authorization is what an authorization code gives (RFC 6749, 4.1; RFC 7636).
type Authorization struct {
	Key       access.Key // of the grant, without id
	Redirect  string     // the redirect_uri of the request
	Challenge string     // the code_challenge, method S256
}

// Allow stores a code that TakeAuthorization exchanges for a grant of the caller to an application. A refusal is CodeBadRequest
// with a sentence for the person.
func (s *Service) Allow(ctx context.Context, principal access.Principal, g access.Grant, c Consent, a Authorization, code string, expires time.Time) error {
	k, err := s.Keys().GrantKey(principal.Caller, g, c.Scopes, c.Devices, c.Tools, clock.Now())
	if err != nil {
		err = devices.Errorf(devices.CodeBadRequest, "%v", err)
	} else {
		a.Key = k
		err = s.saveCode(ctx, access.CodeGrant, code, a, expires)
	}
	s.auditChange(principal, audit.KindKey, ActionConsent, "", g.Host, err)
	return err
}

// TakeAuthorization returns what a code gives, once; devices.ErrNotFound if it is wrong, used or has expired. An error of check is
// returned, and leaves the code as it is.
func (s *Service) TakeAuthorization(ctx context.Context, code string, check func(Authorization) error) (a Authorization, err error) {
	document, err := s.ports.Codes.ReadCode(ctx, access.HashCode(access.CodeGrant, code), clock.Now())
	if err != nil {
		return a, err
	}
	if err := decodeCode(document, &a); err != nil {
		return a, err
	}
	if err := check(a); err != nil {
		return a, err
	}
	return a, s.takeCode(ctx, access.CodeGrant, code, &a)
}

// IssueGrant adds a grant to the fleet. refresh is its first refresh token. The grant of the same key that was unused longest
// ends if there are MaxGrants.
func (s *Service) IssueGrant(ctx context.Context, who access.Principal, k access.Key, refresh func(id string) string) (access.Key, error) {
	now := clock.Now().Truncate(time.Microsecond)
	k, _, err := s.Keys().Issue(k, now)
	if err != nil {
		return k, devices.Errorf(devices.CodeUnauthorized, "%v", err)
	}
	if err := s.makeRoom(ctx, who, k.Parent.Key, now); err != nil {
		return k, err
	}
	err = s.ports.Grants.SaveGrant(ctx, access.GrantUse{ID: k.ID, Refresh: access.HashCode(access.CodeRefresh, refresh(k.ID)), Used: now, Address: who.From})
	if err == nil {
		err = s.registry.SaveKey(ctx, k.Parent.Key, k)
	}
	if caller, ok := s.Keys().Caller(k.ID); ok {
		who.Caller = caller
	}
	s.auditChange(who, audit.KindKey, ActionGrant, "", k.ID+" "+k.Grant.Host, err)
	return k, err
}

// makeRoom ends the grants of a parent that were unused longest, so that there is room for one more.
func (s *Service) makeRoom(ctx context.Context, who access.Principal, parent string, now time.Time) error {
	grants := s.Keys().Grants(parent, now)
	if len(grants) < access.MaxGrants {
		return nil
	}
	uses, err := s.GrantUses(ctx)
	if err != nil {
		return err
	}
	for ; len(grants) >= access.MaxGrants; grants = grants[1:] {
		for i := range grants {
			if uses[grants[i].ID].Used.Before(uses[grants[0].ID].Used) {
				grants[0], grants[i] = grants[i], grants[0]
			}
		}
		if err := s.EndGrant(ctx, who, grants[0].ID, "another one took its place"); err != nil {
			return err
		}
	}
	return nil
}

// RotateGrant is Grants.RotateGrant with the tokens in place of their hashes, at a time.
func (s *Service) RotateGrant(ctx context.Context, who access.Principal, id, old, next string, at time.Time) (use access.GrantUse, moved bool, err error) {
	hash := func(token string) string { return access.HashCode(access.CodeRefresh, token) }
	return s.ports.Grants.RotateGrant(ctx, hash(old), access.GrantUse{ID: id, Refresh: hash(next), Used: at.Truncate(time.Microsecond), Address: who.From})
}

// CatchUp reads the keys that this node has not heard of yet. It fails with CodeUnavailable while the database does not answer.
func (s *Service) CatchUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, catchUpLimit)
	defer cancel()
	if err := s.registry.Refresh(ctx); err != nil {
		return devices.Errorf(devices.CodeUnavailable, "this node cannot read whether that was allowed: %v", err)
	}
	return nil
}

// GrantUses returns the use of every grant by the id of its key.
func (s *Service) GrantUses(ctx context.Context) (map[string]access.GrantUse, error) {
	list, err := s.ports.Grants.GrantUses(ctx)
	uses := make(map[string]access.GrantUse, len(list))
	for _, use := range list {
		uses[use.ID] = use
	}
	return uses, err
}

// EndGrant ends a grant, as RevokeKey does. why is for the audit.
func (s *Service) EndGrant(ctx context.Context, who access.Principal, id, why string) error {
	if caller, ok := s.Keys().Caller(id); ok && who.Caller == nil {
		who.Caller = caller
	}
	k, _, err := s.endKey(ctx, who, id)
	detail := id + ": " + why
	if k.Grant != nil {
		detail = id + " " + k.Grant.Host + ": " + why
	}
	s.auditChange(who, audit.KindKey, ActionGrantEnd, "", detail, err)
	return err
}

// Once returns devices.ErrConflict if it was called with the same purpose and name before, on any node, and that call's expires
// has not passed.
func (s *Service) Once(ctx context.Context, purpose, name string, expires time.Time) error {
	return s.saveCode(ctx, purpose, name, nil, expires)
}
