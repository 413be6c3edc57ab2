package session

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/mcpclient"
)

// Retries of a failed handshake double from the first to the last pause.
const (
	retryFirst = 5 * time.Second
	retryLast  = 5 * time.Minute
)

// Renewal of the upload token: at half of its life by the sweeper, and before
// a camera call with less than grantReserve left.
const (
	grantRenew   = 12 * time.Hour
	grantReserve = time.Hour
)

// LookupTimeout bounds what a session waits for the database.
const LookupTimeout = 250 * time.Millisecond

// relistEvery bounds how often a device can make fleetd read its list again.
const relistEvery = 30 * time.Second

// Retries of a handshake with a device that has not said what it can.
var unannouncedPauses = [...]time.Duration{5 * time.Second, 25 * time.Second, time.Hour}

// StartMCP begins to read the device's tools: at the connection where nothing
// is announced there, and at each hello, once that is answered. Without
// features.mcp the device has no MCP server, which is not the same as an empty
// list. A hello that tells nothing new starts nothing.
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
	x.own, x.ownPartial = devices.Hash{}, false
	presence := x.presenceLocked(x.closed == "")
	x.mu.Unlock()
	x.svc.ports.Records.SavePresence(presence)
}

// Relist reads the list again because the device reports a change, or refused a
// tool that is in the list: at once, or when relistEvery has passed since
// the last time.
func (x *Session) Relist() {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := time.Now()
	switch wait := x.relistAt.Add(relistEvery).Sub(now); {
	case x.closed != "", x.relistDue:
	case wait > 0:
		x.relistDue = true
		time.AfterFunc(wait, func() { // nothing to stop: it is short, and looks first
			x.mu.Lock()
			defer x.mu.Unlock()
			x.relistDue, x.relistAt = false, time.Now()
			x.startHandshakeLocked()
		})
	default:
		x.relistAt = now
		x.startHandshakeLocked()
	}
}

// startHandshake runs one handshake in its own goroutine; if one runs already,
// another follows it, since that one may have read too early.
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

// handshakeEndedLocked is called where the outcome of a handshake is noted, so
// that nobody sees it ended without one.
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
	if x.features == devices.FeaturesNone { // its hello came meanwhile
		x.handshaking, x.again = false, false
		x.mu.Unlock()
		return
	}
	x.setMCPLocked(devices.MCPListing, "")
	x.probing.silent = false // what follows tells
	x.mu.Unlock()
	list, err := x.initializeAndList(s.tasks.Context())
	if err == nil && x.isWithoutMCP() {
		list.Release()
		err = errWithoutMCP
	}
	if err == nil {
		err = x.listed(list)
		list.Release()
	}
	if err != nil {
		x.failed(err)
		return
	}
	s.stats.HandshakeTime.Observe(time.Since(begun))
}

var errWithoutMCP = errors.New("the device says that it has no MCP")

func (x *Session) isWithoutMCP() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.features == devices.FeaturesNone
}

// Bounds of reading one list: in all, and for how long it may keep a slot from
// others. Slots smooth a storm of devices that answer at once; a slow device
// goes on without one, and thousands of silent ones keep a newcomer waiting for
// seconds only.
const (
	listTimeout = time.Minute
	slotTime    = 300 * time.Millisecond
)

// initializeAndList takes a slot for the list only.
func (x *Session) initializeAndList(ctx context.Context) (mcpclient.ToolList, error) {
	if err := x.initialize(ctx); err != nil {
		return mcpclient.ToolList{}, err
	}
	select {
	case x.svc.handshakes <- struct{}{}:
		giveBack := sync.OnceFunc(func() { <-x.svc.handshakes })
		timer := time.AfterFunc(slotTime, giveBack)
		defer timer.Stop()
		defer giveBack()
	case <-ctx.Done():
		return mcpclient.ToolList{}, context.Cause(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	return x.client.ListTools(ctx)
}

// initialize tells the device where to send photos and learns what it is.
func (x *Session) initialize(ctx context.Context) error {
	s := x.svc
	url, token, expires := s.ports.Vision.Grant(x.who.Device, time.Now())
	info, err := x.client.Initialize(ctx, mcpclient.InitParams{VisionURL: url, VisionToken: token, Version: s.cfg.Version})
	if err != nil {
		return err
	}
	board, firmware := s.strings.get(devices.Clip(info.Name)), s.strings.get(devices.Clip(info.Version))
	x.mu.Lock()
	x.initialized, x.grantExpires = true, expires
	x.board, x.firmware = board, firmware
	x.mu.Unlock()
	if x.entry.isKnown() {
		x.reportInitialized()
	} // else it waits for the device's row: another node may have taken a newer check, with more in it
	return nil
}

// reportInitialized takes over what the device said of itself in `initialize`. One
// that connects without an OTA check (credentials from an earlier boot, or none
// asked) reports its board and version only there. That is newer than any earlier
// check, wherever the two are merged.
func (x *Session) reportInitialized() {
	x.mu.Lock()
	board, firmware := x.board, x.firmware
	x.mu.Unlock()
	d := x.entry.device.Load()
	if firmware == "" || d.Firmware == firmware && d.Board != "" {
		return
	}
	f := devices.Facts{Device: d.ID, Board: d.Board, Firmware: firmware, ELF: d.ELF, Chip: d.Chip, Language: d.Language, Serial: d.Serial,
		ActivateV2: d.ActivateV2, CheckedAt: time.Now().UTC().Truncate(time.Microsecond)}
	if d.Firmware != firmware {
		f.ELF = "" // of another image
	}
	if f.Board == "" {
		f.Board = board
	}
	if f.CheckedAt.Before(d.CheckedAt) { // by another node's clock
		f.CheckedAt = d.CheckedAt.Add(time.Microsecond)
	}
	x.svc.Reported(f)
}

// failed keeps the session and tries the handshake again later.
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
	pause := min(retryFirst<<min(x.attempts, 10), retryLast)
	if x.features == devices.FeaturesUnknown {
		pause = unannouncedPauses[min(int(x.attempts), len(unannouncedPauses)-1)]
	}
	x.attempts++
	if x.retry != nil {
		x.retry.Stop()
	}
	x.retry = time.AfterFunc(pause, x.startHandshake)
	x.handshakeEndedLocked()
	presence := x.presenceLocked(true)
	x.mu.Unlock()
	x.svc.ports.Records.SavePresence(presence)
	x.svc.log.Warn("MCP handshake failed", "device", x.who.Device, "session", x.id, "state", state, "retry", pause, "error", reason)
}

func (x *Session) setMCPLocked(state devices.MCPState, reason string) {
	x.mcpError = reason
	if x.mcp == state {
		return
	}
	if x.closed == "" && x.announced {
		x.svc.stats.States.Add(State{x.who.Transport, x.mcp}, -1)
		x.svc.stats.States.Add(State{x.who.Transport, state}, 1)
	}
	x.mcp = state
}

// Alive asks the device for a sign of life and waits for it until ctx ends, at
// most the time of one step. A device that runs a tool is let alone: it answers
// nothing meanwhile.
func (x *Session) Alive(ctx context.Context) bool {
	if !x.isIdle() {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, mcpclient.StepTimeout)
	defer cancel()
	return x.client.Probe(ctx) == nil
}

// isIdle tells that no call runs.
func (x *Session) isIdle() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.inFlight == 0
}

// RefreshPoll is how often a refresh looks whether the handshake has ended.
const RefreshPoll = 20 * time.Millisecond

// Refresh reads the device's tools again.
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
			return ClosedCall(closed, true)
		case !busy && failed:
			return &devices.Error{Code: devices.CodeDeviceError, Detail: "the device's tools could not be read: " + reason, Sent: true}
		case !busy:
			return nil
		}
		select {
		case <-ctx.Done():
			return TimeoutCall(ctx, true)
		case <-ticker.C:
		}
	}
}
