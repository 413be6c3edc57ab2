package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"fleetd/bench/load"
)

// Figures of many idle devices on one node.
const (
	figureIdleCPU   = "CPU of one core while all are silent, %"
	figureBeside    = "p99 of calls beside them, µs"
	figureMedBeside = "p50 of calls beside them, µs"
)

var idleCPULines = []line{
	{name: figureIdleCPU, precision: 2, goal: &goal{atMost, 3}}, {name: figureBeside, goal: &goal{ratioAtMost, 1.3}}, {name: figureMedBeside},
}

// measureIdleCPU measures what a node with many idle devices does for them, and whether calls notice them: calls to the
// first devices, before the idle ones come and beside them.
func (b *bench) measureIdleCPU(ctx context.Context) error {
	o := b.opt
	first := min(o.devices, o.idleHigh)
	for _, transport := range []string{overWebSocket, overMQTT} {
		m := measurement{Name: "idle-cpu-" + transport, Title: fmt.Sprintf("%d idle devices over %s for %v, all embedded; calls to %d of them, %d per second, evenly",
			o.idleHigh, transport, o.idleTime, first, o.idleRate), Baseline: fmt.Sprintf("the same calls while only those %d devices are connected", first)}
		many, few := samples{}, samples{}
		for run := range o.runs {
			both := samples{}
			if err := b.quietly(m.Name, both, func(into samples) error { return b.idleCPURun(ctx, run, transport, into) }); err != nil {
				return fmt.Errorf("%s, run %d: %w", m.Name, run+1, err)
			}
			many.merge(few, both)
			b.progress(m.Name, run, many, few, figureBeside)
		}
		m.tabulate(many, few, idleCPULines)
		b.add(m)
	}
	return nil
}

func (b *bench) idleCPURun(ctx context.Context, run int, transport string, into samples) (err error) {
	n := b.opt.idleHigh
	first := min(b.opt.devices, n)
	d, f, end, err := b.stage(ctx, variant{}, transport, n, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	if _, err := f.connect(ctx, 0, first, true); err != nil {
		return err
	}
	if err := b.callsBeside(ctx, d, first, first, baselineMark, into); err != nil {
		return err
	}
	if _, err := f.connect(ctx, first, n, true); err != nil {
		return err
	}
	defer f.breathe()()
	if err := errors.Join(d.awaitReady(ctx, n, b.opt.limitReady), d.awaitQuiet(ctx, startLimit), d.collect(ctx), rest(ctx, b.opt.settle)); err != nil {
		return err
	}
	saved := d.profile(ctx, b.profileFile("idle-cpu-"+transport, run), max(1, int(b.opt.idleTime.Seconds())))
	meter, err := startMeter("", d.pid())
	if err != nil {
		return err
	}
	if err := rest(ctx, b.opt.idleTime); err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err := errors.Join(err, saved()); err != nil {
		return err
	}
	into.add(figureIdleCPU, s.daemon.Seconds()/s.wall.Seconds()*100)
	into.add(figureOthers, s.others*100)
	return b.callsBeside(ctx, d, n, first, "", into)
}

// callsBeside makes calls to the first devices at a fixed rate while n are connected.
func (b *bench) callsBeside(ctx context.Context, d *daemon, n, called int, mark string, into samples) error {
	if err := errors.Join(d.awaitReady(ctx, n, b.opt.limitReady), d.awaitQuiet(ctx, startLimit)); err != nil {
		return err
	}
	if _, err := b.paced(ctx, d.target(), called, b.opt.idleRate); err != nil { // warms up
		return err
	}
	l, err := b.paced(ctx, d.target(), called, b.opt.idleRate)
	if err != nil {
		return err
	}
	into.add(mark+figureBeside, load.Quantile(l.sent, 0.99).Seconds()*1e6)
	into.add(mark+figureMedBeside, load.Quantile(l.sent, 0.5).Seconds()*1e6)
	return nil
}

var pingRequest = []byte{0xc0, 0} // PINGREQ (MQTT 3.1.1, section 3.12)

// breathe lets every MQTT device show a sign of life in half its keepalive, as esp-mqtt does when it has nothing else to
// say, until stop is called. WebSocket devices only answer the node's pings.
func (f *fleet) breathe() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	if f.transport == overMQTT {
		f.mu.Lock()
		conns, pause := f.conns, time.Duration(f.logins[0].Keepalive)*time.Second/2/time.Duration(len(f.conns))
		f.mu.Unlock()
		f.live.Go(func() {
			begun := time.Now()
			for i := 0; rest(ctx, time.Until(begun.Add(time.Duration(i)*pause))) == nil; i++ {
				_, _ = conns[i%len(conns)].Write(pingRequest) // one that ended is counted where it is read
			}
		})
	}
	return cancel
}
