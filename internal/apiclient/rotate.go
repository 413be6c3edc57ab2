package apiclient

import (
	"context"
	"net/http"
	"time"

	"fleetd/internal/api"
)

// Rotate has a device get new credentials at its next OTA check; the old ones stay valid until it has used the new ones,
// or grace is over.
func (c *Client) Rotate(ctx context.Context, id string, grace time.Duration) (api.Credentials, error) {
	var d Device
	err := c.into(ctx, requestTimeout, http.MethodPost, pathOf("devices", id, "rotate"), nil, api.Grace{Grace: grace.String()}, &d)
	return d.Credentials, err
}

// RotateAll is Rotate for all devices.
func (c *Client) RotateAll(ctx context.Context, grace time.Duration) (api.Credentials, error) {
	var after api.Credentials
	err := c.into(ctx, requestTimeout, http.MethodPost, pathOf("devices", "rotate"), nil, api.Grace{Grace: grace.String()}, &after)
	return after, err
}

// RotateSecret replaces the fleet's secret, or the admin token alone, which has no grace.
func (c *Client) RotateSecret(ctx context.Context, adminOnly bool, grace time.Duration) (api.RotatedSecret, error) {
	body := api.SecretRotation{AdminOnly: adminOnly}
	if !adminOnly {
		body.Grace = grace.String()
	}
	var r api.RotatedSecret
	err := c.into(ctx, requestTimeout, http.MethodPost, pathOf("secret", "rotate"), nil, body, &r)
	return r, err
}

// Local reports whether the client found its node in a data directory, where the node
// keeps the admin token.
func (c *Client) Local() (dir string, ok bool) { return c.local, c.local != "" }

// HasToken reports whether the client shows this token.
func (c *Client) HasToken(token string) bool { return c.token == token }
