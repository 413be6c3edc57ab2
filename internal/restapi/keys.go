package restapi

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

func (s *Server) newAPIKey(k access.Key, now time.Time) api.Key {
	out := api.Key{ID: k.ID, Name: k.Name, Scopes: k.Scopes.Names(), Devices: selectionOf(k.Devices), Tools: append([]string{}, k.Tools...), State: "valid",
		Created: api.At(k.Created), Expires: api.At(k.Expires), Revoked: api.At(k.Revoked), Parent: k.Parent.Key, CreatedBy: cmp.Or(k.By, k.Parent.Name)}
	if g := k.Grant; g != nil {
		out.Grant = &api.Grant{Host: g.Host, Name: g.Name, Registered: g.Registered, Resource: g.Resource}
	}
	switch s.opt.Service.Keys().EndedError(k, now) {
	case access.ErrExpired:
		out.State = "expired"
	case access.ErrRevoked:
		out.State = "revoked"
	}
	return out
}

type createKeyInput struct{ Body api.NewKey }

// KeyPath names a key.
type KeyPath struct {
	Key string `path:"key" doc:"Id or name of a key."`
}

type revokeKeyInput struct {
	KeyPath
	Match
}

func (s *Server) keyRoutes() {
	register(s, s.operation(http.MethodGet, "/v1/keys", about{id: "listKeys", scope: access.ScopeAdmin, tag: tagAccess, summary: "List API keys",
		answer: "A page, oldest first; those that have ended included."}), s.listKeys)
	register(s, s.operation(http.MethodPost, "/v1/keys", about{id: "createKey", scope: access.ScopeAdmin, tag: tagAccess, summary: "Make an API key",
		status: http.StatusCreated, answer: "The key with its token, which is shown this once.", codes: []devices.Code{devices.CodeTooLarge, devices.CodeUnavailable}}), s.createKey)
	register(s, s.operation(http.MethodGet, "/v1/keys/{key}", about{id: "getKey", scope: access.ScopeAdmin, tag: tagAccess, summary: "Show an API key",
		answer: "The key, without its token.", codes: []devices.Code{devices.CodeNotFound}}), s.getKey)
	registerRevoke(s, s.operation(http.MethodDelete, "/v1/keys/{key}", about{id: "revokeKey", scope: access.ScopeAdmin, tag: tagAccess, summary: "Revoke an API key",
		text:   "At once, on all nodes, whether the database answers or not. It stays in the list, because the audit log names it.",
		status: http.StatusNoContent, answer: "It is not valid any more.", codes: []devices.Code{devices.CodeNotFound, devices.CodeStale, devices.CodeUnavailable}}), s.revokeKey)
}

func (s *Server) listKeys(ctx context.Context, in *Page) (*answer[api.List[api.Key]], error) {
	p, err := s.page(ctx, *in)
	if err != nil {
		return nil, err
	}
	var keys []api.Key
	now := clock.Now()
	all := s.opt.Service.Keys().Keys()
	var uses map[string]access.GrantUse
	if slices.ContainsFunc(all, func(k access.Key) bool { return k.Grant != nil }) {
		uses = s.grantUses(ctx)
	}
	for _, k := range all {
		if !s.opt.Service.Keys().IsForgotten(k, now) && (k.Grant == nil || uses == nil || now.Sub(uses[k.ID].Used) < access.GrantIdle+access.KeepGrants) {
			keys = append(keys, addUse(s.newAPIKey(k, now), uses, now))
		}
	}
	list, err := fillPage(p, pieceLimit, inMemory(keys, func(k *api.Key) string { return fmt.Sprintf("%020d %s", k.Created.UnixMicro(), k.ID) }))
	return answerOf(list, err)
}

func (s *Server) createKey(ctx context.Context, in *createKeyInput) (*secret[api.CreatedKey], error) {
	scopes, err := access.ParseScopes(in.Body.Scopes)
	if err != nil {
		return nil, badRequest(err.Error())
	}
	params := fleet.NewKeyParams{Name: in.Body.Name, Scopes: scopes, Tools: in.Body.Tools}
	if !in.Body.Devices.IsZero() {
		if err := json.Unmarshal(in.Body.Devices.JSON, &params.Devices); err != nil {
			return nil, badRequest("devices: " + err.Error())
		}
	}
	if in.Body.Expires != nil {
		params.Expires = *in.Body.Expires
	}
	k, token, err := s.opt.Service.CreateKey(ctx, caller(ctx), params)
	return newSecret(api.CreatedKey{Key: s.newAPIKey(k, clock.Now()), Token: token}), err
}

// keyOf returns the key with an id or a name.
func (s *Server) keyOf(name string) (api.Key, error) {
	now := clock.Now()
	k, ok := s.opt.Service.Keys().Find(name, now)
	if !ok {
		return api.Key{}, &devices.Error{Code: devices.CodeNotFound, Detail: "there is no key with this id or name; GET /v1/keys lists them"}
	}
	return s.newAPIKey(k, now), nil
}

func (s *Server) getKey(ctx context.Context, in *KeyPath) (*tagged[api.Key], error) {
	k, err := s.keyOf(in.Key)
	if err != nil {
		return nil, err
	}
	if k.Grant != nil {
		k = addUse(k, s.grantUses(ctx), clock.Now())
	}
	return quoted(k.Revision(), k), nil
}

// grantUses returns when grants were used; nil if the database does not answer.
func (s *Server) grantUses(ctx context.Context) map[string]access.GrantUse {
	uses, err := s.opt.Service.GrantUses(ctx)
	if err != nil {
		return nil // the list says that it is not known
	}
	return uses
}

// addUse adds to a grant when it was used, and whether it has ended for want of that. The database forgets grants before the
// memory of this node does.
func addUse(k api.Key, uses map[string]access.GrantUse, now time.Time) api.Key {
	if k.Grant == nil || uses == nil {
		return k
	}
	use := uses[k.ID]
	k.Grant.Used, k.Grant.Address = api.At(use.Used), use.Address
	if k.State == "valid" && now.Sub(use.Used) >= access.GrantIdle {
		k.State = "expired"
	}
	return k
}

func (s *Server) revokeKey(ctx context.Context, in *revokeKeyInput) (*revokedAnswer, error) {
	if revision := in.revision(); revision != "" { // only the end of a key can change, and nothing undoes it
		switch k, err := s.keyOf(in.Key); {
		case err != nil:
			return nil, err
		case k.Revision() != revision:
			return nil, newProblem(&devices.Error{Code: devices.CodeStale, Detail: "the key has been revoked since it was read"})
		}
	}
	_, r, err := s.opt.Service.RevokeKey(ctx, caller(ctx), in.Key)
	return newRevoked(r), err
}
