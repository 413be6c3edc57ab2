package apiclient

import (
	"context"
	"iter"
	"net/http"
	"time"
)

// Chip is one line of the list of chips whose hardware can prove itself.
type Chip struct {
	Serial string `json:"serial"`
	// Key is eFuse block KEY0 in hex; the server never shows it.
	Key string `json:"key,omitempty"`
	// Device is the device that it proves, or empty.
	Device string `json:"device,omitempty"`
	// ImportedAt and BoundAt are zero in an import; BoundAt also while the chip proves no device.
	ImportedAt time.Time `json:"imported_at,omitzero"`
	BoundAt    time.Time `json:"bound_at,omitzero"`
}

// chips is the body of an import.
type chips struct {
	Items []Chip `json:"items"`
}

// ImportChips adds chips to the list, all or none. The server takes 64 KiB at a time.
func (c *Client) ImportChips(ctx context.Context, items []Chip) error {
	return c.into(ctx, requestTimeout, http.MethodPost, pathOf("attestation", "keys"), nil, chips{items}, nil)
}

// Chips returns the listed chips in order of their serial numbers.
func (c *Client) Chips(ctx context.Context) iter.Seq2[Chip, error] {
	return list[Chip](ctx, c, pathOf("attestation", "keys"), nil)
}

// RemoveChip takes a chip off the list.
func (c *Client) RemoveChip(ctx context.Context, serial string) error {
	return c.into(ctx, requestTimeout, http.MethodDelete, pathOf("attestation", "keys", serial), nil, nil, nil)
}
