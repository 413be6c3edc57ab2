package session

import (
	"context"
	"encoding/json"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/mcpclient"
)

// Acquire waits for one of the device's slots, in which callers take turns.
func (x *Session) Acquire(ctx context.Context, caller string) error {
	x.mu.Lock()
	switch {
	case x.closed != "":
		defer x.mu.Unlock()
		return devices.ClosedCall(x.closed, false)
	case x.draining:
		defer x.mu.Unlock()
		return devices.ClosedCall(devices.CloseDraining, false)
	case !x.isFullLocked():
		x.inFlight++
		x.mu.Unlock()
		x.svc.stats.InFlight.Add(1)
		return nil
	}
	ready := x.useLocked().queue.Add(caller, MaxWaitingCalls)
	x.mu.Unlock()
	if ready == nil {
		return x.busy()
	}
	x.svc.stats.Waiting.Add(1)
	defer x.svc.stats.Waiting.Add(-1)
	select {
	case turn, open := <-ready:
		switch {
		case !open:
			return devices.ClosedCall(x.closeReason(), false)
		case !turn:
			return x.busy()
		}
		x.svc.stats.InFlight.Add(1)
		return nil
	case <-ctx.Done():
	}
	x.mu.Lock()
	waits := x.use.queue.Remove(ready)
	x.mu.Unlock()
	if !waits && <-ready { // the turn came at the same moment: pass it on
		x.svc.stats.InFlight.Add(1)
		x.Release()
	}
	return devices.TimeoutCall(ctx, false)
}

func (x *Session) busy() error {
	return devices.Errorf(devices.CodeDeviceBusy, "%d calls wait for device %s already; try again later", MaxWaitingCalls, x.entry.id)
}

// TryAcquire takes one of the device's slots without waiting, and not before callers that wait.
func (x *Session) TryAcquire() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.closed != "":
		return devices.ClosedCall(x.closed, false)
	case x.draining:
		return devices.ClosedCall(devices.CloseDraining, false)
	case x.isFullLocked():
		return devices.Errorf(devices.CodeDeviceBusy, "device %s runs another call", x.entry.id)
	}
	x.inFlight++
	x.svc.stats.InFlight.Add(1)
	return nil
}

// IsFull reports whether all slots are in use.
func (x *Session) IsFull() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.isFullLocked()
}

func (x *Session) isFullLocked() bool { return int(x.inFlight) >= x.svc.cfg.CallsPerDevice }

// IsSettled reports whether the device's tools were listed on this connection, or cannot be.
func (x *Session) IsSettled() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.toolsRead || x.mcp == devices.MCPNone || x.mcp == devices.MCPError || x.mcp == devices.MCPUnresponsive
}

// IsTalking reports whether a conversation is open on the device.
func (x *Session) IsTalking() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.isTalkingLocked()
}

// Release passes the slot to the next caller.
func (x *Session) Release() {
	x.svc.stats.InFlight.Add(-1)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.use != nil && x.use.queue.Next() {
		return
	}
	x.inFlight--
	x.probeLocked()
}

func (x *Session) closeReason() devices.CloseReason {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.closed
}

// IsHeldElsewhere reports whether another live node holds the device according to the row.
func (s *Hub) IsHeldElsewhere(p devices.Presence) bool {
	return p.Online && p.Node != s.cfg.Node && s.cfg.IsNodeAlive != nil && s.cfg.IsNodeAlive(p.Node)
}

// Tools is the current state of a device's tools.
type Tools struct {
	List     *catalog.Catalog // nil: unknown
	Complete bool             // it was completely read on this connection
	NoMCP    bool             // the device has no MCP server
	Silent   bool             // it does not answer MCP requests
}

// Tools returns the current state of the device's tools.
func (x *Session) Tools() Tools {
	x.mu.Lock()
	defer x.mu.Unlock()
	return Tools{List: x.catalog, Complete: x.catalogState == devices.CatalogReady && !x.partial, NoMCP: x.mcp == devices.MCPNone, Silent: x.mcp == devices.MCPUnresponsive}
}

// Labels returns the device's labels; after AwaitRow those in the database.
func (x *Session) Labels() map[string]string { return x.entry.stored.Load().labels }

// CallerState returns the state that make created at the first call; it lives as long as the
// session. Without make it may be nil. All calls have the same T.
func CallerState[T any](x *Session, make func() *T) *T {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.use == nil && make == nil {
		return nil
	}
	u := x.useLocked()
	if u.callers == nil && make != nil {
		u.callers = make()
	}
	state, _ := u.callers.(*T)
	return state
}

// PrepareUpload gives the device a new upload token if it has none, or one that expires
// soon.
func (x *Session) PrepareUpload(ctx context.Context) error {
	x.mu.Lock()
	due := !x.initialized || x.grantEndsLocked(time.Now(), grantReserve)
	x.mu.Unlock()
	if !due {
		return nil
	}
	return x.initialize(ctx)
}

// CallTool calls a tool of the device; late is as in mcpclient. The caller holds a slot.
func (x *Session) CallTool(ctx context.Context, tool string, args json.RawMessage, late func(mcpclient.Result, error)) (mcpclient.Result, error) {
	r, err := x.client.CallTool(ctx, tool, args, late)
	x.noteAnswer(err)
	return r, err
}

// Request sends any other request. The caller holds a slot.
func (x *Session) Request(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	r, err := x.client.Request(ctx, method, params)
	x.noteAnswer(err)
	return r, err
}
