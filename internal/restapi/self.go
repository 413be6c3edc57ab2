package restapi

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/selector"
)

// self is the caller as the API shows it.
type self struct {
	Name    string            `json:"name"`
	Key     string            `json:"key" doc:"Id of the API key; admin for the admin token, open where no token is required."`
	Scopes  []string          `json:"scopes" nullable:"false"`
	Devices selector.Selector `json:"devices" doc:"Which devices it is for; {}: all of them."`
	Tools   []string          `json:"tools" nullable:"false" doc:"Globs of tools; none: all tools."`
	Expires stamp             `json:"expires" doc:"null: never."`
	Admin   bool              `json:"admin" doc:"The caller may do everything."`
}

func (s *Server) selfRoutes() {
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/self", about{id: "getSelf", anyone: true, tag: tagAccess, summary: "Get the caller",
		text: "Every key may read what it may do.", answer: "The caller and its limits."}), s.getSelf)
}

func (s *Server) getSelf(ctx context.Context, _ *struct{}) (*answer[self], error) {
	who := caller(ctx).Who
	body := self{Name: who.Name, Key: who.Key, Scopes: who.Scopes.Names(), Devices: who.Devices, Tools: append([]string{}, who.Tools...),
		Admin: who.Scopes.Has(access.ScopeAdmin)}
	if k, ok := s.opt.Service.Keys().Find(who.Key, time.Now()); ok && k.ID == who.Key {
		body.Expires = stamp(k.Expires)
	}
	return &answer[self]{body}, nil
}
