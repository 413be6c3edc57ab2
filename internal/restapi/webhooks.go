package restapi

import (
	"context"
	"net/http"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
)

// Webhooks shows and changes webhooks. Errors are *devices.Error.
type Webhooks interface {
	List(ctx context.Context, by access.Principal) ([]api.Webhook, error)
	Create(ctx context.Context, by access.Principal, n api.NewWebhook) (api.CreatedWebhook, error)
	Edit(ctx context.Context, by access.Principal, id string, e api.WebhookEdit) (api.CreatedWebhook, error)
	Get(ctx context.Context, by access.Principal, id string) (api.Webhook, error)
	Delete(ctx context.Context, by access.Principal, id, revision string) error
	Test(ctx context.Context, by access.Principal, id string) (api.WebhookTest, error)
}

type createWebhookInput struct{ Body api.NewWebhook }

// WebhookPath names a webhook.
type WebhookPath struct {
	ID string `path:"id" doc:"This is the id of a webhook."`
}

type deleteWebhookInput struct {
	WebhookPath
	Match
}

type editWebhookInput struct {
	WebhookPath
	Match
	Body api.WebhookEdit
}

func (s *Server) webhookRoutes() {
	away := []devices.Code{devices.CodeUnavailable}
	known := append(away, devices.CodeNotFound)
	register(s, s.operation(http.MethodGet, "/v1/webhooks", about{id: "listWebhooks", scope: access.ScopeWebhooks, tag: tagWebhooks, summary: "List webhooks",
		text: "A key sees the webhooks that it created, administrators see all. There are at most 100, of which keys have shares; those of keys that ended do not count.", answer: "A page, in order of id.", codes: away}), s.listWebhooks)
	register(s, s.operation(http.MethodPost, "/v1/webhooks", about{id: "createWebhook", scope: access.ScopeWebhooks, tag: tagWebhooks, summary: "Create a webhook",
		text: "Events from now on are delivered by POST, signed as Standard Webhooks, at least once and in order of time: a delivery is repeated until the receiver answers 2xx within 10 s, and has the same `webhook-id` each time. " +
			"The webhook acts as the key that creates it, which also needs the scope events:read, and stops when that key ends.",
		status: http.StatusCreated, answer: "The webhook, with its secret if that was left out.", codes: append(away, devices.CodeLimitReached)}), s.createWebhook)
	register(s, s.operation(http.MethodGet, "/v1/webhooks/{id}", about{id: "getWebhook", scope: access.ScopeWebhooks, tag: tagWebhooks, summary: "Show a webhook",
		answer: "The webhook.", codes: known}), s.getWebhook)
	register(s, s.operation(http.MethodPatch, "/v1/webhooks/{id}", about{id: "editWebhook", scope: access.ScopeWebhooks, tag: tagWebhooks, summary: "Change a webhook",
		text: "It goes on with the event after the last one that was delivered.", answer: "The webhook, with a secret if a new one was made.", codes: append(known, devices.CodeStale)}), s.editWebhook)
	register(s, s.operation(http.MethodDelete, "/v1/webhooks/{id}", about{id: "deleteWebhook", scope: access.ScopeWebhooks, tag: tagWebhooks, summary: "Delete a webhook",
		status: http.StatusNoContent, answer: "It is deleted.", codes: append(known, devices.CodeStale)}), s.deleteWebhook)
	register(s, s.operation(http.MethodPost, "/v1/webhooks/{id}/test", about{id: "testWebhook", scope: access.ScopeWebhooks, tag: tagWebhooks, summary: "Try a webhook",
		text: "Delivers a message of the type test at once, from the node that receives the request.", answer: "What came of it.", codes: append(known, devices.CodeConflict)}), s.testWebhook)
}

func (s *Server) listWebhooks(ctx context.Context, in *Page) (*answer[api.List[api.Webhook]], error) {
	p, err := s.page(ctx, *in)
	if err != nil {
		return nil, err
	}
	hooks, err := s.opt.Webhooks.List(ctx, caller(ctx))
	if err != nil {
		return nil, err
	}
	list, err := fillPage(p, pieceLimit, inMemory(hooks, func(h *api.Webhook) string { return h.ID }))
	return answerOf(list, err)
}

// newHookAnswer returns the answer with a webhook that was made or changed, and a secret that was made for it.
func newHookAnswer(h api.CreatedWebhook) *tagged[api.CreatedWebhook] {
	out := quoted(h.Revision(), h)
	out.CacheControl = "no-store"
	return out
}

func (s *Server) createWebhook(ctx context.Context, in *createWebhookInput) (*tagged[api.CreatedWebhook], error) {
	h, err := s.opt.Webhooks.Create(ctx, caller(ctx), in.Body)
	return newHookAnswer(h), err
}

func (s *Server) getWebhook(ctx context.Context, in *WebhookPath) (*tagged[api.Webhook], error) {
	h, err := s.opt.Webhooks.Get(ctx, caller(ctx), in.ID)
	return quoted(h.Revision(), h), err
}

func (s *Server) editWebhook(ctx context.Context, in *editWebhookInput) (*tagged[api.CreatedWebhook], error) {
	in.Body.IfMatch = in.revision()
	h, err := s.opt.Webhooks.Edit(ctx, caller(ctx), in.ID, in.Body)
	return newHookAnswer(h), err
}

func (s *Server) deleteWebhook(ctx context.Context, in *deleteWebhookInput) (*struct{}, error) {
	return nil, s.opt.Webhooks.Delete(ctx, caller(ctx), in.ID, in.revision())
}

func (s *Server) testWebhook(ctx context.Context, in *WebhookPath) (*answer[api.WebhookTest], error) {
	outcome, err := s.opt.Webhooks.Test(ctx, caller(ctx), in.ID)
	return answerOf(outcome, err)
}
