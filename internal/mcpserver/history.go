package mcpserver

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
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
	maxRemembered = 1000    // devices, as callers see them, and calls, of all callers
	maxShown      = 32      // of one device
	maxValueBytes = 64      // of one value
	maxCallBytes  = 1 << 10 // of the arguments of one call
)

// history keeps what this node has shown to callers: what devices said about themselves in their last answers, and the arguments of
// calls. The audit has who called what, on all nodes and for longer; this is what the audit leaves out, in memory alone.
type history struct {
	mu    sync.Mutex // held while the values of a device are read and replaced
	shown *lru[shownKey, []shownValue]
	calls *lru[string, pastCall]
}

// callerID tells callers apart: console keys and grants act as their key, and see less.
type callerID struct{ key, through string }

func callerOf(by access.Principal) callerID {
	if by.Caller == nil {
		return callerID{}
	}
	return callerID{by.Caller.Key, by.Caller.Through}
}

// shownKey is a device as one caller sees it: nobody learns a value from the answer to another caller.
type shownKey struct {
	caller callerID
	device devices.ID
}

// shownValue is a value in an answer, such as audio_speaker.volume.
type shownValue struct {
	path  []string
	tool  string          // that answered
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
	return &history{shown: newLRU[shownKey, []shownValue](maxRemembered), calls: newLRU[string, pastCall](maxRemembered)}
}

// called notes a call that the device may have got, under its id in the audit, with the texts of its answer.
func (h *history) called(c *devices.ToolCall, call string, texts []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	key := shownKey{callerOf(c.Principal), c.Device}
	shown, now := slices.Clone(h.shown.get(key)), clock.Now()
	past := pastCall{}
	if len(c.Arguments) > 0 && len(c.Arguments) <= maxCallBytes {
		past.arguments = audit.Redact(nil, c.Arguments)
	}
	for walk := jsonspan.Object(c.Arguments); walk.Next(); {
		name := string(walk.Key())
		at := valueOf(shown, name, c.Tool)
		if at < 0 || shown[at].value == nil || audit.IsSecret(name) {
			continue
		}
		if past.before == nil {
			past.before = map[string]json.RawMessage{}
		}
		past.before[cleantext.Short(name, maxTitle)], past.age = shown[at].value, max(past.age, now.Sub(shown[at].at))
		shown[at].value = nil
	}
	if call != "" && len(past.arguments) > 0 {
		h.calls.put(call, past)
	}
	for _, text := range texts {
		shown = appendValues(shown, c.Tool, nil, []byte(text), now)
	}
	if len(shown) > 0 {
		h.shown.put(key, shown)
	}
}

// valueOf returns the place of the value that an argument of a tool sets, or -1: the value has the name of the argument, and what it
// belongs to is in the name of the tool. A value that belongs to nothing is that of a tool beside this one, such as self.lamp.get_state.
func valueOf(shown []shownValue, name, tool string) int {
	return slices.IndexFunc(shown, func(v shownValue) bool {
		last := len(v.path) - 1
		if v.path[last] != name {
			return false
		}
		if last == 0 {
			return prefixOf(v.tool) == prefixOf(tool)
		}
		return !slices.ContainsFunc(v.path[:last], func(part string) bool { return !strings.Contains(tool, part) })
	})
}

// prefixOf returns the name of a tool without its last part.
func prefixOf(tool string) string { return tool[:max(0, strings.LastIndexByte(tool, '.'))] }

// appendValues appends the short values of an answer, in place of older ones with their paths.
func appendValues(list []shownValue, tool string, path []string, document []byte, now time.Time) []shownValue {
	if jsonspan.KindOf(document) != jsonspan.KindObject || len(path) > 3 {
		return list
	}
	for walk := jsonspan.Object(document); walk.Next(); {
		at := append(slices.Clone(path), cleantext.Short(string(walk.Key()), maxValueBytes))
		value := walk.Value()
		switch kind := jsonspan.KindOf(value); {
		case kind == jsonspan.KindObject:
			list = appendValues(list, tool, at, value, now)
			continue
		case kind == jsonspan.KindArray || len(value) > maxValueBytes || audit.IsSecret(at[len(at)-1]):
			continue
		}
		list = slices.DeleteFunc(list, func(v shownValue) bool { return slices.Equal(v.path, at) && (len(at) > 1 || v.tool == tool) })
		if len(list) == maxShown {
			list = slices.Delete(list, 0, 1)
		}
		list = append(list, shownValue{at, tool, appendClean(nil, value, 0), now})
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

// calls returns the last calls of a time, the oldest first: those of the caller, or with everyone all that it may see. If the audit is
// too long to be read to the beginning of that time, back is how far it was.
func (s *Server) calls(ctx context.Context, by access.Principal, device devices.ID, since, until time.Time, everyone bool, limit int) (list []eventInfo, back time.Time, err error) {
	if everyone {
		if err := s.opt.Service.Permit(ctx, by, access.ScopeAudit, device); err != nil {
			return nil, back, err
		}
	}
	f := audit.Filter{Kind: string(audit.KindCall), Device: string(device), Since: since, Until: until}
	if !everyone {
		f.Key = by.Key()
	}
	permit := s.opt.Service.AuditPermit(ctx, by)
	var place audit.Place
	for more, walks := true, 0; more && len(list) < limit && err == nil; walks++ {
		if walks == maxWalks || ctx.Err() != nil {
			back = place.LastAt
			break
		}
		var failed error
		place, more, err = audit.Walk(ctx, s.opt.Audit, &f, place, func(e *audit.Line, _ []byte) audit.Visit {
			// A call that was refused may name a device that is not for the caller.
			own, may := isOwn(by, e) && e.Outcome != string(devices.CodeForbidden), false
			if !own && everyone {
				if may, failed = permit(e); failed != nil {
					return audit.StopHere
				}
			}
			if own || may {
				list = append(list, s.callEventOf(ctx, by, e))
			}
			if len(list) == limit {
				return audit.Stop
			}
			return audit.Next
		})
		err = cmp.Or(err, failed)
	}
	slices.Reverse(list)
	return list, back, err
}

// maxWalks is how many walks through the audit one answer takes: 1,280 blocks.
const maxWalks = 20

// isOwn reports whether the caller itself made a call.
func isOwn(by access.Principal, e *audit.Line) bool {
	return callerID{e.Key, e.Through} == callerOf(by)
}

func (s *Server) callEventOf(ctx context.Context, by access.Principal, e *audit.Line) eventInfo {
	c := callEvent{Tool: cleantext.Short(e.Action, maxTitle), Outcome: e.Outcome, Call: e.Call, Arguments: e.Arguments}
	if !isOwn(by, e) {
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
