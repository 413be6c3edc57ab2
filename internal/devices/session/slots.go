package session

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/mcpclient"
)

// Acquire waits for one of the device's slots, first come first served.
func (x *Session) Acquire(ctx context.Context) error {
	x.mu.Lock()
	switch {
	case x.closed != "":
		defer x.mu.Unlock()
		return ClosedCall(x.closed, false)
	case x.leaving:
		defer x.mu.Unlock()
		return ClosedCall(devices.CloseDraining, false)
	case int(x.inFlight) < x.svc.cfg.CallsPerDevice:
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
			return ClosedCall(x.closeReason(), false)
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
			return TimeoutCall(ctx, false)
		}
	}
	x.mu.Unlock()
	if _, ok := <-turn; ok { // the turn came in the same moment: pass it on
		x.svc.stats.InFlight.Add(1)
		x.Release()
	}
	return TimeoutCall(ctx, false)
}

// Release hands the slot to the next caller.
func (x *Session) Release() {
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

// ClosedCall is the error of a call whose session has ended; sent says that the device
// may have got it.
func ClosedCall(reason devices.CloseReason, sent bool) *devices.Error {
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

// TimeoutCall is the error of a call whose time is over, or whose caller has left.
func TimeoutCall(ctx context.Context, sent bool) *devices.Error {
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

// Elsewhere tells whether another living node says it holds the device.
func (s *Hub) Elsewhere(p devices.Presence) bool {
	return p.Online && p.Node != s.cfg.Node && s.cfg.Alive != nil && s.cfg.Alive(p.Node)
}

// Tools is what is known of a device's tools at a moment.
type Tools struct {
	List     *catalog.Catalog // nil: nothing
	Complete bool             // it was read on this connection, to its end
	NoMCP    bool             // the device has no MCP server
}

// Tools returns what is known of the device's tools.
func (x *Session) Tools() Tools {
	x.mu.Lock()
	defer x.mu.Unlock()
	return Tools{List: x.catalog, Complete: x.catalogState == devices.CatalogReady && !x.partial, NoMCP: x.mcp == devices.MCPNone}
}

// Labels are the device's; after AwaitRow those that the database holds.
func (x *Session) Labels() map[string]string { return x.entry.device.Load().Labels }

// CallerState returns what was made when it was first asked for; it ends with the
// session. Without make it may be nil.
func (x *Session) CallerState(make func() any) any {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.callers == nil && make != nil {
		x.callers = make()
	}
	return x.callers
}

// PrepareUpload gives the device a new upload token if it has none, or one that
// ends soon.
func (x *Session) PrepareUpload(ctx context.Context) error {
	x.mu.Lock()
	due := !x.initialized || !x.grantExpires.IsZero() && time.Until(x.grantExpires) < grantReserve
	x.mu.Unlock()
	if !due {
		return nil
	}
	return x.initialize(ctx)
}

// CallTool calls a tool of the device; late is mcpclient's. The caller has a slot.
func (x *Session) CallTool(ctx context.Context, tool string, args json.RawMessage, late func(mcpclient.Result, error)) (mcpclient.Result, error) {
	r, err := x.client.CallTool(ctx, tool, args, late)
	x.judgeAnswer(err)
	return r, err
}

// Request sends any other request. The caller has a slot.
func (x *Session) Request(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	r, err := x.client.Request(ctx, method, params)
	x.judgeAnswer(err)
	return r, err
}
