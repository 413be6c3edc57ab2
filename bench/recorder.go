package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"syscall"
	"time"

	"fleetd/bench/load"
	"fleetd/internal/devices"
	"fleetd/internal/recorder"
)

const (
	recorderMemory   = 64 << 20 // the default of --recorder-memory
	recorderConnects = 3        // of each device
	flapTimes        = 100 * 60 * 10
	flapOthers       = 1000
)

// Figures of the recorder.
const (
	figureRecord       = "CPU per record, ns"
	figureFirstRecord  = "CPU per record while memory is taken, ns"
	figureRecordAllocs = "allocations per record"
	figureRecorderHeap = "memory after three connects of each, MiB"
	figureRecorderFull = "memory when full, MiB"
	figureForgotten    = "devices whose last connect is not kept"
	figureEvicted      = "devices driven out by one that flaps 100 times a second for 10 min"
)

var recorderLines = []line{
	{name: figureRecord, precision: 1, goal: &goal{atMost, 150}}, {name: figureFirstRecord, precision: 1}, {name: figureRecordAllocs, precision: 4, goal: &goal{atMostEver, 0}},
	{name: figureRecorderHeap, precision: 1, goal: &goal{atMostEver, 64 * 1.05}}, {name: figureRecorderFull, precision: 1, goal: &goal{atMostEver, 64 * 1.05}},
	{name: figureForgotten, goal: &goal{atMostEver, 0}}, {name: figureEvicted, goal: &goal{atMostEver, 0}},
}

var recorderCallLines = []line{
	{name: figureServerCPU, precision: 1, goal: &goal{ratioAtMost, 1.03}}, {name: figureCalls}, {name: figureMallocs, precision: 1},
}

// measureRecorder feeds a recorder directly, and compares what REST calls cost a node with one and a node without.
func (b *bench) measureRecorder(ctx context.Context) error {
	n := b.opt.recorderDevices
	m := measurement{Name: "recorder", Title: fmt.Sprintf("A recorder of 64 MiB, fed directly: %d devices with %d connects and ends each", n, recorderConnects)}
	direct := samples{}
	for run := range b.opt.runs {
		if err := b.quietly(m.Name, direct, func(into samples) error { return feedRecorder(into, n) }); err != nil {
			return err
		}
		b.progress(m.Name, run, direct, nil, figureRecord)
	}
	m.tabulate(direct, nil, recorderLines)
	b.add(m)

	o := b.opt
	m = measurement{Name: "recorder-call", Title: fmt.Sprintf("Tool calls over REST beside a recorder: %d callers, %d devices, %d pairs", o.callers, o.devices, o.recorderPairs),
		Baseline: "fleetd serve --recorder-memory 0"}
	with, without := samples{}, samples{}
	for run := range o.recorderPairs {
		both := samples{}
		if err := b.quietly(m.Name, both, func(into samples) error { return b.recorderPair(ctx, run, into) }); err != nil {
			return fmt.Errorf("%s, pair %d: %w", m.Name, run+1, err)
		}
		with.merge(without, both)
		b.progress(m.Name, run, with, without, figureServerCPU)
	}
	m.tabulate(with, without, recorderCallLines)
	b.add(m)
	return nil
}

// recorderPair measures the same calls to a node with a recorder and to one without. Both run at the same time, and
// every other pair the one without is first.
func (b *bench) recorderPair(ctx context.Context, run int, into samples) (err error) {
	type side struct {
		settings []string
		mark     string
		node     *daemon
	}
	sides := []*side{{}, {settings: []string{"--recorder-memory", "0"}, mark: baselineMark}}
	for _, s := range sides {
		d, f, end, err := b.stage(ctx, variant{settings: s.settings}, overWebSocket, b.opt.devices, true)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, end()) }()
		if err := f.bring(ctx, d, 0, b.opt.devices); err != nil {
			return err
		}
		s.node = d
	}
	if run%2 == 1 {
		slices.Reverse(sides)
	}
	others := 0.0
	for _, s := range sides {
		if _, err := load.CallLoad(ctx, s.node.target(), b.opt.callers, b.opt.devices, b.opt.duration); err != nil { // warms up
			return err
		}
		one := samples{}
		if err := b.closedLoop(ctx, "", "", s.node.target(), one, s.node); err != nil {
			return err
		}
		for _, l := range recorderCallLines {
			into.add(s.mark+l.name, one[l.name][0])
		}
		others = max(others, one[figureOthers][0])
	}
	into.add(figureOthers, others)
	return nil
}

// feedRecorder feeds a recorder of its own.
func feedRecorder(into samples, n int) error {
	ids := make([]devices.ID, n)
	for i := range ids {
		ids[i] = devices.ID(load.DeviceID(i))
	}
	remote := netip.MustParseAddr("192.0.2.44")
	connected := devices.Step{Kind: devices.StepConnected, Transport: devices.TransportMQTT, Epoch: 1_790_000_000_000_000, Remote: remote, Text: "2.4.2", Took: 400 * time.Millisecond, Generation: 3, Proven: true}
	closed := devices.Step{Kind: devices.StepClosed, Cause: devices.StepCause(devices.CloseGone), Took: 3 * time.Hour, Transport: devices.TransportMQTT, Remote: remote, Proven: true}

	before := liveHeap()
	r := recorder.New("bench", recorderMemory)
	feed := func() {
		for range recorderConnects {
			for _, id := range ids {
				connected.Device, closed.Device = id, id
				r.Step(connected)
				r.Step(closed)
			}
		}
	}
	records := float64(2 * recorderConnects * n)
	m, err := startMeter("")
	if err != nil {
		return err
	}
	first, err := cpuOf(feed)
	if err != nil {
		return err
	}
	into.add(figureFirstRecord, float64(first)/records)
	into.add(figureRecorderHeap, float64(liveHeap()-before)/(1<<20))
	forgotten := 0
	for _, id := range ids {
		if steps := r.Steps(id, true, "", devices.LogPosition{}, 2); len(steps) < 2 || steps[0].Kind != devices.StepClosed {
			forgotten++
		}
	}
	into.add(figureForgotten, float64(forgotten))

	for range 2 { // what the memory holds, and more: from now on none is taken
		feed()
	}
	allocated := mallocsOf(func() { first, err = cpuOf(feed) })
	if err != nil {
		return err
	}
	into.add(figureRecord, float64(first)/records)
	into.add(figureRecordAllocs, float64(allocated/uint64(records))) // those of the measuring itself are less than one a record
	call := devices.CallStep{Call: "aaaaaaaaaaaaaaaa", Tool: "self.audio_speaker.set_volume", At: time.Now(), Outcome: "device_timeout", Detail: "the device did not answer in time"}
	for range 4 {
		for _, id := range ids {
			call.Device, call.Outcome = id, "device_timeout"
			r.Call(call)
			call.Outcome = "ok"
			r.Call(call)
		}
	}
	into.add(figureRecorderFull, float64(liveHeap()-before)/(1<<20))
	runtime.KeepAlive(r)
	into.add(figureEvicted, float64(flapRecorder(ids[:min(n, flapOthers+1)], connected, closed)))
	s, err := m.stop(runtime.NumCPU())
	into.add(figureOthers, s.others*100)
	return err
}

// flapRecorder returns how many devices have lost their record to the last one, which connects again and again.
func flapRecorder(ids []devices.ID, connected, closed devices.Step) (evicted int) {
	r := recorder.New("bench", recorder.MinMemory)
	others, flaps := ids[:len(ids)-1], ids[len(ids)-1]
	for _, id := range others {
		connected.Device = id
		r.Step(connected)
	}
	connected.Device, closed.Device = flaps, flaps
	for range flapTimes {
		r.Step(connected)
		r.Step(closed)
	}
	for _, id := range others {
		if len(r.Steps(id, true, "", devices.LogPosition{}, 1)) != 1 {
			evicted++
		}
	}
	return evicted
}

// liveHeap is how many bytes of the heap are in use.
func liveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// mallocsOf counts the allocations of this program while f runs.
func mallocsOf(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.Mallocs - before.Mallocs
}

// cpuOf is how long this program has a processor while f runs; the ticks of /proc are too coarse.
func cpuOf(f func()) (time.Duration, error) {
	var before, after syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &before); err != nil {
		return 0, err
	}
	f()
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &after)
	return time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()), err
}
