package apiclient

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"time"

	"fleetd/internal/api"
)

// Stats are figures of the fleet over time.
type Stats struct {
	api.Stats
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Stats) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Stats, &x.Raw) }

// Stats returns the figures since a time; the server chooses a step if it is 0.
func (c *Client) Stats(ctx context.Context, since time.Time, step time.Duration) (Stats, error) {
	query := url.Values{"since": {since.UTC().Format(time.RFC3339)}}
	if step > 0 {
		query.Set("step", step.String())
	}
	var answer Stats
	err := c.into(ctx, requestTimeout, http.MethodGet, pathOf("stats"), query, nil, &answer)
	return answer, err
}
