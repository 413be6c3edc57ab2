package node

import (
	"fmt"
	"log/slog"
	"os"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// policyFile are the rules of the tool guard from a file.
type policyFile struct {
	reloadable
	path    string
	log     *slog.Logger
	service *fleet.Service
	audit   *audit.Log
	guard   *access.Guard
}

// readPolicy loads the file of --policy-file.
func (n *node) readPolicy() error {
	if n.cfg.PolicyFile == "" {
		return nil
	}
	p := &policyFile{path: n.cfg.PolicyFile, log: n.log}
	p.begin(p.load, 0, p.path)
	var err error
	if p.guard, err = p.read(); err != nil {
		return fmt.Errorf("--policy-file: %w", err)
	}
	n.policy, n.reloadables = p, append(n.reloadables, &p.reloadable)
	return nil
}

func (p *policyFile) read() (*access.Guard, error) {
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

func (p *policyFile) load() error {
	g, err := p.read()
	if err != nil {
		p.log.Error("the changed policy file is invalid; the previous rules stay in force", "error", err)
	}
	p.use(g, err)
	return err
}

func (p *policyFile) metrics(r *counters.Registry) {
	reloads := r.Counter("policy_reloads_total", "Changed policy files: `loaded`, `failed`; absent without `--policy-file`.", "result")
	counters.Value(reloads, p.reloads.Load, "loaded")
	counters.Value(reloads, p.failures.Load, "failed")
}
