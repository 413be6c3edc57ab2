package apiclient

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"

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

// Log is one page of what happened to a device, or to devices that are not known.
type Log struct {
	api.Log
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Log) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Log, &x.Raw) }

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

// LogQuery selects a page of the log of a device. The zero value of each member but Limit selects all.
type LogQuery struct {
	Kind   string
	Before string // RFC 3339, or a duration before now
	Cursor string // NextCursor of the page before
	Limit  int
}

// DeviceLog returns a page of what happened to a device, newest first.
func (c *Client) DeviceLog(ctx context.Context, device string, q LogQuery) (l Log, err error) {
	query := url.Values{"limit": {strconv.Itoa(q.Limit)}}
	setIf(query, "kind", q.Kind)
	setIf(query, "before", q.Before)
	setIf(query, "cursor", q.Cursor)
	err = c.into(ctx, requestTimeout, http.MethodGet, pathOf("devices", device, "log"), query, nil, &l)
	return l, err
}

// Refusals returns the OTA checks and connections of unknown devices, newest first, at most 1,000.
func (c *Client) Refusals(ctx context.Context) (l Log, err error) {
	err = c.into(ctx, requestTimeout, http.MethodGet, "/v1/refusals", url.Values{"limit": {"1000"}}, nil, &l)
	return l, err
}
