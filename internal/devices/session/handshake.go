package session

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"sync"
	"time"
	"unique"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/mcpclient"
)

// Pauses between retries of a failed handshake double from the first to the last.
const (
	retryFirst = 5 * time.Second
	retryLast  = 5 * time.Minute
)

// Renewal of the upload token: at half of its lifetime by the sweeper, and before a
// camera call with less than grantReserve left.
const (
	grantRenew   = 12 * time.Hour
	grantReserve = time.Hour
)

// LookupTimeout limits how long a session waits for the database.
const LookupTimeout = 250 * time.Millisecond

// relistEvery is how often a device can make fleetd read its list again.
const relistEvery = 30 * time.Second

// StartMCP starts to read the device's tools: when it connects, if the transport has no
// hello, and after each answered hello. Without features.mcp the device has no MCP
// server, which is different from an empty list. A hello without news starts nothing.
func (x *Session) StartMCP(f devices.Features) {
	x.mu.Lock()
	again := x.features == f
	x.features = f
	settled := x.mcp == devices.MCPReady || x.handshaking
	x.mu.Unlock()
	switch {
	case f != devices.FeaturesNone && settled, f == devices.FeaturesNone && again:
		return
	case f != devices.FeaturesNone:
		x.startHandshake()
		return
	}
	x.entry.mu.Lock()
	x.entry.catalog, x.entry.partial, x.entry.listedFW = devices.Hash{}, false, ""
	x.entry.mu.Unlock()
	x.mu.Lock()
	if x.retry != nil {
		x.retry.Stop()
	}
	x.setMCPLocked(devices.MCPNone, "")
	x.catalog, x.catalogState, x.partial = nil, devices.CatalogNone, false
	x.storedList, x.storedPartial = devices.Hash{}, false
	presence := x.presenceLocked(x.closed == "")
	x.mu.Unlock()
	x.svc.ports.Records.SavePresence(presence)
	x.record(devices.Step{Kind: devices.StepConnected, Cause: devices.CauseNoMCP, Generation: x.generation})
	x.svc.observers.Each(func(l Lifecycle) { l.Ready(x.entry.id, x.id) })
}

// Relist reads the list again because the device reported a change, or refused a listed
// tool: at once, or when relistEvery has passed since the last time.
func (x *Session) Relist() {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := clock.Reading(time.Now())
	switch wait := time.Duration(x.relistAt + int64(relistEvery) - now); {
	case x.closed != "", x.relistDue:
	case wait > 0:
		x.relistDue = true
		time.AfterFunc(wait, func() { // not stopped at Close: it is short and checks first
			x.mu.Lock()
			defer x.mu.Unlock()
			x.relistDue, x.relistAt = false, clock.Reading(time.Now())
			x.startHandshakeLocked()
		})
	default:
		x.relistAt = now
		x.startHandshakeLocked()
	}
}

// startHandshake runs a handshake in its own goroutine. If one is running, another
// follows, since that one may have read too early.
func (x *Session) startHandshake() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.startHandshakeLocked()
}

func (x *Session) startHandshakeLocked() {
	switch {
	case x.closed != "":
	case x.handshaking:
		x.again = true
	default:
		x.handshaking = x.svc.run(x.handshake)
	}
}

// handshakeEndedLocked is called together with the outcome of a handshake, so that a
// handshake never appears to end without one.
func (x *Session) handshakeEndedLocked() {
	x.handshaking = false
	if x.again {
		x.again = false
		x.startHandshakeLocked()
	}
}

func (x *Session) handshake() {
	s := x.svc
	begun := time.Now()
	s.stats.Handshakes.Add(1)
	defer s.stats.Handshakes.Add(-1)
	x.mu.Lock()
	if x.features == devices.FeaturesNone { // its hello arrived meanwhile
		x.handshaking, x.again = false, false
		x.mu.Unlock()
		return
	}
	x.setMCPLocked(devices.MCPListing, "")
	x.probing.unresponsive = false // decided by the handshake
	x.mu.Unlock()
	list, err := x.initializeAndList(s.tasks.Context())
	if err == nil && x.isWithoutMCP() {
		list.Release()
		err = errWithoutMCP
	}
	if err == nil {
		err = x.onList(list)
		list.Release()
	}
	if err != nil {
		x.failed(err)
		return
	}
	s.stats.HandshakeTime.Observe(time.Since(begun))
}

var errWithoutMCP = errors.New("the device reported that it has no MCP server")

func (x *Session) isWithoutMCP() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.features == devices.FeaturesNone
}

// Limits of reading one list: the total time, and for how long it occupies a slot. Slots
// smooth a storm of devices that answer at once. A slow device continues without its slot,
// so thousands of silent devices delay another one by seconds only.
const (
	listTimeout = time.Minute
	slotTime    = 300 * time.Millisecond
)

// initializeAndList occupies a slot only for the list.
func (x *Session) initializeAndList(ctx context.Context) (mcpclient.ToolList, error) {
	if err := x.initialize(ctx); err != nil {
		return mcpclient.ToolList{}, err
	}
	select {
	case x.svc.handshakes <- struct{}{}:
		release := sync.OnceFunc(func() { <-x.svc.handshakes })
		timer := time.AfterFunc(slotTime, release)
		defer timer.Stop()
		defer release()
	case <-ctx.Done():
		return mcpclient.ToolList{}, context.Cause(ctx)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, listTimeout, mcpclient.NoAnswer(listTimeout))
	defer cancel()
	return x.client.ListTools(ctx)
}

// initialize sends the device the upload address for photos and reads what it is.
func (x *Session) initialize(ctx context.Context) error {
	s := x.svc
	url, token, expires := s.ports.Vision.Grant(x.entry.id, clock.Now())
	info, err := x.client.Initialize(ctx, mcpclient.InitParams{VisionURL: url, VisionToken: token, Version: s.cfg.Version})
	if err != nil {
		return err
	}
	reported := unique.Make(devices.Facts{Board: devices.Clip(info.Name), Firmware: devices.Clip(info.Version)})
	x.mu.Lock()
	if x.initialized, x.grantExpires = true, 0; !expires.IsZero() {
		x.grantExpires = expires.Unix()
	}
	x.reported = reported
	x.mu.Unlock()
	if x.entry.isKnown() {
		x.reportInitialized()
	} // else it waits for the device's row: another node may have newer facts
	return nil
}

// reportInitialized stores what the device reported in `initialize`. A device that
// connects without an OTA check (with credentials from an earlier boot, or without any)
// reports its board and version only there. They are newer than any earlier check.
func (x *Session) reportInitialized() {
	x.mu.Lock()
	initialized, facts := x.initialized, x.reported
	x.mu.Unlock()
	if !initialized {
		return
	}
	reported, d := facts.Value(), x.entry.device()
	if reported.Firmware == "" || d.Firmware == reported.Firmware && d.Board != "" {
		return
	}
	f := devices.Check{Device: d.ID, Facts: d.Facts}
	f.Firmware, f.CheckedAt = reported.Firmware, clock.Now().Truncate(time.Microsecond)
	if d.Firmware != f.Firmware {
		f.ELF = "" // the ELF belongs to another image
	}
	f.Board = cmp.Or(f.Board, reported.Board)
	x.svc.OnFacts(f)
}

// failed keeps the session and schedules another handshake.
func (x *Session) failed(err error) {
	state := devices.MCPError
	if errors.Is(err, context.DeadlineExceeded) {
		state = devices.MCPUnresponsive
	}
	x.mu.Lock()
	if x.closed != "" || x.features == devices.FeaturesNone {
		x.handshaking = false
		x.mu.Unlock()
		return
	}
	reason := devices.Clip(strings.ToValidUTF8(err.Error(), "\uFFFD"))
	x.setMCPLocked(state, reason)
	if x.catalog == nil {
		x.catalogState = devices.CatalogError
	} else {
		x.catalogState = devices.CatalogStale
	}
	pause := min(retryFirst<<x.attempts, retryLast)
	x.attempts = min(x.attempts+1, 10)
	if x.retry != nil {
		x.retry.Stop()
	}
	x.retry = time.AfterFunc(pause, x.startHandshake)
	x.handshakeEndedLocked()
	presence := x.presenceLocked(true)
	x.mu.Unlock()
	x.svc.ports.Records.SavePresence(presence)
	x.record(devices.Step{Kind: devices.StepMCPFailed, Cause: devices.StepCause(state), Text: reason})
	x.svc.log.Warn("MCP handshake failed", "device", x.entry.id, "session", x.id, "state", state, "retry", pause, "error", reason)
}

func (x *Session) setMCPLocked(state devices.MCPState, reason string) {
	x.mcpError = reason
	if x.mcp == state {
		return
	}
	if x.closed == "" && x.announced {
		x.svc.stats.States.Add(State{x.transport, x.mcp}, -1)
		x.svc.stats.States.Add(State{x.transport, state}, 1)
	}
	x.mcp = state
}

// IsAlive requests a sign of life from the device and waits for it until ctx ends, at most
// the time of one MCP step. A device that runs a tool counts as alive: it answers nothing
// meanwhile.
func (x *Session) IsAlive(ctx context.Context) bool {
	if !x.isIdle() {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, mcpclient.StepTimeout)
	defer cancel()
	return x.client.Probe(ctx) == nil
}

// isIdle reports whether no call is running.
func (x *Session) isIdle() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.inFlight == 0
}

// RefreshPoll is how often a refresh checks whether the handshake has ended.
const RefreshPoll = 20 * time.Millisecond

// Refresh lists the device's tools again.
func (x *Session) Refresh(ctx context.Context) error {
	x.startHandshake()
	ticker := time.NewTicker(RefreshPoll)
	defer ticker.Stop()
	for {
		x.mu.Lock()
		busy, closed, failed, reason := x.handshaking, x.closed, x.mcp != devices.MCPReady, x.mcpError
		x.mu.Unlock()
		switch {
		case closed != "":
			return devices.ClosedCall(closed, true)
		case !busy && failed:
			return &devices.Error{Code: devices.CodeDeviceError, Detail: "the device's tools could not be listed: " + reason, Sent: true}
		case !busy:
			return nil
		}
		select {
		case <-ctx.Done():
			return devices.TimeoutCall(ctx, true)
		case <-ticker.C:
		}
	}
}
