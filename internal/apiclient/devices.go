package apiclient

import (
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Device is one device as the API shows it.
type Device struct {
	ID     string            `json:"id"`
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels"`
	// State is "online", "offline", "pending" or "contested".
	State string `json:"state"`
	// OfflineReason and OfflineSince say why it is not connected, and since when; empty if it is, or never was.
	OfflineReason string    `json:"offline_reason"`
	OfflineSince  time.Time `json:"offline_since"`
	Transport     string    `json:"transport"`
	Node          string    `json:"node"`
	Board         string    `json:"board"`
	Firmware      string    `json:"firmware"`
	ClientID      string    `json:"client_id"`
	// PendingClientID is another client id that waits for approval.
	PendingClientID string `json:"pending_client_id"`
	SessionID       string `json:"session_id"`
	MCP             MCP    `json:"mcp"`
	Audio           Audio  `json:"audio"`
	// Credentials is how far its credentials are.
	Credentials Credentials `json:"credentials"`
	// FirstSeen, LastSeen and ConnectedAt are zero if the server does not know.
	FirstSeen   time.Time `json:"first_seen"`
	LastSeen    time.Time `json:"last_seen"`
	ConnectedAt time.Time `json:"connected_at"`
	// Revision is that of the last decision about the device; 0 if the server does not say.
	Revision int64 `json:"revision"`
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
	return withRaw(data, (*plain)(d), &d.Raw)
}

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
	// Labels replaces all labels.
	Labels *map[string]string `json:"labels,omitempty"`
	// Transport is what the device is offered at its next boot.
	Transport *string `json:"transport,omitempty"`
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

// Approve admits a waiting device, or the waiting client id of a known one.
func (c *Client) Approve(ctx context.Context, id string) error {
	return c.into(ctx, requestTimeout, http.MethodPost, pathOf("devices", id, "approve"), nil, nil, nil)
}

// Revocation says how far a revocation is. It is in force when it is returned.
type Revocation struct {
	// Recorded says that it is in the database. If not, the nodes record it when the database is back.
	Recorded bool `json:"recorded"`
	// Nodes are those that confirmed it; empty if it is recorded, which holds for all.
	Nodes []string `json:"nodes"`
}

// Revoke raises a device's credentials to a new generation: the old ones are worthless, and the device waits for
// approval from its next OTA check on.
func (c *Client) Revoke(ctx context.Context, id string) (Revocation, error) {
	return c.revoke(ctx, http.MethodPost, pathOf("devices", id, "revoke"))
}

// revoke sends a request that is answered with 202 while the database is away, else with another success.
func (c *Client) revoke(ctx context.Context, method, path string) (Revocation, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.do(ctx, method, path, nil, nil, nil)
	if err != nil {
		return Revocation{}, err
	}
	content, err := c.readAll(resp)
	if err != nil || resp.StatusCode != http.StatusAccepted {
		return Revocation{Recorded: true}, err
	}
	var answer Revocation
	return answer, c.decode(content, &answer)
}
