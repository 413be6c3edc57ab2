package apiclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"fleetd/internal/api"
)

// Ready returns nil if the node is ready, and else what is down. It needs no token.
func (c *Client) Ready(ctx context.Context) error {
	err := c.probe(ctx, "/readyz")
	var problem *Problem
	var readiness api.Readiness
	if !errors.As(err, &problem) || json.Unmarshal(problem.Raw, &readiness) != nil || len(readiness.Down) == 0 {
		return err
	}
	var parts []string
	for _, part := range slices.Sorted(maps.Keys(readiness.Down)) {
		parts = append(parts, part+": "+readiness.Down[part])
	}
	return fmt.Errorf("the node at %s is not ready: %s", c.base, strings.Join(parts, "; "))
}

// Live returns nil if the node runs. It needs no token.
func (c *Client) Live(ctx context.Context) error { return c.probe(ctx, "/livez") }

func (c *Client) probe(ctx context.Context, path string) error {
	resp, err := c.do(ctx, http.MethodGet, path, nil, nil, nil)
	if err != nil {
		return err
	}
	resp.Body.Close()
	return nil
}
