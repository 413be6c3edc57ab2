package main

import (
	"context"
	"errors"
	"runtime"
	"time"

	"fleetd/bench/load"
)

// Figures of devices that boot and connect to a node with many known devices.
const (
	figureStormCPU    = "CPU of the node, s"
	figureStormMemory = "resident memory at the end, MB"
	figureStormKept   = "the same after garbage collection, MB"
	figureStormAbove  = "resident memory above the other node's, MB"
	figureStormAbove2 = "the same after garbage collection, above the other node's, MB"
	figureStormTime   = "from the first OTA check until all are ready and written, s"
)

var scaleStormLines = []line{
	{name: figureStormCPU, precision: 2, goal: &goal{ratioAtMost, 1.1}}, {name: figureStormMemory, precision: 1}, {name: figureStormAbove, precision: 1, goal: &goal{atMost, 60}},
	{name: figureStormKept, precision: 1}, {name: figureStormAbove2, precision: 1}, {name: figureStormTime, precision: 2},
}

// storms has the same devices connect to both nodes in turn. The first pair is not counted, so that all devices and tool
// lists have been seen before. The start times of the node with many devices are added to starts.
func (b *bench) storms(ctx context.Context, many, few *known, starts, fleetd, baseline samples) error {
	for run := range b.opt.runs + 1 {
		order := []*known{few, many}
		if run%2 == 1 {
			order = []*known{many, few}
		}
		results := map[*known]samples{}
		for _, k := range order {
			results[k] = samples{}
			if err := k.run(ctx, func(d *daemon) error { return k.storm(ctx, d, run > 0, results[k]) }); err != nil {
				return err
			}
		}
		many.add(starts)
		if run == 0 {
			continue
		}
		for figure, values := range results[many] {
			fleetd.add(figure, values[0])
		}
		for figure, values := range results[few] {
			baseline.add(figure, values[0])
		}
		fleetd.add(figureStormAbove, results[many][figureStormMemory][0]-results[few][figureStormMemory][0])
		fleetd.add(figureStormAbove2, results[many][figureStormKept][0]-results[few][figureStormKept][0])
		b.progress(many.name+"-storm", run-1, fleetd, baseline, figureStormCPU)
	}
	return nil
}

// storm has known devices boot and connect, and measures that if it counts.
func (k *known) storm(ctx context.Context, d *daemon, counts bool, into samples) (err error) {
	lists, err := load.ToolLists(false)
	if err != nil {
		return err
	}
	if counts {
		if err := rest(ctx, k.b.opt.scaleSettle/2); err != nil { // work left over from the start is not the storm's
			return err
		}
	}
	n := k.b.opt.scaleStorm
	meter, err := startMeter("", d.pid())
	if err != nil {
		return err
	}
	f, err := newFleet(ctx, d, overMQTT, n, lists)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	if _, err := f.connect(ctx, 0, n, false); err != nil {
		return err
	}
	if err := awaitHeld(ctx, []*daemon{d}, n, k.b.opt.limitReady); err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err != nil {
		return err
	}
	if counts {
		resident, err := k.memory(ctx, d)
		if err != nil {
			return err
		}
		kept, err := k.memoryKept(ctx, d)
		if err != nil {
			return err
		}
		into.add(figureStormMemory, resident)
		into.add(figureStormKept, kept)
	}
	into.add(figureStormCPU, s.daemon.Seconds())
	into.add(figureStormTime, s.wall.Seconds())
	into.add(figureOthers, s.others*100)
	f.drop()
	return errors.Join(d.awaitGone(ctx, time.Minute), d.awaitQuiet(ctx, time.Minute))
}
