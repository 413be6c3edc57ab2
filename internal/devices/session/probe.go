package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/mcpclient"
)

// probing is the state of a session after a call timed out. The device may be busy with
// that call, or not answer anything: a probe finds out. Session.mu protects the fields.
type probing struct {
	timedOut     bool // a call timed out, and nothing was answered since
	running      bool // a probe is running
	unresponsive bool // the device counts as unresponsive because of a probe, not a handshake
	tries        uint8
}

// OnCallTimeout records that the device did not answer a call in time. The probe starts
// when no call is running: a device that runs a tool answers nothing else, and the outcome
// of the next call is as good.
func (x *Session) OnCallTimeout() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.probing.timedOut = true
}

// probeLocked starts a probe if one is needed.
func (x *Session) probeLocked() {
	p := &x.probing
	if p.timedOut && !p.running && x.inFlight == 0 && x.closed == "" {
		p.running = x.svc.run(x.probe)
	}
}

// probe checks whether the device answers. If not, it counts as unresponsive until it
// does. A probe does not count as a handshake attempt.
func (x *Session) probe() {
	ctx, cancel := context.WithTimeout(x.svc.tasks.Context(), mcpclient.StepTimeout)
	defer cancel()
	err := x.client.Probe(ctx)
	if err == nil {
		x.onAnswer()
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	p := &x.probing
	p.running = false
	switch {
	case err == nil, !p.timedOut, x.svc.tasks.Context().Err() != nil, x.closed != "": // or another request was answered meanwhile
		return
	case x.inFlight > 0: // a call started meanwhile that may keep the device busy
		return
	case !p.unresponsive && (x.mcp != devices.MCPReady || x.handshaking):
		return // the failure is known already, and its handshake is retried
	}
	if !p.unresponsive {
		p.unresponsive = true
		x.setMCPLocked(devices.MCPUnresponsive, devices.Clip(fmt.Sprintf("probe: %v", err)))
		x.catalogState = devices.CatalogStale
		x.svc.ports.Records.SavePresence(x.presenceLocked(true))
		x.svc.log.Warn("the device does not answer", "device", x.entry.id, "session", x.id, "error", err)
	}
	pause := min(retryFirst<<min(p.tries, 10), retryLast)
	p.tries++
	if x.retry != nil {
		x.retry.Stop()
	}
	x.retry = time.AfterFunc(pause, func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.probeLocked()
	})
}

// noteAnswer handles the outcome of a request: any answer shows that the device is alive.
func (x *Session) noteAnswer(err error) {
	if err != nil {
		rpc := (*mcpclient.RPCError)(nil)
		if !errors.As(err, &rpc) && !errors.Is(err, mcpclient.ErrMalformed) {
			return
		}
	}
	x.onAnswer()
}

// onAnswer records that the device has answered, in time or late.
func (x *Session) onAnswer() {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := &x.probing
	if !p.timedOut {
		return
	}
	silent := p.unresponsive
	p.timedOut, p.unresponsive, p.tries = false, false, 0
	if !silent || x.mcp != devices.MCPUnresponsive || x.closed != "" {
		return
	}
	if x.retry != nil {
		x.retry.Stop()
	}
	x.setMCPLocked(devices.MCPReady, "")
	x.catalogState = devices.CatalogReady
	x.svc.ports.Records.SavePresence(x.presenceLocked(true))
}
