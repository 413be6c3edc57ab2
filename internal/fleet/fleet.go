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

// Get describes one device: as the node that holds it knows it, else as the
// database does.
func (s *Service) Get(ctx context.Context, id devices.ID) (devices.View, error) {
	v, err := s.get(ctx, id)
	v.Credentials = s.Credentials(id)
	return v, err
}

func (s *Service) get(ctx context.Context, id devices.ID) (devices.View, error) {
	if x := s.Session(id); x != nil {
		_ = x.AwaitRow(ctx) // without it what this node knows has to do
		return s.marked(x.View()), nil
	}
	if s.registry.Ready() && !s.registry.Standing(id, "").Known {
		if v, ok := s.Waiting(id); ok {
			return s.marked(v), nil
		}
		return devices.View{}, registry.Unknown(id)
	}
	v, heldErr := s.heldBriefly(ctx, id)
	if heldErr == nil {
		return s.marked(v), nil
	}
	ctx, cancel := context.WithTimeout(ctx, session.LookupTimeout) // a time of its own: that of the holder may be over
	defer cancel()
	row, err := s.ports.Records.Find(ctx, id)
	switch {
	case err == nil:
		return s.view(row), nil
	case errors.Is(heldErr, context.DeadlineExceeded):
		return devices.View{}, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "the node that holds the device does not answer, nor does the database; try again"}
	}
	return devices.View{}, admission.OrUnknown(id, err)
}

// heldBriefly asks the node that holds the device how it is connected. Its error
// is ErrNoHolder if there is none, and context.DeadlineExceeded if there is one
// which takes its time.
func (s *Service) heldBriefly(ctx context.Context, id devices.ID) (devices.View, error) {
	ctx, cancel := context.WithTimeout(ctx, session.LookupTimeout)
	defer cancel()
	v, err := s.held(ctx, id, devices.AskView)
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	return v, err
}

// view is a stored row with what this node knows better.
func (s *Service) view(row devices.Row) devices.View {
	if x := s.Session(row.Device.ID); x != nil {
		return s.marked(x.View())
	}
	p := row.Presence
	v := devices.View{Device: row.Device, Presence: p, State: devices.StateOffline, CatalogState: session.CatalogStateOf(p)}
	if p.Online && s.Elsewhere(p) {
		v.State = devices.StateOnline
		if p.MCP == devices.MCPReady {
			v.CatalogState = devices.CatalogReady
		}
		return s.marked(v)
	}
	if p.Online { // it is not: this node held it a moment ago, or a node that is lost
		v.Presence.OfflineSince = p.LastSeen
	}
	v.Presence.Online, v.Presence.Transport, v.Presence.Session = false, devices.TransportNone, ""
	return s.marked(v)
}

// marked shows that a device is contested, or waits.
func (s *Service) marked(v devices.View) devices.View {
	now := time.Now()
	switch {
	case s.IsContested(v.Device.ID, now):
		v.State = devices.StateContested
	case v.State == devices.StateOffline && s.Waits(v.Device.ID):
		v.State = devices.StatePending
	}
	if waiting, ok := s.Waiting(v.Device.ID); ok {
		v.Pending = waiting.Pending
	}
	return v
}

// Tools lists a device's tools: verified if it is connected and ready, else
// what is known from before. User-only tools only if user.
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

// History returns which catalogs a device had, newest first.
func (s *Service) History(ctx context.Context, id devices.ID, epoch devices.Epoch, seq int64, limit int) ([]devices.HistoryEntry, error) {
	entries, err := s.ports.Catalogs.History(ctx, id, epoch, seq, limit)
	if err != nil {
		return nil, fmt.Errorf("read history: %w", err)
	}
	return entries, nil
}
