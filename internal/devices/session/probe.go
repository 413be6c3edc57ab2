package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/mcpclient"
)

// probing is the state of a session whose device let a call time out. The
// device may be busy with that call, or not answer anything any more; a probe
// shows which. The session's lock guards the fields.
type probing struct {
	doubted bool // a call timed out, and nothing has been answered since
	running bool // one at a time
	silent  bool // the device counts as unresponsive for a probe, and not for a handshake
	tries   uint8
}

// Doubt notes that the device did not answer a call in time. The probe begins
// when no call runs: a device that runs a tool answers nothing meanwhile, and
// the outcome of the next call tells as much.
func (x *Session) Doubt() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.probing.doubted = true
}

// probeLocked starts a probe if there is a reason for one.
func (x *Session) probeLocked() {
	p := &x.probing
	if p.doubted && !p.running && x.inFlight == 0 && x.closed == "" {
		p.running = x.svc.run(x.probe)
	}
}

// probe finds out whether the device answers anything. If not, it counts as
// unresponsive until it does. It does not count as an attempt of a handshake.
func (x *Session) probe() {
	ctx, cancel := context.WithTimeout(x.svc.tasks.Context(), mcpclient.StepTimeout)
	defer cancel()
	err := x.client.Probe(ctx)
	if err == nil {
		x.answered()
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	p := &x.probing
	p.running = false
	switch {
	case err == nil, !p.doubted, x.svc.tasks.Context().Err() != nil, x.closed != "": // or something else was answered meanwhile
		return
	case x.inFlight > 0: // a call came meanwhile, which the device may be busy with
		return
	case !p.silent && (x.mcp != devices.MCPReady || x.handshaking):
		return // what is wrong is known, and its handshake is tried again
	}
	if !p.silent {
		p.silent = true
		x.setMCPLocked(devices.MCPUnresponsive, devices.Clip(fmt.Sprintf("probe: %v", err)))
		x.catalogState = devices.CatalogStale
		x.svc.ports.Records.SavePresence(x.presenceLocked(true))
		x.svc.log.Warn("the device does not answer", "device", x.who.Device, "session", x.id, "error", err)
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

// judgeAnswer takes the outcome of a request: an answer, whatever it is, shows
// that the device is there.
func (x *Session) judgeAnswer(err error) {
	if err != nil {
		rpc := (*mcpclient.RPCError)(nil)
		if !errors.As(err, &rpc) && !errors.Is(err, mcpclient.ErrMalformed) {
			return
		}
	}
	x.answered()
}

// answered notes that the device has answered something, in time or late: it is
// there.
func (x *Session) answered() {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := &x.probing
	if !p.doubted {
		return
	}
	silent := p.silent
	p.doubted, p.silent, p.tries = false, false, 0
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
