package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
)

// holderState is the answer to a Query: the state of a device at its holder beyond the
// database's row, which is older and has no counters. It is sent between nodes:
// members may be added, never changed.
type holderState struct {
	Node         string               `json:"node"`
	Session      string               `json:"session"`
	Epoch        devices.Epoch        `json:"epoch"`
	Seq          int64                `json:"seq"`
	ClientID     string               `json:"client_id"`
	Transport    devices.Transport    `json:"transport"`
	ConnectedAt  time.Time            `json:"connected_at"`
	LastSeen     time.Time            `json:"last_seen"`
	Contested    bool                 `json:"contested,omitempty"`
	MCP          devices.MCPState     `json:"mcp"`
	MCPError     string               `json:"mcp_error,omitempty"`
	Catalog      string               `json:"catalog,omitempty"` // 64 hex digits
	CatalogState devices.CatalogState `json:"catalog_state"`
	Partial      bool                 `json:"partial,omitempty"`
	Tools        int                  `json:"tools"`
	AudioOpen    bool                 `json:"audio_open,omitempty"`
	AudioPackets uint64               `json:"audio_packets"`
	AudioDropped uint64               `json:"audio_dropped"`
}

func holderStateOf(v *devices.View) holderState {
	p := v.Presence
	return holderState{Node: p.Node, Session: p.Session, Epoch: p.Epoch, Seq: p.Seq, ClientID: p.ClientID, Transport: p.Transport,
		ConnectedAt: p.ConnectedAt, LastSeen: p.LastSeen, Contested: v.State == devices.StateContested, MCP: p.MCP, MCPError: p.MCPError,
		Catalog: p.Catalog.String(), CatalogState: v.CatalogState, Partial: p.Partial, Tools: p.Tools,
		AudioOpen: v.AudioOpen, AudioPackets: v.AudioPackets, AudioDropped: v.AudioDropped}
}

// view combines the state with the stored device.
func (h holderState) view(d devices.Device) (devices.View, error) {
	catalog, err := devices.ParseHash(h.Catalog)
	if err != nil {
		return devices.View{}, fmt.Errorf("catalog: %w", err)
	}
	v := devices.View{Device: d, State: devices.StateOnline, CatalogState: h.CatalogState, AudioOpen: h.AudioOpen, AudioPackets: h.AudioPackets, AudioDropped: h.AudioDropped,
		Presence: devices.Presence{Device: d.ID, Epoch: h.Epoch, Seq: h.Seq, Online: true, Node: h.Node, Session: h.Session, ClientID: h.ClientID, Transport: h.Transport,
			ConnectedAt: h.ConnectedAt, LastSeen: h.LastSeen, MCP: h.MCP, MCPError: h.MCPError, Catalog: catalog, Partial: h.Partial, Tools: h.Tools}}
	if h.Contested {
		v.State = devices.StateContested
	}
	return v, nil
}

// Answer answers a query of another node about a device that this node holds. Errors
// are *Error.
func (s *Service) Answer(ctx context.Context, id devices.ID, q devices.Query) ([]byte, error) {
	x := s.Session(id)
	if x == nil {
		return nil, s.AbsentError(ctx, id)
	}
	if q == devices.QueryRefresh {
		if err := x.Refresh(ctx); err != nil {
			return nil, err
		}
	}
	v := x.View()
	return json.Marshal(holderStateOf(&v))
}

// queryHolder queries the node that holds the device; without one the error wraps ErrNoHolder.
func (s *Service) queryHolder(ctx context.Context, id devices.ID, q devices.Query) (devices.View, error) {
	if s.cfg.IsNodeAlive == nil {
		return devices.View{}, devices.ErrNoHolder // there are no other nodes
	}
	data, err := s.ports.Router.Query(ctx, id, q)
	if err != nil {
		return devices.View{}, err
	}
	var h holderState
	if err := json.Unmarshal(data, &h); err != nil {
		return devices.View{}, fmt.Errorf("answer of another node: %w", err)
	}
	device, err := s.device(ctx, id)
	if err != nil {
		return devices.View{}, err
	}
	return h.view(device)
}

// device returns a device without its connection.
func (s *Service) device(ctx context.Context, id devices.ID) (devices.Device, error) {
	if d, ok := s.Device(id); ok {
		return d, nil
	}
	row, err := s.ports.Records.Find(ctx, id)
	return row.Device, err
}

// Refresh lists a connected device's tools again, on whichever node it is, and returns
// them as Tools does. ctx limits the wait.
func (s *Service) Refresh(ctx context.Context, id devices.ID, user bool) (devices.ToolList, error) {
	if x := s.Session(id); x != nil {
		if err := x.Refresh(ctx); err != nil {
			return devices.ToolList{}, err
		}
		return s.toolsOf(ctx, x.View(), user)
	}
	v, err := s.queryHolder(ctx, id, devices.QueryRefresh)
	if err != nil {
		return devices.ToolList{}, s.OrAbsent(ctx, id, err)
	}
	for { // a new list may not have reached the database yet
		list, err := s.toolsOf(ctx, v, user)
		if e := (*devices.Error)(nil); !errors.As(err, &e) || e.Code != devices.CodeNotFound {
			return list, err
		}
		if !clock.Sleep(ctx, session.RefreshPoll) {
			return list, err
		}
	}
}
