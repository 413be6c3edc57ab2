package restapi

import (
	"cmp"
	"context"
	"net/http"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

func (s *Server) selfRoutes() {
	register(s, s.operation(http.MethodGet, "/v1/self", about{id: "getSelf", anyone: true, tag: tagAccess, summary: "Get the caller",
		text: "Every key may read what it may do.", answer: "The caller and its limits."}), s.getSelf)
	registerRevoke(s, s.operation(http.MethodDelete, "/v1/self", about{id: "endSelf", anyone: true, tag: tagAccess, summary: "End the key of a console",
		text: "What logging out of the console does. Keys of other kinds are refused.", status: http.StatusNoContent, answer: "It is not valid any more.", codes: []devices.Code{devices.CodeUnavailable}}), s.endSelf)
}

func (s *Server) endSelf(ctx context.Context, _ *struct{}) (*revokedAnswer, error) {
	r, err := s.opt.Service.EndConsoleKey(ctx, caller(ctx))
	return newRevoked(r), err
}

func (s *Server) getSelf(ctx context.Context, _ *struct{}) (*answer[api.Self], error) {
	who := caller(ctx).Caller
	body := api.Self{Name: who.Name, Key: who.Key, Scopes: who.Scopes.Names(), Devices: selectionOf(who.Devices), Tools: append([]string{}, who.Tools...),
		Admin: who.Scopes.Has(access.ScopeAdmin), Through: who.Through}
	id := cmp.Or(who.Through, who.Key)
	if k, ok := s.opt.Service.Keys().Find(id, clock.Now()); ok && k.ID == id {
		body.Expires = api.At(k.Expires)
	}
	return &answer[api.Self]{body}, nil
}
