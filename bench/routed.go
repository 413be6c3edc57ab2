package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"fleetd/bench/load"
)

var routedLines = append([]line{{name: figureCalls, goal: &goal{ratioAtLeast, 0.6}}}, callLines[1:]...)

// measureRouted measures calls that another node than the device's takes, beside calls that its own node takes: the same
// two nodes and the same devices, either of the two first in every other run.
func (b *bench) measureRouted(ctx context.Context) error {
	if b.postgres == nil {
		b.leaveOut("routed: nodes of one fleet need Postgres and an external NATS")
		return nil
	}
	o := b.opt
	m := measurement{Name: "routed", Title: fmt.Sprintf("Tool calls over REST to devices on another node: %d callers, %d devices, external NATS and Postgres", o.callers, o.devices),
		Baseline: "the same calls to the node that holds the devices"}
	routed, local := samples{}, samples{}
	for run := range o.runs {
		both := samples{}
		if err := b.quietly(m.Name, both, func(into samples) error { return b.routedRun(ctx, run, into) }); err != nil {
			return fmt.Errorf("routed, run %d: %w", run+1, err)
		}
		routed.merge(local, both)
		b.progress(m.Name, run, routed, local, figureCalls)
	}
	m.tabulate(routed, local, routedLines)
	b.add(m)
	return nil
}

func (b *bench) routedRun(ctx context.Context, run int, into samples) (err error) {
	lists, err := load.ToolLists(true)
	if err != nil {
		return err
	}
	nodes, stop, err := b.startNodes(ctx, variant{postgres: true, nats: true}, []string{"--node", "holder"}, []string{"--node", "other"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	f, err := newFleet(ctx, nodes[0], overWebSocket, b.opt.devices, lists)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	if _, err := f.connect(ctx, 0, b.opt.devices, true); err != nil {
		return err
	}
	if err := awaitHeld(ctx, nodes, b.opt.devices, startLimit); err != nil {
		return err
	}
	ways := []struct {
		name, mark string
		through    *daemon
	}{{"routed-local", baselineMark, nodes[0]}, {"routed", "", nodes[1]}}
	if run%2 == 1 {
		slices.Reverse(ways)
	}
	for _, w := range ways {
		if _, err := load.CallLoad(ctx, w.through.target(), b.opt.callers, b.opt.devices, b.opt.duration); err != nil { // warms up
			return err
		}
	}
	others := 0.0
	for _, w := range ways {
		s := samples{}
		if err := b.closedLoop(ctx, b.profileFile(w.name, run), b.nats.pid, w.through.target(), s, nodes...); err != nil {
			return err
		}
		others = max(others, s[figureOthers][0])
		delete(s, figureOthers)
		for figure, values := range s {
			into.add(w.mark+figure, values[0])
		}
	}
	into.add(figureOthers, others)
	return nil
}
