package apiclient

import (
	"context"
	"iter"
	"net/http"
	"time"

	"fleetd/internal/api"
)

// StartTrace starts a trace of a device, or replaces one.
func (c *Client) StartTrace(ctx context.Context, device string, n api.NewTrace) (t api.Trace, err error) {
	err = c.into(ctx, requestTimeout, http.MethodPost, pathOf("devices", device, "trace"), nil, n, &t)
	return t, err
}

// EndTrace ends the trace of a device.
func (c *Client) EndTrace(ctx context.Context, device string) error {
	return c.into(ctx, requestTimeout, http.MethodDelete, pathOf("devices", device, "trace"), nil, nil, nil)
}

// TraceEvents yields the events of a device's trace, `trace` and at last `end`, until ctx ends. It connects again
// when the connection is lost, and calls onRetry before, if it is not nil.
func (c *Client) TraceEvents(ctx context.Context, device string, onRetry func(cause error, wait time.Duration)) iter.Seq2[Event, error] {
	s := &stream{client: c, path: pathOf("devices", device, "trace"), options: EventOptions{OnRetry: onRetry}, wait: firstRetry}
	return func(yield func(Event, error) bool) {
		for event, err := range s.all(ctx) {
			if s.after = ""; !yield(event, err) || event.Type == "end" {
				return
			}
		}
	}
}
