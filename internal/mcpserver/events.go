package mcpserver

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/cleantext"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// maxEventRaw is the largest payload of an event that is shown, in bytes.
const maxEventRaw = 4 << 10

type eventArgs struct {
	Device string `json:"device"`
	Type   string `json:"type"`
	Limit  int    `json:"limit"`
}

type eventInfo struct {
	Type   devices.EventKind `json:"type"`
	Device devices.ID        `json:"device,omitempty"`
	Time   string            `json:"time,omitempty"`
	Data   json.RawMessage   `json:"data,omitempty"`
}

// hiddenMembers are members of events that are of no use to a model.
var hiddenMembers = []string{"device", "node", "session", "epoch", "seq", "time", "client", "client_id", "owner"}

// newEventInfo returns an event as models see it.
func newEventInfo(e devices.StreamEvent) eventInfo {
	h := eventInfo{Type: e.Kind, Device: e.Device}
	if len(e.Data) > maxEventRaw {
		return h
	}
	kept := []byte{'{'}
	walk := jsonspan.Object(e.Data)
	for walk.Next() {
		key := string(walk.Key())
		if key == "time" {
			text, _ := jsonspan.String(walk.Value())
			h.Time = cleantext.Short(text, maxTitle)
		}
		if slices.Contains(hiddenMembers, key) {
			continue
		}
		if len(kept) > 1 {
			kept = append(kept, ',')
		}
		kept = append(append(jsonspan.AppendString(kept, key), ':'), walk.Value()...)
	}
	kept = append(kept, '}')
	if data, note := appendSchema(nil, kept, 0); walk.Err() == nil && note == "" && len(data) > len("{}") { // the limits of schemas also suit the texts of a device
		h.Data = data
	}
	return h
}

func (s *Server) recentEvents(ctx context.Context, _ *mcp.CallToolRequest, args eventArgs) (*mcp.CallToolResult, error) {
	q := devices.EventQuery{Kind: devices.EventKind(args.Type)}
	if args.Device != "" {
		var err error
		if q.Device, err = s.deviceOf(ctx, requestInfoOf(ctx).by(), args.Device); err != nil {
			return nil, err
		}
	}
	if err := q.Check(); err != nil {
		return nil, badArguments(devices.AsError(err).Detail)
	}
	events, err := s.events(ctx, requestInfoOf(ctx).by(), q, cmp.Or(args.Limit, 20))
	if err != nil {
		return nil, err
	}
	return structured(struct {
		Events []eventInfo `json:"events"`
	}{events}), nil
}

// events returns the last events that a caller may see.
func (s *Server) events(ctx context.Context, by access.Principal, q devices.EventQuery, limit int) ([]eventInfo, error) {
	if err := s.opt.Service.Permit(ctx, by, access.ScopeEvents, q.Device); err != nil {
		return nil, err
	}
	recent, err := s.opt.Events.Recent(ctx, q, limit, func(e *devices.StreamEvent) bool {
		return s.opt.Service.PermitEvent(ctx, by, e) == nil // it takes out what the caller may not read
	})
	if err != nil {
		return nil, err
	}
	out := []eventInfo{}
	for _, e := range recent {
		out = append(out, newEventInfo(e))
	}
	return out, nil
}
