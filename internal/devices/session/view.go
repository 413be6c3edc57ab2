package session

import "fleetd/internal/devices"

// CatalogStateOf returns the catalog state of a device without a session.
func CatalogStateOf(p devices.Presence) devices.CatalogState {
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

func (x *Session) View() devices.View {
	e := x.entry
	x.mu.Lock()
	defer x.mu.Unlock()
	seq := x.seq
	v := devices.View{Device: e.device(), Presence: x.presenceLocked(x.closed == ""), State: devices.StateOnline, CatalogState: x.catalogState,
		AudioOpen: x.isTalkingLocked()}
	if x.use != nil {
		v.AudioPackets, v.AudioDropped = x.use.audioPackets, x.use.audioDropped
	}
	if c := e.conversation.Load(); c != nil {
		received, dropped := c.Audio()
		v.AudioPackets += received
		v.AudioDropped += dropped
	}
	x.seq = seq // reading does not use up a sequence number
	v.Presence.KeepCatalog = false
	if x.catalog != nil {
		v.Presence.Catalog, v.Presence.Partial, v.Presence.Tools = x.catalog.Hash, x.partial, len(x.catalog.Tools)
	}
	return v
}

// Publish publishes an event of an adapter, e.g. of an uploaded photo, with the device's
// session if it has one here.
func (s *Hub) Publish(e devices.Event) {
	if x := s.table.session(e.Device); x != nil {
		x.mu.Lock()
		x.seq++
		e.Session, e.Epoch, e.Seq = x.id, x.epoch, x.seq
		x.mu.Unlock()
	}
	s.ports.Publisher.Publish(e)
}
