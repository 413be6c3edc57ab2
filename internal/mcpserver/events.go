package mcpserver

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
	"fleetd/internal/timespan"
)

// maxEventRaw is the largest payload of an event that is shown, in bytes.
const maxEventRaw = 4 << 10

// eventCall is the type of calls, which are in the audit and not among the events.
const eventCall devices.EventKind = "call"

type eventArgs struct {
	Device   string `json:"device"`
	Type     string `json:"type"`
	Since    string `json:"since"`
	Until    string `json:"until"`
	Everyone bool   `json:"everyone"`
	Limit    int    `json:"limit"`
}

type eventInfo struct {
	Type   devices.EventKind `json:"type"`
	Device devices.ID        `json:"device,omitempty"`
	Time   string            `json:"time,omitempty"`
	*callEvent
	Data json.RawMessage `json:"data,omitempty"`
	Said json.RawMessage `json:"said_by_device,omitempty"`

	at time.Time
}

// saidKinds are events whose data the device has written.
var saidKinds = []devices.EventKind{devices.EventNotification, devices.EventPhoto, devices.EventCatalog}

// hiddenMembers are members of events that are of no use to a model.
var hiddenMembers = []string{"device", "node", "session", "epoch", "seq", "time", "client", "client_id", "owner"}

// timeOf returns the time of an event as it is written, and read; zero if it cannot be read.
func timeOf(event []byte) (text string, at time.Time) {
	text, _ = jsonspan.String(jsonspan.Member(event, "time"))
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		at = time.Time{}
	}
	return text, at
}

// newEventInfo returns an event as models see it.
func newEventInfo(e devices.StreamEvent) eventInfo {
	h := eventInfo{Type: e.Kind, Device: e.Device}
	text, at := timeOf(e.Data)
	h.Time, h.at = cleantext.Short(text, maxTitle), at
	if len(e.Data) > maxEventRaw {
		return h
	}
	kept := []byte{'{'}
	walk := jsonspan.Object(e.Data)
	for walk.Next() {
		key := string(walk.Key())
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
		if slices.Contains(saidKinds, e.Kind) {
			h.Said = data
		} else {
			h.Data = data
		}
	}
	return h
}

func (s *Server) recentEvents(ctx context.Context, _ *mcp.CallToolRequest, args eventArgs) (*mcp.CallToolResult, error) {
	by, limit, now := requestInfoOf(ctx).by(), cmp.Or(args.Limit, 20), clock.Now()
	since, err := timespan.Moment("since", args.Since, now)
	if err != nil {
		return nil, badArguments(err.Error())
	}
	until, err := timespan.Moment("until", args.Until, now)
	if err != nil {
		return nil, badArguments(err.Error())
	}
	var q devices.EventQuery
	if args.Device != "" {
		if q.Device, err = s.deviceOf(ctx, by, args.Device); err != nil {
			return nil, err
		}
	}
	var answer struct {
		Events []eventInfo `json:"events"`
		Back   string      `json:"calls_looked_back_to,omitempty"` // older calls were not looked for
		Hint   string      `json:"hint,omitempty"`
	}
	events := []eventInfo{}
	if q.Kind = devices.EventKind(args.Type); q.Kind != eventCall {
		if err := q.Check(); err != nil {
			return nil, badArguments(devices.AsError(err).Detail)
		}
		if events, err = s.events(ctx, by, q, since, until, limit); err != nil {
			return nil, err
		}
	}
	if q.Kind == "" || q.Kind == eventCall {
		if err := s.opt.Service.Permit(ctx, by, access.ScopeEvents, q.Device); err != nil {
			return nil, err
		}
		calls, back, err := s.calls(ctx, by, q.Device, since, until, args.Everyone, limit)
		switch {
		case err != nil && q.Kind == eventCall:
			return nil, err
		case err != nil: // the events are known
			answer.Hint = "calls are left out: " + devices.AsError(err).Detail
		case !back.IsZero():
			answer.Back = back.UTC().Format(time.RFC3339)
		}
		events = append(events, calls...)
		slices.SortStableFunc(events, func(a, b eventInfo) int { return a.at.Compare(b.at) })
	}
	answer.Events = events[max(0, len(events)-limit):]
	return structured(answer), nil
}

// events returns the last events of a time that a caller may see. A zero time is no bound.
func (s *Server) events(ctx context.Context, by access.Principal, q devices.EventQuery, since, until time.Time, limit int) ([]eventInfo, error) {
	if err := s.opt.Service.Permit(ctx, by, access.ScopeEvents, q.Device); err != nil {
		return nil, err
	}
	recent, err := s.opt.Events.Recent(ctx, q, limit, func(e *devices.StreamEvent) bool {
		if !since.IsZero() || !until.IsZero() {
			_, at := timeOf(e.Data)
			if at.IsZero() || at.Before(since) || !until.IsZero() && at.After(until) {
				return false
			}
		}
		return s.opt.Service.PermitEvent(ctx, by, e) == nil // it takes out what the caller may not read
	})
	if err != nil {
		return nil, err
	}
	out := []eventInfo{}
	for _, e := range recent {
		info := newEventInfo(e)
		if n := len(out); info.at.IsZero() && n > 0 {
			info.at = out[n-1].at
		}
		out = append(out, info)
	}
	return out, nil
}
