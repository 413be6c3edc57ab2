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
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// policyCheck is how often the policy's file is looked at.
const policyCheck = time.Second

// policyFile holds the rules of the tool guard in a file of the operator's, and
// brings them into force again when it changes. One that is not usable leaves
// the old rules in place.
type policyFile struct {
	path    string
	log     *slog.Logger
	service *fleet.Service
	audit   *audit.Log
	seen    policyStamp // as last tried, whether it was usable or not
	guard   *access.Guard
	wanted  chan struct{} // capacity 1: read it again

	reloads, failures atomic.Uint64
}

type policyStamp struct {
	changed time.Time
	size    int64
}

// readPolicy loads the file of --policy-file, or fails in one sentence.
func (n *node) readPolicy() error {
	if n.cfg.PolicyFile == "" {
		return nil
	}
	p := &policyFile{path: n.cfg.PolicyFile, log: n.log, wanted: make(chan struct{}, 1)}
	p.seen = p.stamp()
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
	// Versions count what the API wrote. One of a file would go into the node's
	// notes and, once there is no file any more, stand above those.
	policy.Version = 0
	return access.Compile(policy)
}

func (p *policyFile) stamp() (s policyStamp) {
	if info, err := os.Stat(p.path); err == nil {
		s.changed, s.size = info.ModTime(), info.Size()
	}
	return s
}

// attach brings the file into force.
func (p *policyFile) attach(s *fleet.Service, log *audit.Log) {
	p.service, p.audit = s, log
	p.use(p.guard, nil)
}

func (p *policyFile) use(g *access.Guard, err error) {
	e := audit.Entry{At: time.Now(), Kind: audit.KindPolicy, Action: "file", Name: p.path, Outcome: "ok"}
	if err != nil {
		e.Outcome, e.Detail = string(devices.CodeBadRequest), err.Error()
	} else {
		p.service.UsePolicy(g)
		e.Detail = fmt.Sprintf("%d rules", len(g.Policy().Rules))
	}
	p.audit.Record(e)
}

// request makes watch read the file again, changed or not.
func (p *policyFile) request() {
	select {
	case p.wanted <- struct{}{}:
	default: // it will
	}
}

// watch looks at the file until ctx ends.
func (p *policyFile) watch(ctx context.Context) {
	ticker := time.NewTicker(policyCheck)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wanted:
			p.reload()
		case <-ticker.C:
			if p.stamp() != p.seen {
				p.reload()
			}
		}
	}
}

func (p *policyFile) reload() {
	p.seen = p.stamp() // first: what is written meanwhile shows as another change
	g, err := p.load()
	if err != nil {
		p.failures.Add(1)
		p.log.Error("the changed policy is not usable; the rules before stay in force", "error", err)
	} else {
		p.reloads.Add(1)
	}
	p.use(g, err)
}
