package apiclient

import (
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"fleetd/internal/api"
)

// Device is one device.
type Device struct {
	api.Device
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Device) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Device, &x.Raw) }

// DeviceFilter selects devices; empty fields select all.
type DeviceFilter struct {
	// Select is a selection such as "room=lab,firmware<2.4".
	Select string
	// Sort is "id", "name", "last_seen" or "offline_since"; empty is "id".
	Sort                              string
	State, Transport, Board, Firmware string
	// Label is "key" or "key=value".
	Label string
	// Text is searched in names and ids.
	Text string
}

// Devices returns the devices that the filter selects, page by page as they are consumed. The last element is an
// error if a page could not be had.
func (c *Client) Devices(ctx context.Context, filter DeviceFilter) iter.Seq2[Device, error] {
	query := make(url.Values)
	setIf(query, "select", filter.Select)
	setIf(query, "sort", filter.Sort)
	setIf(query, "state", filter.State)
	setIf(query, "transport", filter.Transport)
	setIf(query, "board", filter.Board)
	setIf(query, "firmware", filter.Firmware)
	setIf(query, "label", filter.Label)
	setIf(query, "q", filter.Text)
	return list[Device](ctx, c, pathOf("devices"), query)
}

// Device returns one device.
func (c *Client) Device(ctx context.Context, id string) (Device, error) {
	var d Device
	err := c.into(ctx, requestTimeout, http.MethodGet, pathOf("devices", id), nil, nil, &d)
	return d, err
}

// DevicePatch changes what an operator may change; nil fields stay.
type DevicePatch struct {
	Name *string `json:"name,omitempty"`
	// Labels to set; nil removes one.
	Labels map[string]*string `json:"labels,omitempty"`
	// TransportWanted is what the device is offered at its next boot.
	TransportWanted *string `json:"transport_wanted,omitempty"`
	// IfMatch refuses the change with status 412 unless the device is at this revision; 0 does not.
	IfMatch int64 `json:"-"`
}

// Patched is the answer to a patch.
type Patched struct {
	// Applies is "next boot" if the device must restart before the change reaches it.
	Applies string `json:"applies"`
	// Raw is the answer as received.
	Raw json.RawMessage `json:"-"`
}

// Patch changes a device.
func (c *Client) Patch(ctx context.Context, id string, patch DevicePatch) (Patched, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	header := make(http.Header)
	if patch.IfMatch != 0 {
		header.Set("If-Match", `"`+strconv.FormatInt(patch.IfMatch, 10)+`"`)
	}
	resp, err := c.do(ctx, http.MethodPatch, pathOf("devices", id), nil, patch, header)
	if err != nil {
		return Patched{}, err
	}
	content, err := c.readAll(resp)
	if err != nil {
		return Patched{}, err
	}
	answer := Patched{Raw: content}
	return answer, c.decode(content, &answer)
}

// Forget removes a device and makes its credentials worthless.
func (c *Client) Forget(ctx context.Context, id string) error {
	return c.into(ctx, requestTimeout, http.MethodDelete, pathOf("devices", id), nil, nil, nil)
}

// Approve admits a waiting device, or one of the clients that wait as this device. client may be empty unless another
// one is admitted or several wait.
func (c *Client) Approve(ctx context.Context, id, client string) error {
	return c.into(ctx, requestTimeout, http.MethodPost, pathOf("devices", id, "approve"), nil, api.Approval{Client: client}, nil)
}

// Refuse refuses a client that waits as a device, and nothing else.
func (c *Client) Refuse(ctx context.Context, id, client string) error {
	return c.into(ctx, requestTimeout, http.MethodDelete, pathOf("devices", id, "clients", client), nil, nil, nil)
}

// Revoke raises a device's credentials to a new generation: the old ones are worthless, and the device waits for
// approval from its next OTA check on.
func (c *Client) Revoke(ctx context.Context, id string) (api.Revocation, error) {
	return c.revoke(ctx, http.MethodPost, pathOf("devices", id, "revoke"))
}

// revoke sends a request that is answered with 202 while the database is away, else with another success.
func (c *Client) revoke(ctx context.Context, method, path string) (api.Revocation, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.do(ctx, method, path, nil, nil, nil)
	if err != nil {
		return api.Revocation{}, err
	}
	content, err := c.readAll(resp)
	if err != nil || resp.StatusCode != http.StatusAccepted {
		return api.Revocation{Recorded: true}, err
	}
	var answer api.Revocation
	return answer, c.decode(content, &answer)
}
