package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"time"

	"fleetd/bench/load"
)

// Figures of a connect storm.
const (
	figureDevices   = "devices/s"
	figureDeviceP99 = "p99 from dial to last page, ms"
	figureDeviceCPU = "server CPU per device, µs"
	figureLoadCPU   = "load CPU per device, µs"
	figureGarbage   = "allocated per device, KB"
	figureSettle    = "rows and events written after the last, ms"
	figureStored    = "devices/s until rows and events are written"
	figureFirst     = "devices/s, devices that come for the first time"
)

var stormWanted = []wanted{
	{figure: figureDevices, before: ": ", after: " devices/s"},
	{figure: figureDeviceP99, before: "p99 ", after: " ms"},
	{figure: figureDeviceCPU, before: "server cpu ", after: " us/device"},
	{figure: figureLoadCPU, before: "client cpu ", after: " us"},
}

func stormLines(ratio float64) []line {
	return []line{
		{name: figureDevices, goal: &goal{ratioAtLeast, ratio}}, {name: figureDeviceP99, precision: 1}, {name: figureDeviceCPU},
		{name: figureLoadCPU}, {name: figureGarbage}, {name: figureSettle}, {name: figureStored}, {name: figureFirst},
	}
}

// measureStorm measures how fast a fleet whose tool lists are known gets from dial to ready: one that returns, as
// after a restart, and beside it one that comes for the first time.
func (b *bench) measureStorm(ctx context.Context) error {
	variants := []variant{{name: "storm-embedded", title: "SQLite and NATS embedded", goal: 0.75}}
	if b.postgres != nil {
		variants = append(variants, variant{name: "storm-external", title: "external NATS and Postgres", goal: 0.85, postgres: true, nats: true})
	}
	arguments := []string{"-n", strconv.Itoa(b.opt.storm), "-parse", "hash", "-store", "mem"}
	fleetd, baseline := make([]samples, len(variants)), samples{}
	for i := range fleetd {
		fleetd[i] = samples{}
	}
	for run := range b.opt.runs {
		if err := b.quietly("storm", baseline, func(into samples) error {
			return b.baselines.measure(ctx, into, stormWanted, "storm", arguments...)
		}); err != nil {
			return err
		}
		for i, v := range variants {
			if err := b.quietly(v.name, fleetd[i], func(into samples) error { return b.stormRun(ctx, run, v, into) }); err != nil {
				return fmt.Errorf("%s, run %d: %w", v.name, run+1, err)
			}
			b.progress(v.name, run, fleetd[i], baseline, figureDevices)
		}
	}
	for i, v := range variants {
		m := measurement{Name: v.name, Title: fmt.Sprintf("Connect storm: %d devices, %d at a time, %d known tool lists, %s", b.opt.storm, dialers, load.Firmwares, v.title)}
		m.Baseline = commandLine("storm", arguments)
		m.tabulate(fleetd[i], baseline, stormLines(v.goal))
		b.add(m)
	}
	return nil
}

func (b *bench) stormRun(ctx context.Context, run int, v variant, into samples) (err error) {
	// The first devices, one of each firmware, make the lists known.
	n := b.opt.storm
	d, f, end, err := b.stage(ctx, v, overWebSocket, load.Firmwares+n, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	if _, err := f.connect(ctx, 0, load.Firmwares, false); err != nil {
		return err
	}
	if err := errors.Join(d.awaitReady(ctx, load.Firmwares, startLimit), d.awaitQuiet(ctx, startLimit), d.collect(ctx)); err != nil {
		return err
	}
	// Devices that come for the first time, with lists that are known.
	begun := time.Now()
	if _, err := f.connect(ctx, load.Firmwares, load.Firmwares+n, false); err != nil {
		return err
	}
	if err := d.awaitReady(ctx, load.Firmwares+n, b.opt.limitReady); err != nil {
		return err
	}
	into.add(figureFirst, float64(n)/time.Since(begun).Seconds())
	// The storm itself: the same devices return.
	f.drop()
	if err := errors.Join(d.awaitGone(ctx, b.opt.limitReady), d.awaitQuiet(ctx, b.opt.limitReady), d.collect(ctx)); err != nil {
		return err
	}
	if _, err := f.connect(ctx, 0, load.Firmwares, false); err != nil {
		return err
	}
	if err := errors.Join(d.awaitReady(ctx, load.Firmwares, startLimit), d.awaitQuiet(ctx, startLimit)); err != nil {
		return err
	}
	before, err := d.metrics(ctx)
	if err != nil {
		return err
	}
	saved := d.profile(ctx, b.profileFile(v.name, run), 1+n/2500)
	server := ""
	if v.nats {
		server = b.nats.pid
	}
	meter, err := startMeter(server, d.pid())
	if err != nil {
		return err
	}
	took, err := f.connect(ctx, load.Firmwares, load.Firmwares+n, false)
	if err != nil {
		return err
	}
	if err := d.awaitReady(ctx, load.Firmwares+n, b.opt.limitReady); err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err != nil {
		return err
	}
	ready := time.Now()
	after, err := d.metrics(ctx)
	if err != nil {
		return err
	}
	if err := d.awaitQuiet(ctx, b.opt.limitReady); err != nil {
		return err
	}
	written := time.Since(ready)
	slices.Sort(took)
	into.add(figureDevices, float64(n)/s.wall.Seconds())
	into.add(figureDeviceP99, load.Quantile(took, 0.99).Seconds()*1e3)
	into.add(figureDeviceCPU, s.daemon.Seconds()*1e6/float64(n))
	into.add(figureLoadCPU, s.own.Seconds()*1e6/float64(n))
	into.add(figureGarbage, (after[seriesAllocated]-before[seriesAllocated])/float64(n)/1000)
	into.add(figureSettle, written.Seconds()*1e3)
	into.add(figureStored, float64(n)/(s.wall+written).Seconds())
	into.add(figureOthers, s.others*100)
	if file := b.profileFile(v.name+"-allocs", run); file != "" {
		if err := d.save(ctx, "/debug/pprof/allocs", file); err != nil {
			return err
		}
	}
	return saved()
}
