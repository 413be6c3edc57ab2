package apiclient

import (
	"bytes"
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"net/url"
	"time"
)

// Device is one device as the API shows it.
type Device struct {
	ID     string            `json:"id"`
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels"`
	// State is "online", "offline", "pending" or "contested".
	State     string `json:"state"`
	Transport string `json:"transport"`
	Node      string `json:"node"`
	Board     string `json:"board"`
	Firmware  string `json:"firmware"`
	ClientID  string `json:"client_id"`
	SessionID string `json:"session_id"`
	MCP       MCP    `json:"mcp"`
	Audio     Audio  `json:"audio"`
	// Credentials is how far its credentials are.
	Credentials Credentials `json:"credentials"`
	// FirstSeen, LastSeen and ConnectedAt are zero if the server does not know.
	FirstSeen   time.Time `json:"first_seen"`
	LastSeen    time.Time `json:"last_seen"`
	ConnectedAt time.Time `json:"connected_at"`
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// MCP is what is known of a device's MCP server.
type MCP struct {
	// State is "unknown", "listing", "ready", "none", "unresponsive" or "error".
	State string `json:"state"`
	// Tools is how many tools the device has.
	Tools int `json:"tools"`
	// Catalog is the SHA-256 of the tool list.
	Catalog string `json:"catalog"`
	// CatalogState is "ready", "stale", "unknown", "none" or "error".
	CatalogState string `json:"catalog_state"`
	// Partial says that the list could not be read to its end.
	Partial bool   `json:"partial"`
	Error   string `json:"error"`
}

// Audio is the state of a device's audio channel.
type Audio struct {
	Open    bool   `json:"open"`
	Packets uint64 `json:"packets"`
	Dropped uint64 `json:"dropped"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (d *Device) UnmarshalJSON(data []byte) error {
	type plain Device
	if err := json.Unmarshal(data, (*plain)(d)); err != nil {
		return err
	}
	d.Raw = bytes.Clone(data)
	return nil
}

// DeviceFilter selects devices; empty fields select all.
type DeviceFilter struct {
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
	// Labels replaces all labels.
	Labels *map[string]string `json:"labels,omitempty"`
	// Transport is what the device is offered at its next boot.
	Transport *string `json:"transport,omitempty"`
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
	content, _, err := c.exchange(ctx, requestTimeout, http.MethodPatch, pathOf("devices", id), nil, patch)
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

// Approve admits a waiting device, or the waiting client id of a known one.
func (c *Client) Approve(ctx context.Context, id string) error {
	return c.into(ctx, requestTimeout, http.MethodPost, pathOf("devices", id, "approve"), nil, nil, nil)
}

// Revoke raises a device's credentials to a new generation: the old ones are worthless, and the device gets new ones
// at its next OTA check.
func (c *Client) Revoke(ctx context.Context, id string) error {
	return c.into(ctx, requestTimeout, http.MethodPost, pathOf("devices", id, "revoke"), nil, nil, nil)
}
