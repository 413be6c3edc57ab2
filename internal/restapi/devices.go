package restapi

import (
	"cmp"
	"context"
	"net/http"
	"regexp"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// device is one device as the API shows it.
type device struct {
	ID              string            `json:"id" doc:"aa:bb:cc:dd:ee:ff, or another name the device gave itself."`
	Name            string            `json:"name" doc:"What the operator calls it."`
	Labels          map[string]string `json:"labels"`
	State           devices.State     `json:"state" enum:"online,offline,pending,contested"`
	Transport       devices.Transport `json:"transport" doc:"How it is connected; empty if it is not."`
	Node            string            `json:"node" doc:"The node that holds it, or held it last."`
	Board           string            `json:"board"`
	Firmware        string            `json:"firmware"`
	ClientID        string            `json:"client_id" doc:"The admitted Client-Id."`
	PendingClientID string            `json:"pending_client_id,omitempty" doc:"Another Client-Id that waits for approval."`
	SessionID       string            `json:"session_id"`
	MCP             deviceMCP         `json:"mcp"`
	Audio           deviceAudio       `json:"audio"`
	Credentials     deviceCredentials `json:"credentials"`
	FirstSeen       stamp             `json:"first_seen"`
	LastSeen        stamp             `json:"last_seen"`
	ConnectedAt     stamp             `json:"connected_at" doc:"null unless it is connected."`
}

// deviceMCP is what is known of a device's MCP server.
type deviceMCP struct {
	State        devices.MCPState     `json:"state" enum:"unknown,listing,ready,none,unresponsive,error"`
	Tools        int                  `json:"tools" doc:"How many tools it has."`
	Catalog      string               `json:"catalog" doc:"SHA-256 of its tool list; empty if it was never read."`
	CatalogState devices.CatalogState `json:"catalog_state" enum:"ready,stale,unknown,none,error" doc:"ready: verified on this connection; stale: known from before, and callable."`
	Partial      bool                 `json:"partial" doc:"The list could not be read to its end."`
	Error        string               `json:"error"`
}

// deviceAudio is a device's audio channel.
type deviceAudio struct {
	Open    bool   `json:"open"`
	Packets uint64 `json:"packets"`
	Dropped uint64 `json:"dropped"`
}

func newDevice(v devices.View) device {
	d, p := &v.Device, &v.Presence
	body := device{ID: string(d.ID), Name: d.Name, Labels: d.Labels, State: v.State, Transport: p.Transport, Node: p.Node, Board: d.Board,
		Firmware: d.Firmware, ClientID: cmp.Or(d.ClientID, p.ClientID), PendingClientID: d.PendingID, SessionID: p.Session,
		MCP: deviceMCP{State: cmp.Or(p.MCP, devices.MCPUnknown), Tools: p.Tools, Catalog: p.Catalog.String(),
			CatalogState: cmp.Or(v.CatalogState, devices.CatalogUnknown), Partial: p.Partial, Error: p.MCPError},
		Audio:       deviceAudio{Open: v.AudioOpen, Packets: v.AudioPackets, Dropped: v.AudioDropped},
		Credentials: deviceCredentials{v.Credentials.Generation, stamp(v.Credentials.PreviousUntil)},
		FirstSeen:   stamp(d.FirstSeen), LastSeen: stamp(p.LastSeen)}
	if body.Labels == nil {
		body.Labels = map[string]string{}
	}
	if p.Online {
		body.ConnectedAt = stamp(p.ConnectedAt)
	}
	return body
}

// DevicePath names a device in a path.
type DevicePath struct {
	Device string `path:"device" doc:"Device id: a MAC address in any notation, or the device's own name."`
}

type listDevicesInput struct {
	Page
	State     string `query:"state" enum:"online,offline,pending,contested" doc:"pending: waits for approval, itself or with another Client-Id. contested: a cloned id, fought over now; other filters do not apply then."`
	Transport string `query:"transport" enum:"websocket,mqtt"`
	Board     string `query:"board"`
	Firmware  string `query:"firmware"`
	Label     string `query:"label" doc:"key, or key=value."`
	Q         string `query:"q" doc:"Part of id, name or board, without regard to case."`
}

type patchDeviceInput struct {
	DevicePath
	Body deviceEdit
}

// deviceEdit is what an operator may write on a device.
type deviceEdit struct {
	Name      *string           `json:"name,omitempty" doc:"At most 128 bytes."`
	Labels    map[string]string `json:"labels,omitempty" doc:"Replaces all labels; at most 32."`
	Transport *string           `json:"transport,omitempty" enum:"websocket,mqtt," doc:"What the device is offered at its next boot; empty for the node's default."`
}

// patchedDevice is the device, and when the change reaches it.
type patchedDevice struct {
	device
	Applies string `json:"applies,omitempty" doc:"next boot, if the transport was given."`
}

type answer[T any] struct{ Body T }

func (s *Server) deviceRoutes() {
	unknown := []devices.Code{devices.CodeDeviceUnknown}
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/devices", about{id: "listDevices", scope: access.ScopeRead, tag: tagDevices, summary: "List devices",
		answer: "A page, in order of id.", codes: []devices.Code{devices.CodeUnavailable}}), s.listDevices)
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/devices/{device}", about{id: "getDevice", scope: access.ScopeRead, tag: tagDevices, summary: "Get a device",
		answer: "The device.", codes: append(unknown, devices.CodeUnavailable)}), s.getDevice)
	huma.Register(s.api, s.operation(http.MethodPatch, "/v1/devices/{device}", about{id: "editDevice", scope: access.ScopeWrite, tag: tagDevices, summary: "Change a device",
		text:   "Members left out stay as they are.",
		answer: "The device, changed.", codes: append(unknown, devices.CodeTooLarge)}), s.editDevice)
	huma.Register(s.api, s.operation(http.MethodDelete, "/v1/devices/{device}", about{id: "forgetDevice", scope: access.ScopeWrite, tag: tagDevices, summary: "Forget a device",
		text:   "Removes the device and its history, and ends its session. Credentials it still holds stay dead.",
		status: http.StatusNoContent, answer: "Forgotten.", codes: append(unknown, devices.CodeUnavailable)}), s.forgetDevice)
	huma.Register(s.api, s.operation(http.MethodPost, "/v1/devices/{device}/approve", about{id: "approveDevice", scope: access.ScopeWrite, tag: tagDevices, summary: "Approve a device",
		text:   "Admits a waiting device, or the waiting Client-Id of a known one. Instead of its id, the six-digit code that the device speaks will do.",
		answer: "The device, admitted.", codes: unknown}), s.approveDevice)
	huma.Register(s.api, s.operation(http.MethodPost, "/v1/devices/{device}/revoke", about{id: "revokeDevice", scope: access.ScopeWrite, tag: tagDevices, summary: "Revoke a device",
		text:   "Makes its credentials worthless and ends its session; it waits for approval at its next OTA check.",
		status: http.StatusNoContent, answer: "Revoked.", codes: unknown}), s.revokeDevice)
}

func (s *Server) listDevices(ctx context.Context, in *listDevicesInput) (*answer[list[device]], error) {
	after, err := parseCursor(in.Cursor)
	if err != nil {
		return nil, err
	}
	views, more, err := s.opt.Service.List(ctx, devices.Query{State: in.State, Transport: in.Transport, Board: in.Board, Firmware: in.Firmware,
		Label: in.Label, Selector: caller(ctx).Who.Devices, Text: in.Q, After: devices.ID(after), Limit: in.Limit})
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	page := list[device]{Items: make([]device, len(views))}
	for i, v := range views {
		page.Items[i] = newDevice(v)
	}
	if len(views) > 0 && hasMore(len(views), in.Limit, more) {
		page.NextCursor = newCursor(page.Items[len(views)-1].ID)
	}
	return &answer[list[device]]{page}, nil
}

func (s *Server) getDevice(ctx context.Context, in *DevicePath) (*answer[device], error) {
	id, err := parseDevice(in.Device)
	if err != nil {
		return nil, err
	}
	return s.show(ctx, id)
}

func (s *Server) show(ctx context.Context, id devices.ID) (*answer[device], error) {
	v, err := s.opt.Service.Get(ctx, id)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &answer[device]{newDevice(v)}, nil
}

func (s *Server) editDevice(ctx context.Context, in *patchDeviceInput) (*answer[patchedDevice], error) {
	id, err := parseDevice(in.Device)
	if err != nil {
		return nil, err
	}
	edit := devices.Edit{Name: in.Body.Name}
	if in.Body.Labels != nil {
		edit.Labels = &in.Body.Labels
	}
	applies := ""
	var changed []string
	if edit.Name != nil {
		changed = append(changed, "name")
	}
	if edit.Labels != nil {
		changed = append(changed, "labels "+access.Selector(in.Body.Labels).String())
	}
	if t := in.Body.Transport; t != nil {
		changed = append(changed, "transport")
		prefer := devices.Transport(*t)
		edit.Prefer = &prefer
		applies = "next boot"
	}
	err = s.opt.Service.Edit(id, edit)
	s.opt.Service.NoteChange(caller(ctx), "edit", id, strings.Join(changed, ", "), err)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	after, err := s.opt.Service.Get(ctx, id)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &answer[patchedDevice]{patchedDevice{newDevice(after), applies}}, nil
}

func (s *Server) forgetDevice(ctx context.Context, in *DevicePath) (*struct{}, error) {
	id, err := parseDevice(in.Device)
	if err != nil {
		return nil, err
	}
	err = s.opt.Service.Forget(ctx, id)
	s.opt.Service.NoteChange(caller(ctx), "forget", id, "", err)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return nil, nil
}

// spokenCode is what a waiting device speaks.
var spokenCode = regexp.MustCompile(`^[0-9]{6}$`)

func (s *Server) approveDevice(ctx context.Context, in *DevicePath) (*answer[device], error) {
	by := caller(ctx)
	if by.Who.Limited() && spokenCode.MatchString(in.Device) {
		// It may be that of a device which the key is not for.
		return nil, newProblem(&devices.Error{Code: devices.CodeForbidden, Rule: access.RuleDevices, Detail: "a key for some devices approves by device id, not by code"})
	}
	id, err := s.opt.Service.Approve(in.Device)
	s.opt.Service.NoteChange(by, "approve", cmp.Or(id, devices.ID(in.Device)), "", err)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return s.show(ctx, id)
}

func (s *Server) revokeDevice(ctx context.Context, in *DevicePath) (*struct{}, error) {
	id, err := parseDevice(in.Device)
	if err != nil {
		return nil, err
	}
	err = s.opt.Service.Revoke(id)
	s.opt.Service.NoteChange(caller(ctx), "revoke", id, "", err)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return nil, nil
}
