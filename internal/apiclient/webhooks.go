package apiclient

import (
	"context"
	"encoding/json"
	"iter"
	"net/http"

	"fleetd/internal/api"
)

// Webhook is one webhook.
type Webhook struct {
	api.CreatedWebhook
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Webhook) UnmarshalJSON(data []byte) error { return withRaw(data, &x.CreatedWebhook, &x.Raw) }

// Webhooks returns all webhooks of the caller.
func (c *Client) Webhooks(ctx context.Context) iter.Seq2[Webhook, error] {
	return list[Webhook](ctx, c, pathOf("webhooks"), nil)
}

// CreateWebhook creates a webhook.
func (c *Client) CreateWebhook(ctx context.Context, n api.NewWebhook) (w Webhook, err error) {
	err = c.into(ctx, requestTimeout, http.MethodPost, pathOf("webhooks"), nil, n, &w)
	return w, err
}

// EditWebhook changes a webhook.
func (c *Client) EditWebhook(ctx context.Context, id string, e api.WebhookEdit) (w Webhook, err error) {
	err = c.into(ctx, requestTimeout, http.MethodPatch, pathOf("webhooks", id), nil, e, &w)
	return w, err
}

// DeleteWebhook deletes a webhook.
func (c *Client) DeleteWebhook(ctx context.Context, id string) error {
	_, _, err := c.exchange(ctx, requestTimeout, http.MethodDelete, pathOf("webhooks", id), nil, nil)
	return err
}

// TestWebhook has the node deliver a test message to a webhook.
func (c *Client) TestWebhook(ctx context.Context, id string) (t api.WebhookTest, err error) {
	err = c.into(ctx, requestTimeout, http.MethodPost, pathOf("webhooks", id, "test"), nil, nil, &t)
	return t, err
}
