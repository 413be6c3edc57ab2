package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/registry"
)

// Get describes one device: as the node that holds it knows it, else as the
// database does.
func (s *Service) Get(ctx context.Context, id devices.ID) (devices.View, error) {
	v, err := s.get(ctx, id)
	v.Credentials = s.credentials(id)
	return v, err
}

func (s *Service) get(ctx context.Context, id devices.ID) (devices.View, error) {
	if x := s.hub.session(id); x != nil {
		_ = x.awaitRow(ctx) // without it what this node knows has to do
		return s.marked(x.view()), nil
	}
	if s.registry.Ready() && !s.registry.Standing(id, "").Known {
		if p := s.pending.clients(id); len(p) > 0 {
			return s.marked(s.pendingView(id, p[len(p)-1])), nil
		}
		return devices.View{}, registry.Unknown(id)
	}
	v, heldErr := s.heldBriefly(ctx, id)
	if heldErr == nil {
		return s.marked(v), nil
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout) // a time of its own: that of the holder may be over
	defer cancel()
	row, err := s.ports.Records.Find(ctx, id)
	switch {
	case err == nil:
		return s.view(row), nil
	case errors.Is(heldErr, context.DeadlineExceeded):
		return devices.View{}, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "the node that holds the device does not answer, nor does the database; try again"}
	}
	return devices.View{}, orUnknown(id, err)
}

// orUnknown is an error of Records.Find.
func orUnknown(id devices.ID, err error) error {
	if errors.Is(err, devices.ErrNotFound) {
		return registry.Unknown(id)
	}
	return err
}

// heldBriefly asks the node that holds the device how it is connected. Its error
// is ErrNoHolder if there is none, and context.DeadlineExceeded if there is one
// which takes its time.
func (s *Service) heldBriefly(ctx context.Context, id devices.ID) (devices.View, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	v, err := s.held(ctx, id, devices.AskView)
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	return v, err
}

// view is a stored row with what this node knows better.
func (s *Service) view(row devices.Row) devices.View {
	if x := s.hub.session(row.Device.ID); x != nil {
		return s.marked(x.view())
	}
	p := row.Presence
	v := devices.View{Device: row.Device, Presence: p, State: devices.StateOffline, CatalogState: catalogStateOf(p)}
	if p.Online && s.elsewhere(p) {
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
	case s.contested(v.Device.ID, now):
		v.State = devices.StateContested
	case v.State == devices.StateOffline && s.pending.waits(v.Device.ID, now):
		v.State = devices.StatePending
	}
	if waiting := s.pending.clients(v.Device.ID); len(waiting) > 0 {
		v.Pending = waiting[len(waiting)-1].clientID
	}
	return v
}

// pendingView is a device that waits and never was a member.
func (s *Service) pendingView(id devices.ID, p pending) devices.View {
	d := devices.Device{ID: id, Board: p.facts.Board, Firmware: p.facts.Firmware, ELF: p.facts.ELF, Chip: p.facts.Chip,
		Language: p.facts.Language, Serial: p.facts.Serial, ActivateV2: p.facts.ActivateV2, FirstSeen: p.facts.CheckedAt, CheckedAt: p.facts.CheckedAt}
	return devices.View{Device: d, Presence: devices.Presence{Device: id, LastSeen: p.facts.CheckedAt}, State: devices.StatePending,
		CatalogState: devices.CatalogUnknown, Pending: p.clientID}
}

// catalogStateOf is the catalog state of a device without a session.
func catalogStateOf(p devices.Presence) devices.CatalogState {
	switch {
	case p.MCP == devices.MCPNone:
		return devices.CatalogNone
	case p.Catalog != (devices.Hash{}):
		return devices.CatalogStale
	case p.MCP == devices.MCPError || p.MCP == devices.MCPUnresponsive:
		return devices.CatalogError
	}
	return devices.CatalogUnknown
}

func (x *Session) view() devices.View {
	e := x.entry
	x.mu.Lock()
	defer x.mu.Unlock()
	seq := x.seq
	v := devices.View{Device: *e.device.Load(), Presence: x.presenceLocked(x.closed == ""), State: devices.StateOnline, CatalogState: x.catalogState,
		AudioPackets: x.audioPackets, AudioDropped: x.audioDropped}
	if c := e.conversation.Load(); c != nil {
		v.AudioOpen = true
		received, dropped := c.Audio()
		v.AudioPackets += received
		v.AudioDropped += dropped
	}
	x.seq = seq // a look takes no place in the order of effects
	v.Presence.KeepCatalog = false
	if x.catalog != nil {
		v.Presence.Catalog, v.Presence.Partial, v.Presence.Tools = x.catalog.Hash, x.partial, len(x.catalog.Tools)
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

// Catalog returns one tool list, from memory if some device of this node has
// had it.
func (s *Service) Catalog(ctx context.Context, h devices.Hash) (*catalog.Catalog, error) {
	if cat := s.catalogs.Get(h); cat != nil {
		return cat, nil
	}
	text, err := s.ports.Catalogs.Catalog(ctx, h)
	if errors.Is(err, devices.ErrNotFound) {
		return nil, devices.Errorf(devices.CodeNotFound, "no catalog %s is stored", h)
	}
	if err != nil {
		return nil, fmt.Errorf("read catalog: %w", err)
	}
	return catalog.New(text.Tools)
}

// History returns which catalogs a device had, newest first.
func (s *Service) History(ctx context.Context, id devices.ID, epoch devices.Epoch, seq int64, limit int) ([]devices.HistoryEntry, error) {
	entries, err := s.ports.Catalogs.History(ctx, id, epoch, seq, limit)
	if err != nil {
		return nil, fmt.Errorf("read history: %w", err)
	}
	return entries, nil
}

// Publish sends an event that an adapter made, e.g. of an uploaded photo, as
// one of the device's session if it has one here.
func (s *Service) Publish(e devices.Event) {
	if x := s.hub.session(e.Device); x != nil {
		x.mu.Lock()
		x.seq++
		e.Session, e.Epoch, e.Seq = x.id, x.epoch, x.seq
		x.mu.Unlock()
	}
	s.ports.Publisher.Publish(e)
}
