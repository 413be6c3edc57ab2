package dispatch

import (
	"crypto/sha256"
	"encoding/json"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
)

// Record records an entry.
func (s *Dispatcher) Record(e audit.Entry) { s.ports.Audit.Record(e) }

// EntryOf returns the entry of a principal's action on a device.
func EntryOf(at time.Time, principal access.Principal, kind audit.Kind, action string, id devices.ID) audit.Entry {
	e := audit.Entry{At: at, Kind: kind, Action: action, Device: string(id), Key: principal.Key(), Name: principal.Name(), Via: string(principal.Via), From: principal.From}
	if principal.Caller != nil {
		e.Through = principal.Caller.Through
	}
	return e
}

// auditCall records a call on the node that received it first: only there the caller and
// the total duration are known.
func (s *Dispatcher) auditCall(c *devices.ToolCall, begun time.Time, r *devices.ToolResult, err error) {
	e := EntryOf(begun, c.Principal, audit.KindCall, c.Tool, c.Device)
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
	setOutcome(&e, r, err)
	if err == nil && c.Confirmation != "" {
		e.Detail = "confirmed"
	}
	e.Detail = detailOf(c.Job, e.Detail)
	s.Record(e)
}

// setOutcome sets the outcome of an entry.
func setOutcome(e *audit.Entry, r *devices.ToolResult, err error) {
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

// noteMessage passes a message for a device to the audit log and the recorder. Accepted messages of a
// conversation are left out: there are many, and what a person hears is private.
func (s *Dispatcher) noteMessage(m *devices.Message, kind string, err error) {
	if err == nil && m.Job == "" && speech.IsSpeech(kind) {
		return
	}
	e := EntryOf(clock.Now(), m.Principal, audit.KindMessage, kind, m.Device)
	e.Call = s.callID(m.ID)
	setOutcome(&e, &devices.ToolResult{}, err)
	s.recordMessage(m, &e, err)
	e.Detail = detailOf(m.Job, e.Detail)
	s.Record(e)
}

// detailOf adds the job to the detail of an entry.
func detailOf(job, detail string) string {
	switch {
	case job == "":
		return detail
	case detail == "":
		return "job " + job
	}
	return "job " + job + ": " + detail
}
