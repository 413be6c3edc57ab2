package node

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// policyCheck is how often the policy file is checked.
const policyCheck = time.Second

// policyFile loads the rules of the tool guard from a file, and again when it changes. If the
// file is invalid, the previous rules stay in force.
type policyFile struct {
	path          string
	log           *slog.Logger
	service       *fleet.Service
	audit         *audit.Log
	lastStamp     policyStamp // at the last attempt, successful or not
	guard         *access.Guard
	reloadRequest chan struct{} // capacity 1: a reload was requested

	reloads, failures atomic.Uint64
}

type policyStamp struct {
	changed time.Time
	size    int64
}

// readPolicy loads the file of --policy-file.
func (n *node) readPolicy() error {
	if n.cfg.PolicyFile == "" {
		return nil
	}
	p := &policyFile{path: n.cfg.PolicyFile, log: n.log, reloadRequest: make(chan struct{}, 1)}
	p.lastStamp = p.stamp()
	var err error
	if p.guard, err = p.load(); err != nil {
		return fmt.Errorf("--policy-file: %w", err)
	}
	n.policy = p
	return nil
}

func (p *policyFile) load() (*access.Guard, error) {
	text, err := os.ReadFile(p.path)
	if err != nil {
		return nil, err
	}
	policy, err := access.ParsePolicy(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p.path, err)
	}
	// Versions count changes by the API. One of a file would be stored in the node's
	// snapshot, and take precedence over later ones once no file is used.
	policy.Version = 0
	return access.Compile(policy)
}

func (p *policyFile) stamp() (s policyStamp) {
	if info, err := os.Stat(p.path); err == nil {
		s.changed, s.size = info.ModTime(), info.Size()
	}
	return s
}

// attach puts the rules of the file into force.
func (p *policyFile) attach(s *fleet.Service, log *audit.Log) {
	p.service, p.audit = s, log
	p.use(p.guard, nil)
}

func (p *policyFile) use(g *access.Guard, err error) {
	e := audit.Entry{At: clock.Now(), Kind: audit.KindPolicy, Action: "file", Name: p.path, Outcome: "ok"}
	if err != nil {
		e.Outcome, e.Detail = string(devices.CodeBadRequest), err.Error()
	} else {
		p.service.UsePolicy(g)
		e.Detail = fmt.Sprintf("%d rules", len(g.Policy().Rules))
	}
	p.audit.Record(e)
}

// request makes watch read the file again, even if it has not changed.
func (p *policyFile) request() {
	select {
	case p.reloadRequest <- struct{}{}:
	default: // already requested
	}
}

// watch checks the file until ctx ends.
func (p *policyFile) watch(ctx context.Context) {
	ticker := time.NewTicker(policyCheck)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.reloadRequest:
			p.reload()
		case <-ticker.C:
			if p.stamp() != p.lastStamp {
				p.reload()
			}
		}
	}
}

func (p *policyFile) reload() {
	p.lastStamp = p.stamp() // first: a write during the reading is then detected as another change
	g, err := p.load()
	if err != nil {
		p.failures.Add(1)
		p.log.Error("the changed policy file is invalid; the previous rules stay in force", "error", err)
	} else {
		p.reloads.Add(1)
	}
	p.use(g, err)
}

func (p *policyFile) metrics(r *counters.Registry) {
	reloads := r.Counter("policy_reloads_total", "Changed policy files: `loaded`, `failed`; absent without `--policy-file`.", "result")
	counters.Value(reloads, p.reloads.Load, "loaded")
	counters.Value(reloads, p.failures.Load, "failed")
}
