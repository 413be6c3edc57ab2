package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"time"

	"fleetd/bench/load"
)

// Figures of idle devices.
const (
	figureResident   = "RSS per device after GC, KB"
	figureAsIs       = "the same with the heap's reserve, KB"
	figureHeap       = "heap per device, KB"
	figureStack      = "stack per device, KB"
	figureGoroutines = "goroutines per device"
)

var idleWanted = []wanted{{figure: figureResident, before: "after GC ", after: " B", scale: 1e-3}}

func idleLines(kilobytes float64) []line {
	return []line{
		{name: figureResident, precision: 2, goal: &goal{atMost, kilobytes}}, {name: figureAsIs, precision: 2},
		{name: figureHeap, precision: 2}, {name: figureStack, precision: 2},
		{name: figureGoroutines, precision: 4, goal: &goal{atMost, 1}},
	}
}

// idle is a measurement of idle devices of one transport, and the baseline beside it.
type idle struct {
	name, title, transport string
	embedded, external     float64 // goals in KB; 0 embedded: only with external services
	settings               []string
	baseline               string
	arguments              []string
}

// measureIdle measures what an idle WebSocket device costs.
func (b *bench) measureIdle(ctx context.Context) error {
	return b.idleDevices(ctx, idle{name: "idle", title: "Idle devices", transport: overWebSocket, embedded: 12.5, external: 9, baseline: "wsidle",
		arguments: []string{"-n", strconv.Itoa(b.opt.idleHigh - b.opt.idleLow), "-mode", "tuned"}})
}

// measureMQTTIdle measures what an idle MQTT device costs.
func (b *bench) measureMQTTIdle(ctx context.Context) error {
	return b.idleDevices(ctx, idle{name: "mqtt-idle", title: "Idle MQTT devices", transport: overMQTT, embedded: 10.5, external: 6, baseline: "mqttbench",
		arguments: []string{"-idle", strconv.Itoa(b.opt.idleHigh - b.opt.idleLow), "-broker", "mini"}})
}

// measureTLSIdle measures what an idle WebSocket device costs whose connection is encrypted by fleetd itself.
func (b *bench) measureTLSIdle(ctx context.Context) error {
	if b.postgres == nil {
		b.leaveOut("tls-idle: it is measured with external services only")
		return nil
	}
	certificate, key, err := selfSigned(b.dir)
	if err != nil {
		return err
	}
	return b.idleDevices(ctx, idle{name: "tls-idle", title: "Idle devices with TLS", transport: overWebSocket, external: 17.5, baseline: "wsidle",
		settings:  []string{"--device-tls-cert", certificate, "--device-tls-key", key, "--mqtt-tls-listen", "127.0.0.1:0"},
		arguments: []string{"-n", strconv.Itoa(b.opt.idleHigh - b.opt.idleLow), "-mode", "tuned", "-tls"}})
}

// idleDevices measures the slope between two numbers of ready devices.
func (b *bench) idleDevices(ctx context.Context, kind idle) error {
	var variants []variant
	if kind.embedded > 0 {
		variants = append(variants, variant{name: kind.name + "-embedded", title: "SQLite and NATS embedded", goal: kind.embedded, settings: kind.settings})
	}
	if b.postgres != nil {
		variants = append(variants, variant{name: kind.name + "-external", title: "external NATS and Postgres", goal: kind.external, postgres: true, nats: true, settings: kind.settings})
	}
	fleetd, baseline := make([]samples, len(variants)), samples{}
	for i := range fleetd {
		fleetd[i] = samples{}
	}
	for run := range b.opt.runs {
		if err := b.baselines.measure(ctx, baseline, idleWanted, kind.baseline, kind.arguments...); err != nil {
			return err
		}
		for i, v := range variants {
			if err := b.idleRun(ctx, run, v, kind.transport, fleetd[i]); err != nil {
				return fmt.Errorf("%s, run %d: %w", v.name, run+1, err)
			}
			b.progress(v.name, run, fleetd[i], baseline, figureResident)
		}
	}
	for i, v := range variants {
		m := measurement{Name: v.name, Title: fmt.Sprintf("%s, %d to %d, %s", kind.title, b.opt.idleLow, b.opt.idleHigh, v.title)}
		m.Baseline = commandLine(kind.baseline, kind.arguments)
		m.tabulate(fleetd[i], baseline, idleLines(v.goal))
		b.add(m)
	}
	return nil
}

// state is what a number of idle devices costs the daemon.
type state struct {
	resident float64 // as the kernel reports
	kept     float64 // of it, freed memory that the runtime has not given back
	heap     float64
	stack    float64
	routines float64
}

func (b *bench) idleRun(ctx context.Context, run int, v variant, transport string, into samples) (err error) {
	d, f, end, err := b.stage(ctx, v, transport, b.opt.idleHigh, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	if _, err := f.connect(ctx, 0, b.opt.idleLow, true); err != nil {
		return err
	}
	low, _, err := b.settled(ctx, d, b.opt.idleLow)
	if err != nil {
		return err
	}
	if _, err := f.connect(ctx, b.opt.idleLow, b.opt.idleHigh, true); err != nil {
		return err
	}
	high, s, err := b.settled(ctx, d, b.opt.idleHigh)
	if err != nil {
		return err
	}
	if file := b.profileFile(v.name+"-heap", run); file != "" {
		if err := d.save(ctx, "/debug/pprof/heap?gc=1", file); err != nil {
			return err
		}
	}
	n := float64(b.opt.idleHigh - b.opt.idleLow)
	into.add(figureResident, (high.resident-high.kept-low.resident+low.kept)/n/1000)
	into.add(figureAsIs, (high.resident-low.resident)/n/1000)
	into.add(figureHeap, (high.heap-low.heap)/n/1000)
	into.add(figureStack, (high.stack-low.stack)/n/1000)
	into.add(figureGoroutines, (high.routines-low.routines)/n)
	into.add(figureOthers, s.others*100)
	return nil
}

// settled waits until n devices are ready and everything about them is written, collects garbage, gives the runtime
// time to return pages, and reads what is left. The runtime never returns all: it keeps a reserve for the next heap
// cycle, a tenth of the heap or more. The baseline returns it by hand before it reads; here it is recognized. A
// goroutine that only serves this moment may be alive, so the lowest count of some is taken. All this must end before
// the daemon's first pings, 30 s after the first connection.
func (b *bench) settled(ctx context.Context, d *daemon, n int) (state, spent, error) {
	meter, err := startMeter(b.nats.pid, d.pid())
	if err != nil {
		return state{}, spent{}, err
	}
	if err := errors.Join(d.awaitReady(ctx, n, b.opt.limitReady), d.awaitQuiet(ctx, startLimit)); err != nil {
		return state{}, spent{}, err
	}
	if err := errors.Join(rest(ctx, b.opt.settle), d.collect(ctx), rest(ctx, b.opt.settle)); err != nil {
		return state{}, spent{}, err
	}
	x := state{routines: math.Inf(1)}
	for i := range 20 {
		resident, err := load.ResidentSize(d.cmd.Process.Pid)
		if err != nil {
			return state{}, spent{}, err
		}
		m, err := d.metrics(ctx)
		if err != nil {
			return state{}, spent{}, err
		}
		if i == 0 {
			x.resident, x.kept, x.heap, x.stack = float64(resident), m[seriesIdle]-m[seriesReleased], m[seriesHeap], m[seriesStack]
		}
		x.routines = min(x.routines, m[seriesGoroutines])
		time.Sleep(10 * time.Millisecond)
	}
	s, err := meter.stop(runtime.NumCPU())
	return x, s, err
}

func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}
