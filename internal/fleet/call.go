package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/registry"
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

// Tools the firmware treats in a way of their own.
const (
	toolSnapshot = "self.screen.snapshot"
)

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

// CallTool calls a tool of a device, wherever it is connected: on this node,
// else one hop to the node that holds it. ctx carries the deadline, waiting
// included. Errors are *Error. A call is repeated only if a takeover ended it
// before a byte left, and only once.
func (s *Service) CallTool(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	return s.recorded(ctx, c, s.callTwice)
}

// recorded runs a call that has come into the fleet here.
func (s *Service) recorded(ctx context.Context, c devices.ToolCall, run func(context.Context, devices.ToolCall) (devices.ToolResult, error)) (devices.ToolResult, error) {
	begun := time.Now()
	c.ID = s.callID(c.ID)
	r, err := run(ctx, c)
	s.auditCall(&c, begun, &r, err)
	r.Call = c.ID
	return r, devices.OfCall(err, c.ID)
}

// callID is the id that a call was given, or a new one.
func (s *Service) callID(given string) string {
	if given != "" {
		return given
	}
	return s.NewCallID()
}

// NewCallID is an id for a call, a raw request or a message that has come into the
// fleet here.
func (s *Service) NewCallID() string { return s.callIDs.Next() }

func (s *Service) callTwice(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	if err := s.Permit(ctx, c.By, access.ScopeCall, c.Device); err != nil {
		return devices.ToolResult{}, err // before it can be told which devices there are
	}
	r, err := s.callOnce(ctx, c)
	var e *devices.Error
	if errors.As(err, &e) && e.Code == devices.CodeSuperseded && !e.Sent {
		r, err = s.callOnce(ctx, c)
	}
	return r, err
}

func (s *Service) callOnce(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	if x := s.hub.session(c.Device); x != nil {
		return x.call(ctx, c)
	}
	r, err := s.ports.Router.Forward(ctx, c)
	return r, s.orAbsent(ctx, c.Device, err)
}

// CallHere is CallTool for who found the node by the device's own subject: it
// never routes.
func (s *Service) CallHere(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	return s.recorded(ctx, c, s.CallLocal)
}

// CallLocal calls a tool of a device on this node for another node, which keeps
// the record of it; it never routes.
func (s *Service) CallLocal(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	if x := s.hub.session(c.Device); x != nil {
		return x.call(ctx, c)
	}
	return devices.ToolResult{}, s.absentFor(ctx, c.By, c.Device)
}

// absentFor is absent for a caller, who may not be told which devices there are.
func (s *Service) absentFor(ctx context.Context, by access.By, id devices.ID) error {
	if err := s.Permit(ctx, by, access.ScopeCall, id); err != nil {
		return err
	}
	return s.absent(ctx, id)
}

// orAbsent is the error of a Router, or absent if no node holds the device.
func (s *Service) orAbsent(ctx context.Context, id devices.ID, err error) error {
	if errors.Is(err, devices.ErrNoHolder) {
		return s.absent(ctx, id)
	}
	return err
}

// absent tells a device that is offline from one nobody knows, and from one that
// a living node holds which cannot be reached. It asks the database once,
// briefly, and only if there are other nodes.
func (s *Service) absent(ctx context.Context, id devices.ID) error {
	if err := s.registry.Judge(); err != nil {
		return err
	}
	known := s.registry.Standing(id, "").Known || s.pending.waits(id, time.Now())
	if s.cfg.Alive != nil {
		ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
		defer cancel()
		row, err := s.ports.Records.Find(ctx, id)
		if err == nil && s.elsewhere(row.Presence) {
			return &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: fmt.Sprintf("node %s holds the device and cannot be reached", row.Presence.Node)}
		}
		known = known || err == nil // another node has just made it a member
	}
	if !known {
		return registry.Unknown(id)
	}
	return devices.Errorf(devices.CodeDeviceOffline, "device %s is not connected", id)
}

// elsewhere tells whether another living node says it holds the device.
func (s *Service) elsewhere(p devices.Presence) bool {
	return p.Online && p.Node != s.cfg.Node && s.cfg.Alive != nil && s.cfg.Alive(p.Node)
}

// call runs one call on this session's device and counts its outcome.
func (x *Session) call(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	begun := time.Now()
	r, err := x.tryCall(ctx, c)
	r.Duration, r.Node = time.Since(begun), x.svc.cfg.Node
	stats := &x.svc.stats
	stats.CallTime.Observe(r.Duration)
	switch {
	case err != nil:
		stats.Calls.Add(string(devices.AsError(err).Code), 1)
		x.svc.log.Debug("call failed", "call", c.ID, "device", c.Device, "tool", clip(c.Tool), "by", c.By.Key(), "error", err)
	case r.IsError:
		stats.Calls.Add("tool_error", 1)
	default:
		stats.Calls.Add("ok", 1)
	}
	return r, err
}

func (x *Session) tryCall(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	if !isToolName(c.Tool) {
		return devices.ToolResult{}, devices.Errorf(devices.CodeBadRequest, "a tool's name has 1 to %d bytes of text without control characters", maxToolName)
	}
	if err := x.guard(ctx, &c); err != nil {
		return devices.ToolResult{}, err
	}
	if err := x.admit(c); err != nil {
		return devices.ToolResult{}, err
	}
	if ttl, ok := c.Judged.Shared(string(c.Device), x.entry.device.Load().Labels, c.Tool); ok {
		return x.share(ctx, &c, ttl, func() (devices.ToolResult, error) { return x.perform(ctx, c) })
	}
	defer x.outdate()
	return x.perform(ctx, c)
}

// perform makes a call that was admitted.
func (x *Session) perform(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	if err := x.acquire(ctx); err != nil {
		return devices.ToolResult{}, err
	}
	defer x.release()
	if err := x.stillMay(ctx, &c); err != nil {
		return devices.ToolResult{}, err
	}
	if isCamera(c.Tool) {
		x.mu.Lock()
		due := !x.initialized || !x.grantExpires.IsZero() && time.Until(x.grantExpires) < grantReserve
		x.mu.Unlock()
		if due {
			if err := x.initialize(ctx); err != nil {
				return devices.ToolResult{}, x.callError(c.Tool, err)
			}
		}
	}
	photo := ""
	if c.Tool == toolSnapshot && jsonspan.Member(c.Arguments, "url") == nil {
		c.Arguments, photo = x.snapshotArguments(c.Arguments)
	}
	answer := ctx
	if restarts[c.Tool] {
		var cancel context.CancelFunc
		answer, cancel = context.WithTimeout(ctx, restartSilence)
		defer cancel()
	}
	r, err := x.client.CallTool(answer, c.Tool, c.Arguments)
	x.judgeAnswer(err)
	if err != nil {
		// Silence counts from the call itself, not from the caller's deadline.
		silent := errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil
		return x.failedCall(c, err, silent)
	}
	if c.Tool == catalog.UpgradeFirmware {
		// The firmware restarts instead of answering when it succeeds.
		return devices.ToolResult{Content: textContent("the device answered instead of restarting: the upgrade failed"), IsError: true}, nil
	}
	if photo != "" && !r.IsError {
		r.Content = textContent(`{"success":true,"photo":"` + photo + `"}`)
	}
	return devices.ToolResult{Content: r.Content, IsError: r.IsError}, nil
}

// snapshotArguments adds an upload address of our own to a snapshot call that
// names none; the device would have nowhere to send the picture.
func (x *Session) snapshotArguments(args json.RawMessage) (out json.RawMessage, photo string) {
	url, photo := x.svc.ports.Vision.Snapshot(x.who.Device, time.Now())
	return jsonspan.WithString(args, "url", url), photo
}

// admit checks the call against what is known of the device's tools, before
// the device is bothered. A list that is stale, partial or not read yet
// refuses nothing by name: the device itself knows better.
func (x *Session) admit(c devices.ToolCall) error {
	x.mu.Lock()
	cat, state, partial, mcp := x.catalog, x.catalogState, x.partial, x.mcp
	x.mu.Unlock()
	if mcp == devices.MCPNone {
		return devices.Errorf(devices.CodeToolUnknown, "device %s does not speak MCP", c.Device)
	}
	if cat == nil {
		if c.Tool == catalog.UpgradeFirmware {
			return asError((&catalog.Tool{Name: c.Tool}).CheckCall(c.Arguments))
		}
		return nil
	}
	tool := cat.Tool(c.Tool)
	if tool == nil {
		if state == devices.CatalogReady && !partial {
			return devices.Errorf(devices.CodeToolUnknown, "device %s has no tool %q", c.Device, c.Tool)
		}
		tool = &catalog.Tool{Name: c.Tool}
	}
	if c.Tool == toolSnapshot && jsonspan.Member(c.Arguments, "url") == nil {
		c.Arguments, _ = x.snapshotArguments(c.Arguments)
	}
	return asError(tool.CheckCall(c.Arguments))
}

// asError avoids the typed nil.
func asError(e *devices.Error) error {
	if e == nil {
		return nil
	}
	return e
}

// acquire waits for one of the device's slots, first come first served.
func (x *Session) acquire(ctx context.Context) error {
	x.mu.Lock()
	switch {
	case x.closed != "":
		defer x.mu.Unlock()
		return closedCall(x.closed, false)
	case x.leaving:
		defer x.mu.Unlock()
		return closedCall(devices.CloseDraining, false)
	case x.inFlight < x.svc.cfg.CallsPerDevice:
		x.inFlight++
		x.mu.Unlock()
		x.svc.stats.InFlight.Add(1)
		return nil
	case len(x.queue) >= MaxWaitingCalls:
		defer x.mu.Unlock()
		return devices.Errorf(devices.CodeDeviceBusy, "%d calls wait for device %s already; it runs one after another", MaxWaitingCalls, x.who.Device)
	}
	turn := make(chan struct{}, 1)
	x.queue = append(x.queue, turn)
	x.mu.Unlock()
	x.svc.stats.Waiting.Add(1)
	defer x.svc.stats.Waiting.Add(-1)
	select {
	case _, ok := <-turn:
		if !ok {
			return closedCall(x.closeReason(), false)
		}
		x.svc.stats.InFlight.Add(1)
		return nil
	case <-ctx.Done():
	}
	x.mu.Lock()
	for i, ch := range x.queue {
		if ch == turn {
			x.queue = append(x.queue[:i], x.queue[i+1:]...)
			x.mu.Unlock()
			return timeoutCall(ctx, false)
		}
	}
	x.mu.Unlock()
	if _, ok := <-turn; ok { // the turn came in the same moment: pass it on
		x.svc.stats.InFlight.Add(1)
		x.release()
	}
	return timeoutCall(ctx, false)
}

// release hands the slot to the next caller.
func (x *Session) release() {
	x.svc.stats.InFlight.Add(-1)
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.queue) > 0 {
		x.queue[0] <- struct{}{}
		x.queue = x.queue[1:]
		return
	}
	x.queue = nil
	x.inFlight--
	x.probeLocked()
}

func (x *Session) closeReason() devices.CloseReason {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.closed
}

func closedCall(reason devices.CloseReason, sent bool) *devices.Error {
	e := &devices.Error{Code: devices.CodeConnectionLost, Sent: sent, Detail: "the device's connection ended: " + string(reason)}
	if reason == devices.CloseSuperseded {
		e.Code, e.Detail = devices.CodeSuperseded, "the device connected again during the call"
	}
	if reason == devices.CloseDraining && !sent {
		e.Code, e.Part, e.Detail = devices.CodeUnavailable, "node", "the node that holds the device stops; the device is on its way to another"
	}
	if sent {
		e.Outcome = devices.OutcomeUnknown
	}
	return e
}

func timeoutCall(ctx context.Context, sent bool) *devices.Error {
	e := &devices.Error{Code: devices.CodeDeviceTimeout, Sent: sent, Detail: "the device did not answer in time"}
	if !sent {
		e.Detail = "the call's turn did not come in time: earlier calls still run on the device"
	}
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		e.Detail = "the caller gave up"
	}
	if sent {
		e.Outcome = devices.OutcomeUnknown
	}
	return e
}

// failedCall turns a failed call of a tool into its result or error.
func (x *Session) failedCall(c devices.ToolCall, err error, silent bool) (devices.ToolResult, error) {
	var closed closedError
	gone := errors.As(err, &closed) && !errors.Is(err, mcpclient.ErrNotSent) && closed.byDevice()
	if restarts[c.Tool] && (gone || silent) || gone && (disconnects[c.Tool] || c.Tool == catalog.UpgradeFirmware) {
		return devices.ToolResult{Content: json.RawMessage("[]"), Outcome: OutcomeRestarting}, nil
	}
	rpc := (*mcpclient.RPCError)(nil)
	if errors.As(err, &rpc) && rpc.Refusal() == mcpclient.RefusalOther {
		return devices.ToolResult{Content: textContent(rpc.Message), IsError: true}, nil
	}
	return devices.ToolResult{}, x.callError(c.Tool, err)
}

// callError is the one table from the MCP client's errors to codes.
func (x *Session) callError(what string, err error) *devices.Error {
	rpc := (*mcpclient.RPCError)(nil)
	var closed closedError
	switch {
	case errors.As(err, &rpc):
		switch rpc.Refusal() {
		case mcpclient.RefusalTool:
			x.relist() // our list is out of date
			return devices.Errorf(devices.CodeToolUnknown, "the device has no tool %q: %s", what, rpc.Message)
		case mcpclient.RefusalArguments:
			return &devices.Error{Code: devices.CodeInvalidArguments, Detail: rpc.Message, Sent: true, Faults: []devices.Fault{{Detail: rpc.Message}}}
		}
		return &devices.Error{Code: devices.CodeDeviceError, Detail: rpc.Message, Sent: true}
	case errors.Is(err, mcpclient.ErrMalformed):
		return &devices.Error{Code: devices.CodeDeviceError, Detail: err.Error(), Sent: true, Outcome: devices.OutcomeUnknown}
	case errors.As(err, &closed):
		return closedCall(closed.reason, !errors.Is(err, mcpclient.ErrNotSent))
	case errors.Is(err, mcpclient.ErrNotSent):
		return &devices.Error{Code: devices.CodeConnectionLost, Detail: "the device's connection takes no more bytes: " + err.Error()}
	case errors.Is(err, context.DeadlineExceeded):
		x.doubt()
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
