package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/session"
	"fleetd/internal/jsonspan"
	"fleetd/internal/mcpclient"
)

// Timeouts of calls, waiting included.
const (
	DefaultTimeout = 30 * time.Second
	CameraTimeout  = 75 * time.Second // the upload alone may take 30 + 30 s
	MaxTimeout     = 300 * time.Second
	restartSilence = 5 * time.Second
)

const methodCall = "tools/call"

// toolSnapshot sends a picture of the screen to an address.
const toolSnapshot = "self.screen.snapshot"

// restarts are tools after which the device reboots or leaves the network, so
// that its answer is lost (firmware v2.1.0 on): a disconnect, or silence, is
// their success.
var restarts = map[string]bool{"self.reboot": true, "self.res.esp_restart": true, "self.system.reconfigure_wifi": true, "self.disp.network": true}

// disconnects are tools after which a WebSocket device first closes its
// channel: a disconnect is their success, silence is not.
var disconnects = map[string]bool{"self.system.set_aec": true, "self.AEC.set_mode": true}

// OutcomeRestarting is the outcome of a call whose tool restarts the device.
const OutcomeRestarting = "restarting"

func isCamera(tool string) bool {
	return strings.HasPrefix(tool, "self.camera.") || strings.HasSuffix(tool, ".take_photo")
}

// TimeoutFor is the timeout of a call that names none.
func TimeoutFor(tool string) time.Duration {
	switch {
	case isCamera(tool):
		return CameraTimeout
	}
	return DefaultTimeout
}

// call runs one call on this session's device and counts its outcome.
func (s *Dispatcher) call(ctx context.Context, x *session.Session, c *devices.ToolCall) (devices.ToolResult, error) {
	begun := time.Now()
	r, err := s.tryCall(ctx, x, c)
	r.Duration, r.Node = time.Since(begun), s.cfg.Node
	stats := &s.stats
	stats.CallTime.Observe(r.Duration)
	switch {
	case err != nil:
		stats.Calls.Add(string(devices.AsError(err).Code), 1)
		s.log.Debug("call failed", "call", c.ID, "device", c.Device, "tool", devices.Clip(c.Tool), "by", c.By.Key(), "error", err)
	case r.IsError:
		stats.Calls.Add(audit.OutcomeToolError, 1)
	default:
		stats.Calls.Add(audit.OutcomeOK, 1)
	}
	return r, err
}

func (s *Dispatcher) tryCall(ctx context.Context, x *session.Session, c *devices.ToolCall) (devices.ToolResult, error) {
	if !isToolName(c.Tool) {
		return devices.ToolResult{}, devices.Errorf(devices.CodeBadRequest, "a tool's name has 1 to %d bytes of text without control characters", maxToolName)
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
	if ttl, ok := c.Judged.Shared(string(c.Device), x.Labels(), c.Tool); ok {
		return s.share(ctx, callersOf(x), c, ttl, func() (devices.ToolResult, error) { return s.perform(ctx, x, c) })
	}
	defer outdate(x)
	return s.perform(ctx, x, c)
}

// perform makes a call that was admitted.
func (s *Dispatcher) perform(ctx context.Context, x *session.Session, c *devices.ToolCall) (devices.ToolResult, error) {
	if err := x.Acquire(ctx); err != nil {
		return devices.ToolResult{}, err
	}
	defer x.Release()
	if err := s.stillMay(ctx, x, c); err != nil {
		return devices.ToolResult{}, err
	}
	if isCamera(c.Tool) {
		if err := x.PrepareUpload(ctx); err != nil {
			return devices.ToolResult{}, callError(x, c.Tool, err)
		}
	}
	arguments, photo := c.Arguments, ""
	if c.Tool == toolSnapshot && jsonspan.Member(arguments, "url") == nil {
		arguments, photo = s.snapshotArguments(c.Device, arguments)
	}
	answer := ctx
	if restarts[c.Tool] {
		var cancel context.CancelFunc
		answer, cancel = context.WithTimeout(ctx, restartSilence)
		defer cancel()
	}
	r, err := x.CallTool(answer, c.Tool, arguments, s.late(x, c, photo))
	if err != nil {
		// Silence counts from the call itself, not from the caller's deadline.
		silent := errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil
		return failedCall(x, c, err, silent)
	}
	return answered(c.Tool, photo, r), nil
}

// answered is the result of a call that the device has answered.
func answered(tool, photo string, r mcpclient.Result) devices.ToolResult {
	switch {
	case tool == catalog.UpgradeFirmware:
		// The firmware restarts instead of answering when it succeeds.
		return devices.ToolResult{Content: textContent("the device answered instead of restarting: the upgrade failed"), IsError: true}
	case photo != "" && !r.IsError:
		r.Content = textContent(`{"success":true,"photo":"` + photo + `"}`)
	}
	return devices.ToolResult{Content: r.Content, IsError: r.IsError}
}

// late hands on the answer of a call whose caller's time is over; nil if nobody
// wants it.
func (s *Dispatcher) late(x *session.Session, c *devices.ToolCall, photo string) func(mcpclient.Result, error) {
	if c.Late == nil {
		return nil
	}
	call := *c
	return func(r mcpclient.Result, err error) {
		s.stats.LateAnswers.Add(1)
		result := devices.ToolResult{}
		if err != nil {
			result, err = failedCall(x, &call, err, false)
		} else {
			result = answered(call.Tool, photo, r)
		}
		result.Node, result.Call = s.cfg.Node, call.ID
		call.Late(result, devices.OfCall(err, call.ID))
	}
}

// snapshotArguments adds an upload address of our own to a snapshot call that
// names none; the device would have nowhere to send the picture.
func (s *Dispatcher) snapshotArguments(id devices.ID, args json.RawMessage) (out json.RawMessage, photo string) {
	url, photo := s.ports.Vision.Snapshot(id, time.Now())
	return jsonspan.WithString(args, "url", url), photo
}

// validate checks the call against what is known of the device's tools, before
// the device is bothered. A list that is stale, partial or not read yet
// refuses nothing by name: the device itself knows better.
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

// asError avoids the typed nil.
func asError(e *devices.Error) error {
	if e == nil {
		return nil
	}
	return e
}

// failedCall turns a failed call of a tool into its result or error.
func failedCall(x *session.Session, c *devices.ToolCall, err error, silent bool) (devices.ToolResult, error) {
	var closed session.ClosedError
	gone := errors.As(err, &closed) && !errors.Is(err, mcpclient.ErrNotSent) && closed.ByDevice()
	if restarts[c.Tool] && (gone || silent) || gone && (disconnects[c.Tool] || c.Tool == catalog.UpgradeFirmware) {
		return devices.ToolResult{Content: json.RawMessage("[]"), Outcome: OutcomeRestarting}, nil
	}
	rpc := (*mcpclient.RPCError)(nil)
	if errors.As(err, &rpc) && rpc.Refusal() == mcpclient.RefusalOther {
		return devices.ToolResult{Content: textContent(rpc.Message), IsError: true}, nil
	}
	return devices.ToolResult{}, callError(x, c.Tool, err)
}

// callError is the one table from the MCP client's errors to codes.
func callError(x *session.Session, what string, err error) *devices.Error {
	rpc := (*mcpclient.RPCError)(nil)
	var closed session.ClosedError
	switch {
	case errors.As(err, &rpc):
		switch rpc.Refusal() {
		case mcpclient.RefusalTool:
			x.Relist() // our list is out of date
			return devices.Errorf(devices.CodeToolUnknown, "the device has no tool %q: %s", what, rpc.Message)
		case mcpclient.RefusalArguments:
			return &devices.Error{Code: devices.CodeInvalidArguments, Detail: rpc.Message, Sent: true, Faults: []devices.Fault{{Detail: rpc.Message}}}
		}
		return &devices.Error{Code: devices.CodeDeviceError, Detail: rpc.Message, Sent: true}
	case errors.Is(err, mcpclient.ErrMalformed):
		return &devices.Error{Code: devices.CodeDeviceError, Detail: err.Error(), Sent: true, Outcome: devices.OutcomeUnknown}
	case errors.As(err, &closed):
		return session.ClosedCall(closed.Reason, !errors.Is(err, mcpclient.ErrNotSent))
	case errors.Is(err, mcpclient.ErrNotSent):
		return &devices.Error{Code: devices.CodeConnectionLost, Detail: "the device's connection takes no more bytes: " + err.Error()}
	case errors.Is(err, context.DeadlineExceeded):
		x.Doubt()
		return &devices.Error{Code: devices.CodeDeviceTimeout, Detail: "the device did not answer in time", Sent: true, Outcome: devices.OutcomeUnknown}
	case errors.Is(err, context.Canceled):
		return &devices.Error{Code: devices.CodeDeviceTimeout, Detail: "the caller gave up", Sent: true, Outcome: devices.OutcomeUnknown}
	}
	return &devices.Error{Code: devices.CodeInternal, Detail: err.Error(), Sent: true, Outcome: devices.OutcomeUnknown}
}

func textContent(text string) json.RawMessage {
	out := jsonspan.AppendString([]byte(`[{"type":"text","text":`), text)
	return append(out, "}]"...)
}
