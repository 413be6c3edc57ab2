package dispatch

import (
	"crypto/sha256"
	"encoding/json"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/jsonspan"
)

// Record keeps an entry, if anybody does.
func (s *Dispatcher) Record(e audit.Entry) {
	if s.ports.Audit != nil {
		s.ports.Audit.Record(e)
	}
}

// EntryOf is the entry of what a caller did to a device.
func EntryOf(at time.Time, by access.By, kind audit.Kind, action string, id devices.ID) audit.Entry {
	return audit.Entry{At: at, Kind: kind, Action: action, Device: string(id), Key: by.Key(), Name: by.Name(), Via: string(by.Via), From: by.From}
}

// auditCall records a call where it came into the fleet: that is where its
// caller and its whole time are known, wherever it went.
func (s *Dispatcher) auditCall(c *devices.ToolCall, begun time.Time, r *devices.ToolResult, err error) {
	if s.ports.Audit == nil {
		return
	}
	e := EntryOf(begun, c.By, audit.KindCall, c.Tool, c.Device)
	e.Call = c.ID
	e.Duration = time.Since(begun)
	if len(c.Arguments) > 0 {
		e.Digest = sha256.Sum256(c.Arguments)
		if s.Guard().KeepsArguments(c.Tool) {
			e.Arguments = append(json.RawMessage(nil), c.Arguments...)
		}
	}
	if r.Node != "" && r.Node != s.cfg.Node {
		e.Held = r.Node
	}
	settle(&e, r, err)
	if err == nil && c.Confirmation != "" {
		e.Detail = "confirmed"
	}
	s.Record(e)
}

// auditRPC records a raw request as what it does: a call of a tool, else its
// method.
func (s *Dispatcher) auditRPC(c *devices.RPCCall, begun time.Time, r *devices.RPCResult, err error) {
	if s.ports.Audit == nil {
		return
	}
	result := devices.ToolResult{Node: s.cfg.Node, IsError: r.Error != nil}
	call, ok := toolCallOf(c)
	if c.Method != methodCall || !ok {
		call = devices.ToolCall{ID: c.ID, Device: c.Device, By: c.By, Tool: devices.Clip(c.Method), Arguments: c.Params}
	} else if err == nil && jsonspan.KindOf(jsonspan.Member(r.Result, "isError")) == jsonspan.KindTrue {
		result.IsError = true
	}
	s.auditCall(&call, begun, &result, err)
}

// settle notes how it ended.
func settle(e *audit.Entry, r *devices.ToolResult, err error) {
	switch {
	case err != nil:
		refusal := devices.AsError(err)
		e.Outcome, e.Rule = string(refusal.Code), refusal.Rule
		if refusal.Rule != "" {
			e.Detail = refusal.Detail
		}
	case r.IsError:
		e.Outcome = audit.OutcomeToolError
	case r.Outcome != "":
		e.Outcome = r.Outcome
	default:
		e.Outcome = audit.OutcomeOK
	}
}

// auditMessage records a message for a device, other than those of which a
// conversation has many: what a person hears is not the fleet's to keep.
func (s *Dispatcher) auditMessage(m *devices.Message, kind string, err error) {
	if s.ports.Audit == nil || err == nil && speech.IsSpeech(kind) {
		return
	}
	e := EntryOf(time.Now(), m.By, audit.KindMessage, kind, m.Device)
	e.Call = s.callID(m.ID)
	settle(&e, &devices.ToolResult{}, err)
	s.Record(e)
}
