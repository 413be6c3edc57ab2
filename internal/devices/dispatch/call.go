package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/session"
	"fleetd/internal/jsonspan"
	"fleetd/internal/mcpclient"
)

// Timeouts of calls, including waiting.
const (
	DefaultTimeout = 30 * time.Second
	CameraTimeout  = 75 * time.Second // the upload alone may take 30 + 30 s
	MaxTimeout     = 300 * time.Second
	restartSilence = 5 * time.Second
)

const methodCall = "tools/call"

// toolSnapshot uploads a picture of the screen to a URL.
const toolSnapshot = "self.screen.snapshot"

// restartingTools make the device reboot or leave the network, so that its answer is lost
// (firmware v2.1.0 and later): a disconnect or silence counts as success.
var restartingTools = map[string]bool{"self.reboot": true, "self.res.esp_restart": true, "self.system.reconfigure_wifi": true, "self.disp.network": true}

// disconnectingTools make a WebSocket device first close its channel: a disconnect counts
// as success, silence does not.
var disconnectingTools = map[string]bool{"self.system.set_aec": true, "self.AEC.set_mode": true}

// OutcomeRestarting is the outcome of a call whose tool restarts the device.
const OutcomeRestarting = "restarting"

func isCamera(tool string) bool {
	return strings.HasPrefix(tool, "self.camera.") || strings.HasSuffix(tool, ".take_photo")
}

// TimeoutFor returns the default timeout of a tool.
func TimeoutFor(tool string) time.Duration {
	switch {
	case isCamera(tool):
		return CameraTimeout
	}
	return DefaultTimeout
}

// call runs one call on the session's device and counts its outcome. held is the slot of a call that has one already; nil: it
// takes one when it is its turn.
func (s *Dispatcher) call(ctx context.Context, x *session.Session, c *devices.ToolCall, held *held) (devices.ToolResult, error) {
	begun := time.Now()
	r, err := s.tryCall(ctx, x, c, held)
	r.Duration, r.Node = time.Since(begun), s.cfg.Node
	stats := &s.stats
	stats.CallTime.Observe(r.Duration)
	switch {
	case err != nil:
		stats.Calls.Add(CallKey{string(devices.AsError(err).Code), c.Principal.Via}, 1)
		s.log.Debug("call failed", "call", c.ID, "device", c.Device, "tool", devices.Clip(c.Tool), "by", c.Principal.Key(), "error", err)
	case r.IsError:
		stats.Calls.Add(CallKey{audit.OutcomeToolError, c.Principal.Via}, 1)
	default:
		stats.Calls.Add(CallKey{audit.OutcomeOK, c.Principal.Via}, 1)
	}
	return r, err
}

func (s *Dispatcher) tryCall(ctx context.Context, x *session.Session, c *devices.ToolCall, held *held) (devices.ToolResult, error) {
	if err := held.check(c); err != nil {
		return devices.ToolResult{}, err
	}
	if !devices.IsToolName(c.Tool) {
		return devices.ToolResult{}, devices.Errorf(devices.CodeBadRequest, "a tool's name must have 1 to %d bytes of text without control characters", devices.MaxToolName)
	}
	if err := devices.CheckText("arguments", c.Arguments); err != nil {
		return devices.ToolResult{}, err
	}
	if err := s.guard(ctx, x, c); err != nil {
		return devices.ToolResult{}, err
	}
	if err := s.validate(x, c); err != nil {
		return devices.ToolResult{}, err
	}
	if ttl, ok := c.Guard.Shared(string(c.Device), x.Labels(), c.Tool); ok && held == nil {
		return s.share(ctx, callerStateOf(x), c, ttl, func() (devices.ToolResult, error) { return s.perform(ctx, x, c, nil) })
	}
	defer clearShared(x)
	return s.perform(ctx, x, c, held)
}

// acquire takes a slot of the device. It returns how long that took, and the call that ran before.
func (s *Dispatcher) acquire(ctx context.Context, x *session.Session, id devices.ID, key string) (waited time.Duration, ahead string, err error) {
	begun := time.Now()
	ahead = s.running.call(id)
	err = x.Acquire(ctx, key)
	return time.Since(begun), ahead, err
}

// perform runs a call that was permitted.
func (s *Dispatcher) perform(ctx context.Context, x *session.Session, c *devices.ToolCall, held *held) (devices.ToolResult, error) {
	if held == nil {
		var err error
		if c.Waited, c.Ahead, err = s.acquire(ctx, x, c.Device, c.Principal.Key()); err != nil {
			return devices.ToolResult{}, err
		}
		defer x.Release()
	}
	s.running.begin(c.Device, c.ID)
	defer s.running.end(c.Device, c.ID)
	if err := s.recheck(ctx, x, c); err != nil {
		return devices.ToolResult{}, err
	}
	if err := prepare(ctx, x, c); err != nil {
		return devices.ToolResult{}, err
	}
	if err := held.permit(c); err != nil {
		return devices.ToolResult{}, err
	}
	return s.send(ctx, x, c)
}

// prepare gives the device what it needs for the call. What is sent for that is not the call.
func prepare(ctx context.Context, x *session.Session, c *devices.ToolCall) error {
	if !isCamera(c.Tool) {
		return nil
	}
	if err := x.PrepareUpload(ctx); err != nil {
		failed := *callError(x, c.Tool, err)
		failed.Sent, failed.Outcome = false, ""
		return &failed
	}
	return nil
}

// send sends a call and waits for its answer. The caller holds a slot of the device.
func (s *Dispatcher) send(ctx context.Context, x *session.Session, c *devices.ToolCall) (devices.ToolResult, error) {
	arguments, photo := c.Arguments, ""
	if c.Tool == toolSnapshot && jsonspan.Member(arguments, "url") == nil {
		arguments, photo = s.snapshotArguments(c.Device, arguments)
	}
	answer := ctx
	if restartingTools[c.Tool] {
		var cancel context.CancelFunc
		answer, cancel = context.WithTimeout(ctx, restartSilence)
		defer cancel()
	}
	r, err := x.CallTool(answer, c.Tool, arguments, s.lateHandler(x, c, photo))
	if err != nil {
		// Silence counts from the start of the call, not from the caller's deadline.
		silent := errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil
		return failedCall(x, c, err, silent)
	}
	return resultOf(c, photo, r), nil
}

// resultOf returns the result of a call that the device has answered.
func resultOf(c *devices.ToolCall, photo string, r mcpclient.Result) devices.ToolResult {
	switch {
	case c.Tool == catalog.UpgradeFirmware:
		// After a successful upgrade the firmware restarts instead of answering. After one that failed it
		// remains in its state `upgrading`, in which it ignores its button and wake word (application.cc:1057).
		return devices.ToolResult{Content: textContent("the upgrade failed: the device answered instead of restarting. Its button and wake word do not work until it restarts: restart it with `fleetd restart " +
			string(c.Device) + "`"), IsError: true}
	case photo != "" && !r.IsError:
		r.Content = textContent(`{"success":true,"photo":"` + photo + `"}`)
	}
	return devices.ToolResult{Content: r.Content, IsError: r.IsError}
}

// lateHandler returns the function for an answer after the caller's deadline; nil if it is
// not wanted.
func (s *Dispatcher) lateHandler(x *session.Session, c *devices.ToolCall, photo string) func(mcpclient.Result, error) {
	begun := time.Now()
	switch {
	case c.Late == nil && s.ports.Recorder == nil:
		return nil
	case c.Late == nil:
		return func(r mcpclient.Result, err error) { s.recordLate(c, begun, r, err) }
	}
	call := *c
	return func(r mcpclient.Result, err error) {
		s.stats.LateAnswers.Add(1)
		s.recordLate(&call, begun, r, err)
		result := devices.ToolResult{}
		if err != nil {
			result, err = failedCall(x, &call, err, false)
		} else {
			result = resultOf(&call, photo, r)
		}
		result.Node, result.Call = s.cfg.Node, call.ID
		call.Late(result, devices.WithCallID(err, call.ID))
	}
}

// snapshotArguments adds an upload URL of fleetd to a snapshot call without a URL; the
// device would not know where to send the picture.
func (s *Dispatcher) snapshotArguments(id devices.ID, args json.RawMessage) (out json.RawMessage, photo string) {
	url, photo := s.ports.Vision.Snapshot(id, clock.Now())
	return jsonspan.WithString(args, "url", url), photo
}

// validate checks the call against the known tools before it is sent. With a list that is
// stale, partial or not read yet it refuses no unknown tool: the device decides.
func (s *Dispatcher) validate(x *session.Session, c *devices.ToolCall) error {
	known := x.Tools()
	if known.NoMCP {
		return devices.Errorf(devices.CodeToolUnknown, "device %s does not speak MCP", c.Device)
	}
	if known.List == nil {
		if c.Tool == catalog.UpgradeFirmware {
			return asError((&catalog.Tool{Name: c.Tool}).CheckCall(c.Arguments))
		}
		return nil
	}
	tool := known.List.Tool(c.Tool)
	if tool == nil {
		if known.Complete {
			return devices.Errorf(devices.CodeToolUnknown, "device %s has no tool %q", c.Device, c.Tool)
		}
		tool = &catalog.Tool{Name: c.Tool}
	}
	arguments := c.Arguments
	if c.Tool == toolSnapshot && jsonspan.Member(arguments, "url") == nil {
		arguments, _ = s.snapshotArguments(c.Device, arguments)
	}
	return asError(tool.CheckCall(arguments))
}

// asError avoids a non-nil error with a nil *Error.
func asError(e *devices.Error) error {
	if e == nil {
		return nil
	}
	return e
}

// failedCall converts the error of a call into its result or error.
func failedCall(x *session.Session, c *devices.ToolCall, err error, silent bool) (devices.ToolResult, error) {
	var closed session.ClosedError
	gone := errors.As(err, &closed) && !errors.Is(err, mcpclient.ErrNotSent) && closed.ByDevice()
	if restartingTools[c.Tool] && (gone || silent) || gone && (disconnectingTools[c.Tool] || c.Tool == catalog.UpgradeFirmware) {
		return devices.ToolResult{Content: json.RawMessage("[]"), Outcome: OutcomeRestarting}, nil
	}
	rpc := (*mcpclient.RPCError)(nil)
	if errors.As(err, &rpc) && rpc.Refusal() == mcpclient.RefusalOther {
		return devices.ToolResult{Content: textContent(rpc.Message), IsError: true}, nil
	}
	return devices.ToolResult{}, callError(x, c.Tool, err)
}

// callError is the table from errors of the MCP client to codes.
func callError(x *session.Session, what string, err error) *devices.Error {
	rpc := (*mcpclient.RPCError)(nil)
	var closed session.ClosedError
	switch {
	case errors.As(err, &rpc):
		switch rpc.Refusal() {
		case mcpclient.RefusalTool:
			x.Relist() // the list is out of date
			return devices.Errorf(devices.CodeToolUnknown, "the device has no tool %q: %s", what, rpc.Message)
		case mcpclient.RefusalArguments:
			return &devices.Error{Code: devices.CodeInvalidArguments, Detail: rpc.Message, Sent: true, Faults: []devices.Fault{{Detail: rpc.Message}}}
		}
		return &devices.Error{Code: devices.CodeDeviceError, Detail: rpc.Message, Sent: true}
	case errors.Is(err, mcpclient.ErrMalformed):
		return &devices.Error{Code: devices.CodeDeviceError, Detail: err.Error(), Sent: true, Outcome: devices.OutcomeUnknown}
	case errors.As(err, &closed):
		return devices.ClosedCall(closed.Reason, !errors.Is(err, mcpclient.ErrNotSent))
	case errors.Is(err, mcpclient.ErrNotSent):
		return &devices.Error{Code: devices.CodeConnectionLost, Detail: "the call could not be written to the device: " + err.Error()}
	case errors.Is(err, context.DeadlineExceeded):
		x.OnCallTimeout()
		return &devices.Error{Code: devices.CodeDeviceTimeout, Detail: "the device did not answer in time", Sent: true, Outcome: devices.OutcomeUnknown}
	case errors.Is(err, context.Canceled):
		return &devices.Error{Code: devices.CodeDeviceTimeout, Detail: devices.DetailCancelled, Sent: true, Outcome: devices.OutcomeUnknown}
	}
	return &devices.Error{Code: devices.CodeInternal, Detail: err.Error(), Sent: true, Outcome: devices.OutcomeUnknown}
}

func textContent(text string) json.RawMessage {
	out := jsonspan.AppendString([]byte(`[{"type":"text","text":`), text)
	return append(out, "}]"...)
}
