package restapi

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

// apiKey is a key as the API shows it: everything but what proves it.
type apiKey struct {
	ID      string            `json:"id"`
	Name    string            `json:"name"`
	Scopes  []string          `json:"scopes" nullable:"false"`
	Devices selector.Selector `json:"devices" doc:"Which devices it is for; {}: all of them."`
	Tools   []string          `json:"tools" nullable:"false" doc:"Globs of tools; none: all tools."`
	State   string            `json:"state" enum:"valid,expired,revoked"`
	Created stamp             `json:"created"`
	Expires stamp             `json:"expires" doc:"null: never."`
	Revoked stamp             `json:"revoked" doc:"null: it was not."`
}

func newAPIKey(k access.Key, now time.Time) apiKey {
	out := apiKey{ID: k.ID, Name: k.Name, Scopes: k.Scopes.Names(), Devices: k.Devices, Tools: slices.Concat([]string{}, k.Tools), State: "valid",
		Created: stamp(k.Created), Expires: stamp(k.Expires), Revoked: stamp(k.Revoked)}
	switch k.Ended(now) {
	case access.ErrExpired:
		out.State = "expired"
	case access.ErrRevoked:
		out.State = "revoked"
	}
	return out
}

// newKey is what somebody who makes a key gets, once.
type newKey struct {
	apiKey
	Token string `json:"token" doc:"Shown this once, and kept nowhere."`
}

// keyWish is the body that makes a key.
type keyWish struct {
	Name    string            `json:"name" example:"lab dashboard" doc:"1 to 64 letters, digits, blanks and . _ @ -; refusals and the audit quote it."`
	Scopes  []string          `json:"scopes" nullable:"false" doc:"devices:read, tools:call, tools:call:user, devices:write, events:read, audio, admin, photos:read, broker."`
	Devices selector.Selector `json:"devices,omitzero" doc:"Only these devices."`
	Tools   []string          `json:"tools,omitempty" doc:"Only tools that one of these globs matches."`
	Expires *time.Time        `json:"expires,omitempty" doc:"Without it the key lasts until it is revoked."`
}

type createKeyInput struct{ Body keyWish }

type keyPath struct {
	Key string `path:"key" doc:"Id or name of a key."`
}

func (s *Server) keyRoutes() {
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/keys", about{id: "listKeys", scope: access.ScopeAdmin, tag: tagAccess, summary: "List API keys",
		answer: "A page, oldest first; those that have ended included."}), s.listKeys)
	huma.Register(s.api, s.operation(http.MethodPost, "/v1/keys", about{id: "createKey", scope: access.ScopeAdmin, tag: tagAccess, summary: "Make an API key",
		status: http.StatusCreated, answer: "The key with its token, which is shown this once.", codes: []devices.Code{devices.CodeTooLarge, devices.CodeUnavailable}}), s.createKey)
	registerRevoke(s, s.operation(http.MethodDelete, "/v1/keys/{key}", about{id: "revokeKey", scope: access.ScopeAdmin, tag: tagAccess, summary: "Revoke an API key",
		text:   "At once, on all nodes, whether the database answers or not. It stays in the list, because the audit log names it.",
		status: http.StatusNoContent, answer: "It is worth nothing any more.", codes: []devices.Code{devices.CodeNotFound, devices.CodeUnavailable}}), s.revokeKey)
}

func (s *Server) listKeys(_ context.Context, in *Page) (*answer[list[apiKey]], error) {
	after, err := parseCursor(in.Cursor)
	if err != nil {
		return nil, err
	}
	keys := s.opt.Service.Keys().Keys()
	if after != "" {
		i := slices.IndexFunc(keys, func(k access.Key) bool { return k.ID == after })
		if i < 0 {
			return nil, errCursor
		}
		keys = keys[i+1:]
	}
	page := list[apiKey]{Items: []apiKey{}}
	now := time.Now()
	for i, k := range keys {
		if i == in.Limit {
			page.NextCursor = newCursor(keys[i-1].ID)
			break
		}
		page.Items = append(page.Items, newAPIKey(k, now))
	}
	return &answer[list[apiKey]]{page}, nil
}

func (s *Server) createKey(ctx context.Context, in *createKeyInput) (*answer[newKey], error) {
	scopes, err := access.ParseScopes(in.Body.Scopes)
	if err != nil {
		return nil, badRequest(err.Error())
	}
	wish := fleet.KeyWish{Name: in.Body.Name, Scopes: scopes, Devices: in.Body.Devices, Tools: in.Body.Tools}
	if in.Body.Expires != nil {
		wish.Expires = *in.Body.Expires
	}
	k, token, err := s.opt.Service.CreateKey(ctx, caller(ctx), wish)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &answer[newKey]{newKey{newAPIKey(k, time.Now()), token}}, nil
}

func (s *Server) revokeKey(ctx context.Context, in *keyPath) (*revokedAnswer, error) {
	_, r, err := s.opt.Service.RevokeKey(ctx, caller(ctx), in.Key)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return newRevoked(r), nil
}
