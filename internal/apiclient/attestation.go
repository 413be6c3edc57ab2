package apiclient

import (
	"context"
	"iter"
	"net/http"

	"fleetd/internal/api"
)

// ImportChips adds chips to the list, all or none. The server takes 64 KiB at a time.
func (c *Client) ImportChips(ctx context.Context, items []api.NewChip) error {
	return c.into(ctx, requestTimeout, http.MethodPost, pathOf("attestation", "keys"), nil, api.NewChips{Items: items}, nil)
}

// Chips returns the listed chips in order of their serial numbers.
func (c *Client) Chips(ctx context.Context) iter.Seq2[api.Chip, error] {
	return list[api.Chip](ctx, c, pathOf("attestation", "keys"), nil)
}

// RemoveChip takes a chip off the list.
func (c *Client) RemoveChip(ctx context.Context, serial string) error {
	return c.into(ctx, requestTimeout, http.MethodDelete, pathOf("attestation", "keys", serial), nil, nil, nil)
}
