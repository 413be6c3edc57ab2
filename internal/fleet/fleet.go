package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/session"
)

// Get returns one device: from the node that holds it, else from the database.
func (s *Service) Get(ctx context.Context, id devices.ID) (devices.View, error) {
	v, err := s.get(ctx, id)
	v.Credentials = s.Credentials(id)
	return v, err
}

func (s *Service) get(ctx context.Context, id devices.ID) (devices.View, error) {
	if x := s.Session(id); x != nil {
		_ = x.AwaitRow(ctx) // without the row, the state in memory is used
		return s.withPendingState(x.View()), nil
	}
	if s.registry.Ready() && !s.registry.Status(id, "").Known {
		if v, ok := s.Pending(id); ok {
			return s.withPendingState(v), nil
		}
		return devices.View{}, registry.UnknownDevice(id)
	}
	v, heldErr := s.queryHolderBriefly(ctx, id)
	if heldErr == nil {
		return s.withPendingState(v), nil
	}
	ctx, cancel := context.WithTimeout(ctx, session.LookupTimeout) // not the context of the query to the holder, which may have ended
	defer cancel()
	row, err := s.ports.Records.Find(ctx, id)
	switch {
	case err == nil:
		return s.view(row), nil
	case errors.Is(heldErr, context.DeadlineExceeded):
		return devices.View{}, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "neither the node that holds the device nor the database answers; try again"}
	}
	return devices.View{}, admission.OrUnknown(id, err)
}

// queryHolderBriefly requests a device's view from the node that holds it. Its error
// is ErrNoHolder if there is none, and context.DeadlineExceeded if the holder does not
// answer within session.LookupTimeout.
func (s *Service) queryHolderBriefly(ctx context.Context, id devices.ID) (devices.View, error) {
	ctx, cancel := context.WithTimeout(ctx, session.LookupTimeout)
	defer cancel()
	v, err := s.queryHolder(ctx, id, devices.QueryView)
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	return v, err
}

// view combines a stored row with the state that this node has in memory.
func (s *Service) view(row devices.Row) devices.View {
	if x := s.Session(row.Device.ID); x != nil {
		v := x.View()
		v.Device.Facts = v.Device.Over(row.Device.Facts) // another node may have written its check after the device has connected here
		return s.withPendingState(v)
	}
	p := row.Presence
	v := devices.View{Device: row.Device, Presence: p, State: devices.StateOffline, CatalogState: session.CatalogStateOf(p)}
	if p.Online && s.IsHeldElsewhere(p) {
		v.State = devices.StateOnline
		if p.MCP == devices.MCPReady {
			v.CatalogState = devices.CatalogReady
		}
		return s.withPendingState(v)
	}
	if p.Online { // outdated: the session here has just ended, or the node is lost
		v.Presence.OfflineSince = p.LastSeen
	}
	v.Dormant = p.Transport == devices.TransportWebSocket
	v.Presence.Online, v.Presence.Transport, v.Presence.Session = false, devices.TransportNone, ""
	return s.withPendingState(v)
}

// withPendingState sets the state of a contested or pending device.
func (s *Service) withPendingState(v devices.View) devices.View {
	now := time.Now()
	switch {
	case s.IsContested(v.Device.ID, now):
		v.State = devices.StateContested
	case v.State == devices.StateOffline && s.IsPending(v.Device.ID):
		v.State = devices.StatePending
	}
	if waiting, ok := s.Pending(v.Device.ID); ok {
		v.Pending = waiting.Pending
	}
	return v
}

// Tools returns a device's tools: verified if it is connected and ready, else the
// last known ones. user includes user-only tools.
func (s *Service) Tools(ctx context.Context, id devices.ID, user bool) (devices.ToolList, error) {
	v, err := s.Get(ctx, id)
	if err != nil {
		return devices.ToolList{}, err
	}
	return s.toolsOf(ctx, v, user)
}

func (s *Service) toolsOf(ctx context.Context, v devices.View, user bool) (devices.ToolList, error) {
	list := devices.ToolList{Catalog: v.Presence.Catalog, State: v.CatalogState, Partial: v.Presence.Partial, Tools: []json.RawMessage{}}
	if v.Presence.Catalog == (devices.Hash{}) {
		return list, nil
	}
	cat, err := s.Catalog(ctx, v.Presence.Catalog)
	if err != nil {
		return devices.ToolList{}, err
	}
	for i := range cat.Tools {
		if t := &cat.Tools[i]; user || !t.UserOnly {
			list.Tools = append(list.Tools, t.Raw)
		}
	}
	return list, nil
}

// History returns the catalogs that a device had, newest first.
func (s *Service) History(ctx context.Context, id devices.ID, epoch devices.Epoch, seq int64, limit int) ([]devices.HistoryEntry, error) {
	entries, err := s.ports.Catalogs.History(ctx, id, epoch, seq, limit)
	if err != nil {
		return nil, fmt.Errorf("read history: %w", err)
	}
	return entries, nil
}
