package dispatch

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/session"
	"fleetd/internal/tasks"
)

// Config configures a Dispatcher.
type Config struct {
	Node   string
	Routed bool // there can be other nodes
}

// Ports are the interfaces and parts that a Dispatcher uses.
type Ports struct {
	Records   Finder
	Registry  *registry.Registry
	Hub       *session.Hub
	Admission Admission
	Router    Router
	Vision    session.Vision
	Audit     audit.Auditor
	Recorder  devices.Recorder // may be nil
	Tasks     *tasks.Group
	Log       *slog.Logger
}

// Finder reads one device, or returns ErrNotFound.
type Finder interface {
	Find(ctx context.Context, id devices.ID) (devices.Row, error)
}

// Dispatcher sends requests to devices. Its methods are safe for concurrent use.
type Dispatcher struct {
	cfg     Config
	ports   Ports
	hub     *session.Hub
	log     *slog.Logger
	rules   *rules
	callIDs *devices.CallIDs
	limiter Limiter
	running running
	stats   Counters
	busy    atomic.Pointer[BusyFunc]
}

// BusyFunc returns why a device takes no call now although it is a member, or nil. connected is whether it has a session on this node: then
// the function must not block.
type BusyFunc func(ctx context.Context, id devices.ID, connected bool) *devices.Error

// OnCall sets what is asked before a call of a device, and when the device is not connected. Set it before the node is ready.
func (s *Dispatcher) OnCall(busy BusyFunc) { s.busy.Store(&busy) }

// busyError returns why a device takes no call now, or nil.
func (s *Dispatcher) busyError(ctx context.Context, id devices.ID, connected bool) error {
	if busy := s.busy.Load(); busy != nil {
		if no := (*busy)(ctx, id, connected); no != nil {
			return no
		}
	}
	return nil
}

// New returns a Dispatcher.
func New(cfg Config, ports Ports) *Dispatcher {
	return &Dispatcher{cfg: cfg, ports: ports, hub: ports.Hub, log: ports.Log, rules: newRules(), callIDs: devices.NewCallIDs(cfg.Node, time.Now()),
		running: running{calls: map[devices.ID]string{}}}
}

// CallKey is how a call ended (ok, tool_error or an error code) and the way in that it came.
type CallKey struct {
	Outcome string
	Via     access.Via
}

// Counters count requests. It is safe for concurrent use.
type Counters struct {
	SharedCalls atomic.Uint64 // calls of read-only tools answered with another call's result
	LateAnswers atomic.Uint64 // answers passed on after the caller had left
	Calls       counters.Map[CallKey]
	CallTime    counters.Histogram
}

// Limiter returns the limiter of the requests that this node serves. Requests that do not
// enter through a method of the Dispatcher acquire a slot themselves, and have another
// Origin than OriginCaller.
func (s *Dispatcher) Limiter() *Limiter { return &s.limiter }

// Stats returns the counters.
func (s *Dispatcher) Stats() *Counters { return &s.stats }
