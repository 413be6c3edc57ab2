package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"fleetd/bench/load"
)

// Figures of calls at a fixed rate.
const (
	figureDue      = "p99 from when the call was due, µs"
	figureDueHalf  = "p50 from when the call was due, µs"
	figureSent     = "p99 from when it was sent, µs"
	figurePaceCPU  = "server CPU, % of one core"
	figureAchieved = "calls/s made"
)

var paceLines = []line{
	{name: figureDue, goal: &goal{ratioAtMost, 1.5}}, {name: figureSent, goal: &goal{ratioAtMost, 1.5}}, {name: figureDueHalf},
	{name: figurePaceCPU, precision: 1}, {name: figureAchieved},
}

// measurePace measures how long calls take that come evenly, whatever became of those before, in turn with the baseline.
// The baseline's own load keeps callers in step, so that all call within a millisecond of each other; here both servers
// get this program's devices and callers.
func (b *bench) measurePace(ctx context.Context) error {
	o := b.opt
	m := measurement{Name: "pace", Title: fmt.Sprintf("Tool calls over REST, %d per second, evenly: up to %d at a time, %d devices, all embedded", o.pace, o.callers, o.devices)}
	fleetd, baseline := samples{}, samples{}
	for run := range o.runs {
		m.Baseline = commandLine("server", []string{"toolcall"})
		if err := b.quietly("toolcall", baseline, func(into samples) error { return b.paceBaseline(ctx, into) }); err != nil {
			return fmt.Errorf("pace of the baseline, run %d: %w", run+1, err)
		}
		if err := b.quietly("pace", fleetd, func(into samples) error { return b.paceRun(ctx, run, into) }); err != nil {
			return fmt.Errorf("pace, run %d: %w", run+1, err)
		}
		b.progress("pace", run, fleetd, baseline, figureDue)
	}
	m.tabulate(fleetd, baseline, paceLines)
	b.add(m)
	return nil
}

func (b *bench) paceRun(ctx context.Context, run int, into samples) (err error) {
	d, f, end, err := b.stage(ctx, variant{}, overWebSocket, b.opt.devices, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	if err := f.bring(ctx, d, 0, b.opt.devices); err != nil {
		return err
	}
	if _, err := b.paced(ctx, d.target(), b.opt.devices, b.opt.pace); err != nil { // warms up
		return err
	}
	saved := d.profile(ctx, b.profileFile("pace", run), max(1, int(b.opt.duration.Seconds())))
	return errors.Join(b.openLoop(ctx, d.target(), d.pid(), into), saved())
}

// paceBaseline does the same with the baseline's server.
func (b *bench) paceBaseline(ctx context.Context, into samples) (err error) {
	s, err := b.baselines.serve("toolcall")
	if err != nil {
		return err
	}
	defer s.Stop()
	f := &fleet{address: s.Address, transport: overWebSocket}
	defer func() { err = errors.Join(err, f.close()) }()
	for i := range b.opt.devices {
		c, line, err := load.Attach(ctx, f.address, i, nil)
		if err != nil {
			return err
		}
		if err := f.keep(c, line, true); err != nil {
			return err
		}
	}
	t := load.AttachedTarget(s.Address)
	if _, err := b.paced(ctx, t, b.opt.devices, b.opt.pace); err != nil { // warms up
		return err
	}
	return b.openLoop(ctx, t, s.PID(), into)
}

// openLoop measures calls at the rate of -pace.
func (b *bench) openLoop(ctx context.Context, t load.Target, pid string, into samples) error {
	meter, err := startMeter("", pid)
	if err != nil {
		return err
	}
	l, err := b.paced(ctx, t, b.opt.devices, b.opt.pace)
	if err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err != nil {
		return err
	}
	into.add(figureDue, load.Quantile(l.due, 0.99).Seconds()*1e6)
	into.add(figureDueHalf, load.Quantile(l.due, 0.5).Seconds()*1e6)
	into.add(figureSent, load.Quantile(l.sent, 0.99).Seconds()*1e6)
	into.add(figurePaceCPU, s.daemon.Seconds()/s.wall.Seconds()*100)
	into.add(figureAchieved, float64(len(l.due))/s.wall.Seconds())
	into.add(figureOthers, s.others*100)
	return nil
}

// latencies are how long calls took, since they were due and since they were sent, both in order.
type latencies struct{ due, sent []time.Duration }

// paced lets callers make calls at a rate for the measured time, each as soon as it is due and somebody is free to make it.
func (b *bench) paced(ctx context.Context, t load.Target, devices, rate int) (latencies, error) {
	limit := time.Now().Add(b.opt.duration + load.ExchangeLimit)
	return evenly(ctx, b.opt.callers, max(1, int(b.opt.duration.Seconds()*float64(rate))), rate, func() (func(i int) error, func(), error) {
		caller, err := load.NewCaller(t, limit)
		if err != nil {
			return nil, nil, err
		}
		return func(i int) error { return caller.Call(i % devices) }, caller.Close, nil
	})
}

// evenly does n numbered things at a rate, each as soon as it is due and a worker is free to do it. prepare is make of load.InParallel.
func evenly(ctx context.Context, workers, n, rate int, prepare func() (do func(i int) error, end func(), err error)) (latencies, error) {
	begun := time.Now()
	all := latencies{make([]time.Duration, n), make([]time.Duration, n)}
	due := make(chan int, n) // a call that finds nobody free waits, and its time runs
	var stopped atomic.Bool
	go func() {
		defer close(due)
		for i := 0; i < n && ctx.Err() == nil && !stopped.Load(); i++ {
			if wait := time.Until(dueAt(begun, i, rate)); wait > 0 {
				time.Sleep(wait)
			}
			due <- i
		}
	}()
	err := load.InParallel(workers, workers, func() (func(k int) error, func(), error) {
		do, end, err := prepare()
		if err != nil {
			return nil, nil, err
		}
		return func(int) error {
			for i := range due {
				sent := time.Now()
				if err := do(i); err != nil {
					return err
				}
				now := time.Now()
				all.due[i], all.sent[i] = now.Sub(dueAt(begun, i, rate)), now.Sub(sent)
			}
			return ctx.Err()
		}, end, nil
	})
	stopped.Store(true) // who was to make the rest may have failed
	slices.Sort(all.due)
	slices.Sort(all.sent)
	return all, err
}

func dueAt(begun time.Time, i, rate int) time.Time {
	return begun.Add(time.Duration(float64(i) / float64(rate) * float64(time.Second)))
}
