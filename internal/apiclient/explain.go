package apiclient

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"fleetd/internal/api"
)

// Why is why a device or a call is as it is.
type Why struct {
	api.Why
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Why) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Why, &x.Raw) }

// Recording is what happened to a device.
type Recording struct {
	api.Recording
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Recording) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Recording, &x.Raw) }

// ExplainDevice returns why a device is as it is.
func (c *Client) ExplainDevice(ctx context.Context, device string) (e Why, err error) {
	err = c.into(ctx, requestTimeout, http.MethodGet, pathOf("devices", device, "explain"), nil, nil, &e)
	return e, err
}

// ExplainCall returns why a call ended as it did.
func (c *Client) ExplainCall(ctx context.Context, call string) (e Why, err error) {
	err = c.into(ctx, requestTimeout, http.MethodGet, pathOf("calls", call, "explain"), nil, nil, &e)
	return e, err
}

// OfflineCauses is one page of the devices that are offline, by cause.
type OfflineCauses struct {
	api.OfflineCauses
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *OfflineCauses) UnmarshalJSON(data []byte) error {
	return withRaw(data, &x.OfflineCauses, &x.Raw)
}

// ExplainOffline returns why devices are offline that the selection has, page by page as they are consumed. The last
// element is an error if a page could not be had.
func (c *Client) ExplainOffline(ctx context.Context, selection string) iter.Seq2[OfflineCauses, error] {
	return func(yield func(OfflineCauses, error) bool) {
		query := url.Values{"limit": {"1000"}}
		setIf(query, "select", selection)
		for {
			var page OfflineCauses
			err := c.into(ctx, requestTimeout, http.MethodGet, pathOf("explain"), query, nil, &page)
			if err == nil && page.NextCursor != "" && page.NextCursor == query.Get("cursor") {
				err = fmt.Errorf("%s sent the same page of causes twice", c.base)
			}
			if !yield(page, err) || err != nil || page.NextCursor == "" {
				return
			}
			query.Set("cursor", page.NextCursor)
		}
	}
}

// Recording returns what happened to a device, newest first; an empty kind and a zero time select all.
func (c *Client) Recording(ctx context.Context, device, kind string, before time.Time, limit int) (r Recording, err error) {
	query := url.Values{"limit": {strconv.Itoa(limit)}}
	setIf(query, "kind", kind)
	if !before.IsZero() {
		query.Set("before", before.UTC().Format(time.RFC3339Nano))
	}
	err = c.into(ctx, requestTimeout, http.MethodGet, pathOf("devices", device, "recording"), query, nil, &r)
	return r, err
}

// Refusals returns the OTA checks and connections of unknown devices, newest first.
func (c *Client) Refusals(ctx context.Context) (r Recording, err error) {
	err = c.into(ctx, requestTimeout, http.MethodGet, "/v1/refusals", nil, nil, &r)
	return r, err
}
