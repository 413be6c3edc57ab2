package dispatch

import (
	"errors"
	"sync"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
	"fleetd/internal/mcpclient"
)

// running holds the calls that have a slot of their device on this node, by device; of
// several, the one that began last.
type running struct {
	mu    sync.Mutex
	calls map[devices.ID]string
}

// begin notes that a call got the slot.
func (r *running) begin(id devices.ID, call string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls[id] = call
}

func (r *running) end(id devices.ID, call string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.calls[id] == call {
		delete(r.calls, id)
	}
}

func (r *running) call(id devices.ID) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls[id]
}

// leastWait is from when a wait for a device's slot is recorded.
const leastWait = 10 * time.Millisecond

// recordCall passes a call to the recorder.
func (s *Dispatcher) recordCall(c *devices.ToolCall, begun time.Time, r *devices.ToolResult, err error) {
	if s.ports.Recorder == nil {
		return
	}
	step := devices.CallStep{Call: c.ID, Device: c.Device, Key: c.Principal.Key(), Tool: c.Tool, At: begun, Took: time.Since(begun), Sent: err == nil,
		Holder: r.Node == s.cfg.Node, Held: r.Node, Bytes: len(r.Content)}
	if c.Waited >= leastWait {
		step.Waited, step.Ahead = c.Waited, c.Ahead
	}
	var e audit.Entry
	setOutcome(&e, r, err)
	step.Outcome, step.Rule = e.Outcome, e.Rule
	if err != nil {
		failed := devices.AsError(err)
		step.Sent, step.Detail = failed.Sent, failed.Detail
	}
	s.ports.Recorder.Call(step)
}

// outcomeSent is the outcome of a message that was written to the device.
const outcomeSent = "sent"

// recordMessage records a message for a device, of which e is the audit entry. One that restarts the device
// has the outcome of a tool that does so.
func (s *Dispatcher) recordMessage(m *devices.Message, e *audit.Entry, err error) {
	if s.ports.Recorder == nil {
		return
	}
	step := devices.CallStep{Call: e.Call, Device: m.Device, Key: e.Key, Tool: e.Action, At: e.At, Sent: err == nil, Outcome: outcomeSent, Rule: e.Rule}
	switch command, _ := jsonspan.StringBytes(jsonspan.Member(m.Body, "command")); {
	case err != nil:
		failed := devices.AsError(err)
		step.Sent, step.Outcome, step.Detail = failed.Sent, e.Outcome, failed.Detail
	case e.Action == "system" && string(command) == "reboot":
		step.Outcome = OutcomeRestarting
	}
	s.ports.Recorder.Call(step)
}

// recordLate records that the device answered a call after its caller had left; an error
// that is not the device's is not an answer.
func (s *Dispatcher) recordLate(c *devices.ToolCall, begun time.Time, r mcpclient.Result, err error) {
	late := devices.CallStep{Call: c.ID, Device: c.Device, Key: c.Principal.Key(), Tool: c.Tool, At: begun, Took: time.Since(begun), Bytes: len(r.Content),
		Late: true, Sent: true, Holder: true, Held: s.cfg.Node}
	var refused *mcpclient.RPCError
	switch {
	case s.ports.Recorder == nil:
		return
	case errors.As(err, &refused):
		late.Outcome, late.Detail = audit.OutcomeToolError, refused.Error()
	case err != nil:
		return
	case r.IsError:
		late.Outcome = audit.OutcomeToolError
	default:
		late.Outcome = audit.OutcomeOK
	}
	s.ports.Recorder.Call(late)
}
