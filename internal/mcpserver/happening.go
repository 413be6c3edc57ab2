package mcpserver

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// maxEventRaw is how many bytes of an event's payload are shown at most.
const maxEventRaw = 4 << 10

type eventArgs struct {
	Device string `json:"device"`
	Type   string `json:"type"`
	Limit  int    `json:"limit"`
}

type happening struct {
	Type   devices.EventKind `json:"type"`
	Device devices.ID        `json:"device"`
	Time   string            `json:"time,omitempty"`
	Data   json.RawMessage   `json:"data,omitempty"`
}

// internals are members of every event that say nothing to a model.
var internals = []string{"device", "node", "session", "epoch", "seq", "time", "client_id"}

// newHappening is an event as models see it.
func newHappening(e devices.StreamEvent) happening {
	h := happening{Type: e.Kind, Device: e.Device}
	if len(e.Data) > maxEventRaw {
		return h
	}
	kept := []byte{'{'}
	walk := jsonspan.Object(e.Data)
	for walk.Next() {
		key := string(walk.Key())
		if key == "time" {
			text, _ := jsonspan.String(walk.Value())
			h.Time = clean(text, maxTitle)
		}
		if slices.Contains(internals, key) {
			continue
		}
		if len(kept) > 1 {
			kept = append(kept, ',')
		}
		kept = append(append(jsonspan.AppendString(kept, key), ':'), walk.Value()...)
	}
	kept = append(kept, '}')
	if data, note := appendSchema(nil, kept, 0); walk.Err() == nil && note == "" && len(data) > len("{}") { // the same bounds suit any words of a device
		h.Data = data
	}
	return h
}

var eventKinds = []devices.EventKind{devices.EventOnline, devices.EventOffline, devices.EventCatalog, devices.EventNotification, devices.EventPhoto,
	devices.EventPending, devices.EventContested}

func (s *Server) recentEvents(ctx context.Context, _ *mcp.CallToolRequest, args eventArgs) (*mcp.CallToolResult, error) {
	limit, err := within("limit", args.Limit, 20, 100)
	if err != nil {
		return nil, err
	}
	q := devices.EventQuery{Kind: devices.EventKind(args.Type)}
	if args.Type != "" && !slices.Contains(eventKinds, q.Kind) {
		return nil, badArguments("type is one of online, offline, catalog, notifications, photo, pending, contested")
	}
	if args.Device != "" {
		if q.Device, err = s.deviceOf(ctx, visitOf(ctx).by(), args.Device); err != nil {
			return nil, err
		}
	}
	events, err := s.events(ctx, visitOf(ctx).by(), q, limit)
	if err != nil {
		return nil, err
	}
	return structured(struct {
		Events []happening `json:"events"`
	}{events}), nil
}

// events are the last ones that a caller may see.
func (s *Server) events(ctx context.Context, by access.By, q devices.EventQuery, limit int) ([]happening, error) {
	if err := s.opt.Service.Permit(ctx, by, access.ScopeEvents, q.Device); err != nil {
		return nil, err
	}
	recent, err := s.opt.Events.Recent(ctx, q, limit, func(e devices.StreamEvent) bool {
		return s.opt.Service.Permit(ctx, by, access.ScopeEvents, e.Device) == nil
	})
	if err != nil {
		return nil, err
	}
	out := []happening{}
	for _, e := range recent {
		out = append(out, newHappening(e))
	}
	return out, nil
}
