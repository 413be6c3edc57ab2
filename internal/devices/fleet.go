package devices

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// State is a device's state as lists show it.
type State string

// States.
const (
	StateOnline    State = "online"
	StateOffline   State = "offline"
	StatePending   State = "pending"
	StateContested State = "contested"
)

// View is all there is to say about one device.
type View struct {
	Device       Device
	Presence     Presence
	State        State
	CatalogState CatalogState
	AudioOpen    bool
	AudioPackets uint64
	AudioDropped uint64
	Credentials  Credentials
}

// Get describes one device: as the node that holds it knows it, else from
// memory, with what the database adds when it answers.
func (s *Service) Get(ctx context.Context, id ID) (View, error) {
	v, err := s.get(ctx, id)
	v.Credentials = s.credentials(id)
	return v, err
}

func (s *Service) get(ctx context.Context, id ID) (View, error) {
	if x := s.hub.session(id); x != nil {
		return x.view(), nil
	}
	v, heldErr := s.heldBriefly(ctx, id)
	if heldErr == nil {
		return v, nil
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout) // a time of its own: that of the holder may be over
	defer cancel()
	row, err := s.ports.Records.Find(ctx, id)
	switch {
	case err == nil:
		return s.view(row), nil
	case errors.Is(heldErr, context.DeadlineExceeded):
		return View{}, &Error{Code: CodeUnavailable, Part: "node", Detail: "the node that holds the device does not answer, nor does the database; try again"}
	case s.hub.get(id) != nil: // not written yet, or the database is away
		return s.view(Row{Device: *s.hub.get(id).device.Load()}), nil
	case errors.Is(err, ErrNotFound):
		return View{}, fail(CodeDeviceUnknown, "no device %s is known", id)
	}
	return View{}, err
}

// heldBriefly asks the node that holds the device how it is connected. Its error
// is ErrNoHolder if there is none, and context.DeadlineExceeded if there is one
// which takes its time.
func (s *Service) heldBriefly(ctx context.Context, id ID) (View, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	v, err := s.held(ctx, id, AskView)
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	return v, err
}

// List describes devices in id order, at most q.Limit; more tells whether
// others follow.
func (s *Service) List(ctx context.Context, q Query) (views []View, more bool, err error) {
	if q.State == string(StateContested) {
		return s.listContested(ctx, q)
	}
	limit := q.Limit
	for {
		q.Limit = limit - len(views) + 1 // one more row than asked for tells whether a page follows
		rows, err := s.ports.Records.List(ctx, q)
		if err != nil {
			return nil, false, fmt.Errorf("list devices: %w", err)
		}
		whole := len(rows) < q.Limit
		for _, row := range rows {
			if len(views) == limit {
				return views, true, nil
			}
			q.After = row.Device.ID
			// Labels that changed a moment ago are not in the database yet.
			if v := s.view(row); q.Selector.Matches(string(v.Device.ID), v.Device.Labels) {
				v.Credentials = s.credentials(row.Device.ID)
				views = append(views, v)
			}
		}
		if whole || len(rows) == 0 {
			return views, false, nil
		}
	}
}

// listContested finds the contested devices in memory, where alone that state
// is kept; they are few, so each is looked up and the other filters do not
// apply.
func (s *Service) listContested(ctx context.Context, q Query) (views []View, more bool, err error) {
	var ids []ID
	s.hub.each(func(e *entry) {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.id > q.After && e.contestedLocked(time.Now()) && q.Selector.Matches(string(e.id), e.device.Load().Labels) {
			ids = append(ids, e.id)
		}
	})
	slices.Sort(ids)
	for _, id := range ids[:min(len(ids), q.Limit)] {
		v, err := s.Get(ctx, id)
		if err != nil {
			return nil, false, err
		}
		views = append(views, v)
	}
	return views, len(ids) > q.Limit, nil
}

// view overlays a stored row with what this node knows better.
func (s *Service) view(row Row) View {
	e := s.hub.get(row.Device.ID)
	if p := row.Presence; s.cfg.Alive != nil && p.Online && p.Node != s.cfg.Node && (e == nil || e.session.Load() == nil) {
		v := View{Device: row.Device, Presence: p, State: StateOnline, CatalogState: catalogStateOf(p)}
		if p.MCP == MCPReady {
			v.CatalogState = CatalogReady
		}
		return v // another node holds it
	}
	if e == nil {
		return View{Device: row.Device, Presence: row.Presence, State: StateOffline, CatalogState: catalogStateOf(row.Presence)}
	}
	if x := e.session.Load(); x != nil {
		return x.view()
	}
	v := View{Device: *e.device.Load(), Presence: row.Presence, State: StateOffline}
	e.mu.Lock()
	v.Presence.Catalog, v.Presence.Partial = e.catalog, e.partial
	contested := e.contestedLocked(time.Now())
	e.mu.Unlock()
	if cat := s.catalogs.get(v.Presence.Catalog); cat != nil {
		v.Presence.Tools = len(cat.Tools)
	}
	v.CatalogState = catalogStateOf(v.Presence)
	switch {
	case contested:
		v.State = StateContested
	case v.Device.Admission != AdmissionMember || v.Device.PendingID != "":
		v.State = StatePending
	}
	v.Presence.Online, v.Presence.Transport, v.Presence.Session = false, TransportNone, ""
	if v.Presence.LastSeen.Before(v.Device.CheckedAt) {
		v.Presence.LastSeen = v.Device.CheckedAt
	}
	return v
}

// catalogStateOf is the catalog state of a device without a session.
func catalogStateOf(p Presence) CatalogState {
	switch {
	case p.MCP == MCPNone:
		return CatalogNone
	case p.Catalog != (Hash{}):
		return CatalogStale
	case p.MCP == MCPError || p.MCP == MCPUnresponsive:
		return CatalogError
	}
	return CatalogUnknown
}

func (x *Session) view() View {
	e := x.entry
	e.mu.Lock()
	contested := e.contestedLocked(time.Now())
	e.mu.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	seq := x.seq
	v := View{Device: *e.device.Load(), Presence: x.presenceLocked(x.closed == ""), State: StateOnline, CatalogState: x.catalogState,
		AudioPackets: x.audioPackets, AudioDropped: x.audioDropped}
	if c := e.conversation.Load(); c != nil {
		v.AudioOpen = true
		v.AudioPackets += c.received.Load()
		v.AudioDropped += c.dropped.Load()
	}
	x.seq = seq // a look takes no place in the order of effects
	if x.catalog != nil {
		v.Presence.Catalog, v.Presence.Partial, v.Presence.Tools = x.catalog.Hash, x.partial, len(x.catalog.Tools)
	}
	if contested {
		v.State = StateContested
	}
	return v
}

// known returns the entry of a device that an operator decides about.
func (s *Service) known(id ID) (*entry, error) {
	if e := s.hub.get(id); e != nil {
		return e, nil
	}
	if !s.loaded.Load() {
		return nil, &Error{Code: CodeUnavailable, Part: "database", Detail: "this node has not read the fleet's devices yet; try again"}
	}
	return nil, fail(CodeDeviceUnknown, "no device %s is known", id)
}

// Edit is what an operator may write on a device; nil leaves a field alone.
type Edit struct {
	Name   *string
	Labels *map[string]string
	Prefer *Transport
}

// Limits of an Edit.
const (
	MaxName   = 128
	MaxLabels = 32
)

// Edit changes a device's name, labels or preferred transport.
func (s *Service) Edit(id ID, edit Edit) error {
	e, err := s.known(id)
	if err != nil {
		return err
	}
	if edit.Name != nil && len(*edit.Name) > MaxName {
		return fail(CodeBadRequest, "name has %d bytes, at most %d are allowed", len(*edit.Name), MaxName)
	}
	if edit.Labels != nil {
		if len(*edit.Labels) > MaxLabels {
			return fail(CodeBadRequest, "%d labels, at most %d are allowed", len(*edit.Labels), MaxLabels)
		}
		for k, v := range *edit.Labels {
			if k == "" || SubjectTokens(k) != k || len(k) > 63 || len(v) > MaxName {
				return fail(CodeBadRequest, "label %q: keys are 1 to 63 of [A-Za-z0-9_-], values at most %d bytes", k, MaxName)
			}
		}
	}
	d := e.update(func(d *Device) {
		if edit.Name != nil {
			d.Name = *edit.Name
		}
		if edit.Labels != nil {
			d.Labels = *edit.Labels
		}
		if edit.Prefer != nil {
			d.Prefer = *edit.Prefer
		}
	})
	s.saveDevice(d)
	s.ports.Directory.Tell(News{Device: d})
	s.awaitWritten(id)
	return nil
}

// Tools lists a device's tools: verified if it is connected and ready, else
// what is known from before. User-only tools only if user.
func (s *Service) Tools(ctx context.Context, id ID, user bool) (ToolList, error) {
	v, err := s.Get(ctx, id)
	if err != nil {
		return ToolList{}, err
	}
	return s.toolsOf(ctx, v, user)
}

func (s *Service) toolsOf(ctx context.Context, v View, user bool) (ToolList, error) {
	list := ToolList{Catalog: v.Presence.Catalog, State: v.CatalogState, Partial: v.Presence.Partial, Tools: []json.RawMessage{}}
	if v.Presence.Catalog == (Hash{}) {
		return list, nil
	}
	cat, err := s.Catalog(ctx, v.Presence.Catalog)
	if err != nil {
		return ToolList{}, err
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
func (s *Service) Catalog(ctx context.Context, h Hash) (*Catalog, error) {
	if cat := s.catalogs.get(h); cat != nil {
		return cat, nil
	}
	text, err := s.ports.Catalogs.Catalog(ctx, h)
	if errors.Is(err, ErrNotFound) {
		return nil, fail(CodeNotFound, "no catalog %s is stored", h)
	}
	if err != nil {
		return nil, fmt.Errorf("read catalog: %w", err)
	}
	return NewCatalog(text.Tools)
}

// History returns which catalogs a device had, newest first.
func (s *Service) History(ctx context.Context, id ID, epoch Epoch, seq int64, limit int) ([]HistoryEntry, error) {
	entries, err := s.ports.Catalogs.History(ctx, id, epoch, seq, limit)
	if err != nil {
		return nil, fmt.Errorf("read history: %w", err)
	}
	return entries, nil
}

// Publish sends an event that an adapter made, e.g. of an uploaded photo, as
// one of the device's session if it has one here.
func (s *Service) Publish(e Event) {
	if x := s.hub.session(e.Device); x != nil {
		x.mu.Lock()
		x.seq++
		e.Session, e.Epoch, e.Seq = x.id, x.epoch, x.seq
		x.mu.Unlock()
	}
	s.ports.Publisher.Publish(e)
}

// MemberOf tells whether the device is known and admitted, for adapters that
// act on its behalf.
func (s *Service) MemberOf(id ID) bool {
	e := s.hub.get(id)
	if e == nil {
		return !s.loaded.Load()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.device.Load().Admission == AdmissionMember && !e.revoked
}
