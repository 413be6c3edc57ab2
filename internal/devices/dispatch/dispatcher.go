package dispatch

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/session"
	"fleetd/internal/tasks"
)

// Config is what requests need to know of the node.
type Config struct {
	Node   string
	Routed bool // there can be other nodes
}

// Ports are the ways out, and the parts below; Audit may be nil.
type Ports struct {
	Records  Finder
	Registry *registry.Registry
	Hub      *session.Hub
	Waits    func(devices.ID) bool // for approval
	Router   Router
	Vision   session.Vision
	Audit    Auditor
	Tasks    *tasks.Group
	Log      *slog.Logger
}

// Finder reads one device, or fails with ErrNotFound.
type Finder interface {
	Find(ctx context.Context, id devices.ID) (devices.Row, error)
}

// Dispatcher takes requests to devices. Its methods are safe for concurrent use.
type Dispatcher struct {
	cfg     Config
	ports   Ports
	hub     *session.Hub
	log     *slog.Logger
	rules   *rules
	callIDs *devices.CallIDs
	places  Places
	stats   Counters
}

// New returns a Dispatcher.
func New(cfg Config, ports Ports) *Dispatcher {
	return &Dispatcher{cfg: cfg, ports: ports, hub: ports.Hub, log: ports.Log, rules: newRules(), callIDs: devices.NewCallIDs(cfg.Node, time.Now())}
}

// Counters count requests. It is safe for concurrent use.
type Counters struct {
	SharedCalls atomic.Uint64        // calls of readers answered with another's answer
	LateAnswers atomic.Uint64        // handed to who waited for them after the caller had left
	Calls       counters.Map[string] // by outcome: ok, tool_error or an error code
	CallTime    counters.Histogram
}

// Places are those of the requests that this node serves. What comes in by another
// way than a method of the Dispatcher takes one there; an adapter that has taken
// one says so by its Origin.
func (s *Dispatcher) Places() *Places { return &s.places }

// Stats returns the counters.
func (s *Dispatcher) Stats() *Counters { return &s.stats }
