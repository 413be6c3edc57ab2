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
