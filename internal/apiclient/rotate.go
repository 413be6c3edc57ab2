package apiclient

import (
	"context"
	"net/http"
	"time"
)

// Credentials is how far the credentials of a device, or of the fleet, are.
type Credentials struct {
	// Generation is that of the credentials given out at the next OTA check.
	Generation int64 `json:"generation"`
	// PreviousUntil is until when older ones are valid, too; zero if they are not.
	PreviousUntil time.Time `json:"previous_until"`
}

type graceBody struct {
	Grace string `json:"grace"`
}

// Rotate has a device get new credentials at its next OTA check; the old ones stay valid until it has used the new ones,
// or grace is over.
func (c *Client) Rotate(ctx context.Context, id string, grace time.Duration) (Credentials, error) {
	var d Device
	err := c.into(ctx, requestTimeout, http.MethodPost, pathOf("devices", id, "rotate"), nil, graceBody{grace.String()}, &d)
	return d.Credentials, err
}

// RotateAll is Rotate for all devices.
func (c *Client) RotateAll(ctx context.Context, grace time.Duration) (Credentials, error) {
	var after Credentials
	err := c.into(ctx, requestTimeout, http.MethodPost, pathOf("devices", "rotate"), nil, graceBody{grace.String()}, &after)
	return after, err
}

// RotatedSecret is what came of a rotation of the fleet's secret.
type RotatedSecret struct {
	// Secret is its number, Generation that of all credentials of devices from now on.
	Secret     int64 `json:"secret"`
	Generation int64 `json:"generation"`
	// PreviousUntil is when those before end; zero if there are none.
	PreviousUntil time.Time `json:"previous_until"`
	AdminToken    string    `json:"admin_token"`
}

type secretBody struct {
	AdminOnly bool   `json:"admin_only,omitempty"`
	Grace     string `json:"grace,omitempty"`
}

// RotateSecret replaces the fleet's secret, or the admin token alone, which has no grace.
func (c *Client) RotateSecret(ctx context.Context, adminOnly bool, grace time.Duration) (RotatedSecret, error) {
	body := secretBody{AdminOnly: adminOnly}
	if !adminOnly {
		body.Grace = grace.String()
	}
	var r RotatedSecret
	err := c.into(ctx, requestTimeout, http.MethodPost, pathOf("secret", "rotate"), nil, body, &r)
	return r, err
}

// Local reports whether the client found its node in a data directory, where the node
// keeps the admin token.
func (c *Client) Local() (dir string, ok bool) { return c.local, c.local != "" }

// HasToken reports whether the client shows this token.
func (c *Client) HasToken(token string) bool { return c.token == token }
