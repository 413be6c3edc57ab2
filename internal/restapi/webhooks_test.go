package restapi

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
)

func fakeWebhook(id string) api.Webhook {
	return api.Webhook{ID: id, Types: []string{}, State: "active", Version: 7}
}

// fakeWebhooks has three, and records what it is asked for.
type fakeWebhooks struct{ asked string }

func (f *fakeWebhooks) List(_ context.Context, by access.Principal) ([]api.Webhook, error) {
	first := fakeWebhook("wh_a")
	first.CreatedBy = by.Name()
	return []api.Webhook{first, fakeWebhook("wh_b"), fakeWebhook("wh_c")}, nil
}

func (f *fakeWebhooks) Create(_ context.Context, by access.Principal, n api.NewWebhook) (api.CreatedWebhook, error) {
	f.asked = by.Name() + " " + n.URL + " " + strings.Join(n.Types, ",") + " " + n.OfflineFor
	return api.CreatedWebhook{Webhook: fakeWebhook("wh_new"), Secret: "whsec_x"}, nil
}

func (f *fakeWebhooks) Edit(_ context.Context, _ access.Principal, id string, e api.WebhookEdit) (api.CreatedWebhook, error) {
	f.asked = id
	if e.Select != nil {
		f.asked += " select " + *e.Select
	}
	return api.CreatedWebhook{Webhook: fakeWebhook(id)}, nil
}

func (f *fakeWebhooks) Get(_ context.Context, _ access.Principal, id string) (api.Webhook, error) {
	return fakeWebhook(id), nil
}

func (f *fakeWebhooks) Delete(_ context.Context, _ access.Principal, id, _ string) error {
	if id != "wh_a" {
		return devices.Errorf(devices.CodeNotFound, "there is no webhook with this id")
	}
	return nil
}

func (f *fakeWebhooks) Test(_ context.Context, _ access.Principal, id string) (api.WebhookTest, error) {
	return api.WebhookTest{Status: 500, Error: id}, nil
}

func TestWebhooks(t *testing.T) {
	f := newFleet(t)
	key := f.key(t, "hooks", "webhooks", "")
	if r := f.do(t, "POST", "/v1/webhooks", `{"url":"https://example.com/","types":["offline","job.halted"],"offline_for":"10m"}`, as(key)...); r.status != http.StatusCreated ||
		!strings.Contains(r.body, `"secret":"whsec_x"`) || f.webhooks.asked != "hooks https://example.com/ offline,job.halted 10m" {
		t.Errorf("%d %s, asked %q", r.status, r.body, f.webhooks.asked)
	}
	if r := f.do(t, "PATCH", "/v1/webhooks/wh_a", `{"select":"room=lab"}`, as(key)...); r.status != 200 || strings.Contains(r.body, "secret") || f.webhooks.asked != "wh_a select room=lab" {
		t.Errorf("%d %s, asked %q", r.status, r.body, f.webhooks.asked)
	}
	if r := f.do(t, "POST", "/v1/webhooks/wh_a/test", "", as(key)...); r.status != 200 || !strings.Contains(r.body, `"delivered":false,"status":500,"error":"wh_a"`) {
		t.Errorf("%d %s", r.status, r.body)
	}
	if r := f.do(t, "DELETE", "/v1/webhooks/wh_a", "", as(key)...); r.status != http.StatusNoContent {
		t.Errorf("%d %s", r.status, r.body)
	}
	f.do(t, "DELETE", "/v1/webhooks/wh_x", "", as(key)...).problem(t, 404, devices.CodeNotFound)
	f.do(t, "POST", "/v1/webhooks", `{"url":"https://example.com/"}`, as(key)...).problem(t, 400, devices.CodeBadRequest)
	var page api.List[api.Webhook]
	f.do(t, "GET", "/v1/webhooks?limit=2", "", as(key)...).json(t, &page)
	if len(page.Items) != 2 || page.Items[0].CreatedBy != "hooks" || page.NextCursor == "" {
		t.Fatalf("%+v", page)
	}
	f.do(t, "GET", "/v1/webhooks?limit=2&cursor="+page.NextCursor, "", as(key)...).json(t, &page)
	if len(page.Items) != 1 || page.Items[0].ID != "wh_c" || page.NextCursor != "" {
		t.Errorf("%+v", page)
	}
	f.do(t, "GET", "/v1/webhooks", "", as(f.key(t, "reader", "devices:read", ""))...).problem(t, 403, devices.CodeForbidden)
}
