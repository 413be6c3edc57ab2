package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"fleetd/bench/load"
)

// Figures of tool calls.
const (
	figureCalls     = "calls/s"
	figureHalf      = "p50, µs"
	figureTail      = "p99, µs"
	figureServerCPU = "server CPU per call, µs"
	figureClientCPU = "load CPU per call, µs"
	figureMallocs   = "allocations per call"
)

var callWanted = []wanted{
	{figure: figureCalls, before: ": ", after: " calls/s"},
	{figure: figureHalf, before: "p50 ", after: " us"},
	{figure: figureTail, before: "p99 ", after: " us"},
	{figure: figureServerCPU, before: "server cpu ", after: " us/call"},
	{figure: figureClientCPU, before: "client cpu ", after: " us"},
	{figure: figureMallocs, before: "allocs "},
}

var callLines = []line{
	{name: figureCalls, goal: &goal{ratioAtLeast, 0.9}}, {name: figureHalf}, {name: figureTail},
	{name: figureServerCPU, precision: 1}, {name: figureClientCPU, precision: 1}, {name: figureMallocs, precision: 1},
}

// measureCalls measures REST calls to WebSocket devices with everything on: credentials on both sides, argument check,
// events, store.
func (b *bench) measureCalls(ctx context.Context) error {
	o := b.opt
	arguments := []string{"-http", "net", "-json", "append", "-callers", strconv.Itoa(o.callers), "-devices", strconv.Itoa(o.devices), "-d", o.duration.String()}
	m := measurement{Name: "call", Title: fmt.Sprintf("Tool calls over REST: %d callers, %d devices, all embedded", o.callers, o.devices)}
	fleetd, baseline := samples{}, samples{}
	for run := range o.runs {
		m.Baseline = commandLine("toolcall", arguments)
		if err := b.quietly("toolcall", baseline, func(into samples) error {
			return b.baselines.measure(ctx, into, callWanted, "toolcall", arguments...)
		}); err != nil {
			return err
		}
		if err := b.quietly("call", fleetd, func(into samples) error { return b.callRun(ctx, run, overWebSocket, into) }); err != nil {
			return fmt.Errorf("calls, run %d: %w", run+1, err)
		}
		b.progress("call", run, fleetd, baseline, figureCalls)
	}
	m.tabulate(fleetd, baseline, callLines)
	b.add(m)
	return nil
}

// callNames are the measurements of calls.
var callNames = map[string]string{overWebSocket: "call", overMQTT: "mqtt-call"}

var mqttCallLines = append([]line{{name: figureCalls, goal: &goal{ratioAtLeast, 0.9}}}, callLines[1:]...)

// measureMQTTCalls measures the same calls to MQTT devices, alternating with WebSocket devices; each kind is first in
// every other run.
func (b *bench) measureMQTTCalls(ctx context.Context) error {
	o := b.opt
	m := measurement{Name: callNames[overMQTT], Title: fmt.Sprintf("Tool calls over REST to MQTT devices: %d callers, %d devices, all embedded", o.callers, o.devices),
		Baseline: "fleetd with as many WebSocket devices"}
	sides := map[string]samples{overMQTT: {}, overWebSocket: {}}
	for run := range o.runs {
		order := []string{overWebSocket, overMQTT}
		if run%2 == 1 {
			slices.Reverse(order)
		}
		for _, transport := range order {
			if err := b.quietly(callNames[transport], sides[transport], func(into samples) error { return b.callRun(ctx, run, transport, into) }); err != nil {
				return fmt.Errorf("calls over %s, run %d: %w", transport, run+1, err)
			}
		}
		b.progress(m.Name, run, sides[overMQTT], sides[overWebSocket], figureCalls)
	}
	m.tabulate(sides[overMQTT], sides[overWebSocket], mqttCallLines)
	b.add(m)
	return nil
}

func (b *bench) callRun(ctx context.Context, run int, transport string, into samples) (err error) {
	d, f, end, err := b.stage(ctx, variant{}, transport, b.opt.devices, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	if err := f.bring(ctx, d, 0, b.opt.devices); err != nil {
		return err
	}
	if _, err := load.CallLoad(ctx, d.target(), b.opt.callers, b.opt.devices, b.opt.duration); err != nil { // warms up
		return err
	}
	return b.closedLoop(ctx, b.profileFile(callNames[transport], run), "", d.target(), into, d)
}

// closedLoop measures callers that call one device after another. The nodes share the calls; the profile is the first
// one's.
func (b *bench) closedLoop(ctx context.Context, profile, server string, t load.Target, into samples, nodes ...*daemon) error {
	var processes []string
	for _, d := range nodes {
		processes = append(processes, d.pid())
	}
	before, err := mallocs(ctx, nodes)
	if err != nil {
		return err
	}
	saved := nodes[0].profile(ctx, profile, max(1, int(b.opt.duration.Seconds())))
	meter, err := startMeter(server, processes...)
	if err != nil {
		return err
	}
	latencies, err := load.CallLoad(ctx, t, b.opt.callers, b.opt.devices, b.opt.duration)
	if err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err != nil {
		return err
	}
	after, err := mallocs(ctx, nodes)
	if err := errors.Join(err, saved()); err != nil {
		return err
	}
	n := float64(len(latencies))
	slices.Sort(latencies)
	into.add(figureCalls, n/s.wall.Seconds())
	into.add(figureHalf, load.Quantile(latencies, 0.5).Seconds()*1e6)
	into.add(figureTail, load.Quantile(latencies, 0.99).Seconds()*1e6)
	into.add(figureServerCPU, s.daemon.Seconds()*1e6/n)
	into.add(figureClientCPU, s.own.Seconds()*1e6/n)
	into.add(figureMallocs, (after-before)/n)
	into.add(figureOthers, s.others*100)
	return nil
}

// mallocs counts what the nodes have allocated so far.
func mallocs(ctx context.Context, nodes []*daemon) (sum float64, err error) {
	for _, d := range nodes {
		m, err := d.metrics(ctx)
		if err != nil {
			return 0, err
		}
		sum += m[seriesMallocs]
	}
	return sum, nil
}

const callBody = `{"arguments":{"volume":50}}`

// target is the node's REST API.
func (d *daemon) target() load.Target { return d.targetFor(callBody) }

func (d *daemon) targetFor(body string) load.Target {
	return load.Target{Address: strings.TrimPrefix(d.api, "http://"), Before: "POST /v1/devices/", After: "/tools/" + load.ToolSetVolume + "/call HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer " +
		d.token + "\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body}
}
