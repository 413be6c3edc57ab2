package mcpserver

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// Limits of the history.
const (
	maxRemembered = 1000    // devices of a caller, and calls
	maxShown      = 32      // of one device
	maxValueBytes = 64      // of one value
	maxCallBytes  = 1 << 10 // of the arguments of one call
)

// history keeps what this node has shown to callers: what devices said about themselves in their last answers, and the arguments of
// calls. The audit has who called what, on all nodes and for longer; this is what the audit leaves out, in memory alone.
type history struct {
	shown *lru[shownKey, []shownValue]
	calls *lru[string, pastCall]
}

// shownKey is a device as one caller sees it: nobody learns a value from the answer to another caller.
type shownKey struct {
	caller string
	device devices.ID
}

// shownValue is a value in an answer, such as audio_speaker.volume.
type shownValue struct {
	path  []string
	value json.RawMessage // nil: a call has changed it since
	at    time.Time
}

// pastCall is what the audit does not keep of a call.
type pastCall struct {
	arguments json.RawMessage
	before    map[string]json.RawMessage // the values that it changed, as the device showed them last
	age       time.Duration              // of the oldest of them when the call was made
}

func newHistory() *history {
	return &history{newLRU[shownKey, []shownValue](maxRemembered), newLRU[string, pastCall](maxRemembered)}
}

// answered notes a call with its answer.
func (h *history) answered(c *devices.ToolCall, r *devices.ToolResult, texts []string) {
	key := shownKey{c.Principal.Key(), c.Device}
	shown, now := slices.Clone(h.shown.get(key)), clock.Now()
	past := pastCall{}
	if len(c.Arguments) > 0 && len(c.Arguments) <= maxCallBytes {
		past.arguments = audit.Redact(nil, c.Arguments)
	}
	for walk := jsonspan.Object(c.Arguments); walk.Next(); {
		name := string(walk.Key())
		at := bestValue(shown, name, c.Tool)
		if at < 0 || shown[at].value == nil || audit.IsSecret(name) {
			continue
		}
		if past.before == nil {
			past.before = map[string]json.RawMessage{}
		}
		past.before[cleantext.Short(name, maxTitle)], past.age = shown[at].value, max(past.age, now.Sub(shown[at].at))
		shown[at].value = nil
	}
	if r.Call != "" && len(past.arguments) > 0 {
		h.calls.put(r.Call, past)
	}
	if !r.IsError {
		for _, text := range texts {
			shown = appendValues(shown, nil, []byte(text), now)
		}
	}
	if len(shown) > 0 {
		h.shown.put(key, shown)
	}
}

// bestValue returns the place of the value that an argument of a tool sets: it has the name of the argument, and most words of its
// path in the name of the tool. It is -1 if there is none.
func bestValue(shown []shownValue, name, tool string) int {
	best, most := -1, -1
	for i := range shown {
		path := shown[i].path
		if path[len(path)-1] != name {
			continue
		}
		n := 0
		for _, part := range path {
			if strings.Contains(tool, part) {
				n++
			}
		}
		if n > most {
			best, most = i, n
		}
	}
	return best
}

// appendValues appends the short values of an answer, in place of older ones with their paths.
func appendValues(list []shownValue, path []string, document []byte, now time.Time) []shownValue {
	if jsonspan.KindOf(document) != jsonspan.KindObject || len(path) > 3 {
		return list
	}
	for walk := jsonspan.Object(document); walk.Next(); {
		at := append(slices.Clone(path), cleantext.Short(string(walk.Key()), maxValueBytes))
		value := walk.Value()
		switch kind := jsonspan.KindOf(value); {
		case kind == jsonspan.KindObject:
			list = appendValues(list, at, value, now)
			continue
		case kind == jsonspan.KindArray || len(value) > maxValueBytes || audit.IsSecret(at[len(at)-1]):
			continue
		}
		list = slices.DeleteFunc(list, func(v shownValue) bool { return slices.Equal(v.path, at) })
		if len(list) == maxShown {
			list = slices.Delete(list, 0, 1)
		}
		list = append(list, shownValue{at, appendClean(nil, value, 0), now})
	}
	return list
}

// callEvent is a call in the history.
type callEvent struct {
	Name      string                     `json:"name,omitempty"` // of the device
	Tool      string                     `json:"tool"`
	Outcome   string                     `json:"outcome"`
	Call      string                     `json:"call,omitempty"`
	By        string                     `json:"by,omitempty"` // of another caller
	Arguments json.RawMessage            `json:"arguments,omitempty"`
	Before    map[string]json.RawMessage `json:"before,omitempty"`
	BeforeAge *int64                     `json:"before_age_seconds,omitempty"`
}

// calls returns the last calls of a time, the oldest first: those of the caller, or with everyone all that it may see.
func (s *Server) calls(ctx context.Context, by access.Principal, device devices.ID, since, until time.Time, everyone bool, limit int) ([]eventInfo, error) {
	if everyone {
		if err := s.opt.Service.Permit(ctx, by, access.ScopeAudit, device); err != nil {
			return nil, err
		}
	}
	f := audit.Filter{Kind: string(audit.KindCall), Device: string(device), Since: since, Until: until}
	if !everyone {
		f.Key = by.Key()
	}
	out := []eventInfo{}
	_, _, err := audit.Walk(ctx, s.opt.Audit, &f, audit.Place{}, func(e *audit.Line, _ []byte) audit.Visit {
		if e.Key != by.Key() && s.opt.Service.PermitAudit(ctx, by, e) != nil {
			return audit.Next
		}
		out = append(out, s.callEventOf(ctx, by, e))
		if len(out) == limit {
			return audit.Stop
		}
		return audit.Next
	})
	slices.Reverse(out)
	return out, err
}

func (s *Server) callEventOf(ctx context.Context, by access.Principal, e *audit.Line) eventInfo {
	c := callEvent{Tool: cleantext.Short(e.Action, maxTitle), Outcome: e.Outcome, Call: e.Call, Arguments: e.Arguments}
	if e.Key != by.Key() {
		c.By = cleantext.Short(e.Name, maxTitle)
	} else if past := s.history.calls.get(e.Call); e.Call != "" {
		if c.Before = past.before; len(past.before) > 0 {
			age := int64(past.age / time.Second)
			c.BeforeAge = &age
		}
		if len(past.arguments) > 0 {
			c.Arguments = past.arguments
		}
	}
	if d, err := s.opt.Service.Get(ctx, devices.ID(e.Device)); err == nil && s.opt.Service.Permit(ctx, by, access.ScopeRead, d.Device.ID) == nil {
		c.Name = cleantext.Short(d.Device.Name, maxTitle)
	}
	return eventInfo{Type: eventCall, Device: devices.ID(e.Device), Time: e.At.UTC().Format("2006-01-02T15:04:05.000Z07:00"), at: e.At, callEvent: &c}
}
