package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
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
		if b.baselines != nil {
			m.Baseline = commandLine("toolcall", arguments)
			if err := b.quietly("toolcall", baseline, func(into samples) error {
				return b.baselines.measure(ctx, into, callWanted, "toolcall", arguments...)
			}); err != nil {
				return err
			}
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

// measureMQTTCalls measures the same calls to MQTT devices, in turn with WebSocket devices, either of them first in
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
	if _, err := callLoad(ctx, d.target(), b.opt.callers, b.opt.devices, b.opt.duration); err != nil { // warms up
		return err
	}
	return b.closedLoop(ctx, b.profileFile(callNames[transport], run), "", d.target(), into, d)
}

// closedLoop measures callers that call one device after another. The nodes share the calls; the profile is the first
// one's.
func (b *bench) closedLoop(ctx context.Context, profile, server string, t target, into samples, nodes ...*daemon) error {
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
	latencies, err := callLoad(ctx, t, b.opt.callers, b.opt.devices, b.opt.duration)
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
	into.add(figureHalf, quantile(latencies, 0.5).Seconds()*1e6)
	into.add(figureTail, quantile(latencies, 0.99).Seconds()*1e6)
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

// quantile of sorted durations.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// target is an HTTP server that takes calls, and how a request to it reads around the device's id.
type target struct{ address, before, after string }

const callBody = `{"arguments":{"volume":50}}`

// target is the node's REST API.
func (d *daemon) target() target { return d.targetFor(callBody) }

func (d *daemon) targetFor(body string) target {
	return target{strings.TrimPrefix(d.api, "http://"), "POST /v1/devices/", "/tools/" + toolSetVolume + "/call HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer " +
		d.token + "\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body}
}

// callLoad lets callers call one device after another over keep-alive connections until the time is over, and returns
// how long each call took. A call that does not succeed ends it.
func callLoad(ctx context.Context, t target, callers, devices int, duration time.Duration) ([]time.Duration, error) {
	var sequence atomic.Int64
	parts := make([][]time.Duration, callers)
	stop := time.Now().Add(duration)
	err := inParallel(callers, callers, func() (func(k int) error, func(), error) {
		caller, err := newCaller(t, stop.Add(exchangeLimit))
		if err != nil {
			return nil, nil, err
		}
		return func(k int) error {
			for time.Now().Before(stop) && ctx.Err() == nil {
				begun := time.Now()
				if err := caller.call(int(sequence.Add(1)) % devices); err != nil {
					return err
				}
				parts[k] = append(parts[k], time.Since(begun))
			}
			return ctx.Err()
		}, caller.close, nil
	})
	return slices.Concat(parts...), err
}

var callSuccess = []byte(`"isError":false`)

// caller is one keep-alive connection of somebody who calls.
type caller struct {
	target
	conn    net.Conn
	br      *bufio.Reader
	request []byte
}

func newCaller(t target, deadline time.Time) (*caller, error) {
	c, err := net.Dial("tcp", t.address)
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(deadline); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &caller{target: t, conn: c, br: bufio.NewReaderSize(c, 4096)}, nil
}

func (c *caller) close() { _ = c.conn.Close() } // nothing is under way

// call calls the device's tool; whatever is no success is an error.
func (c *caller) call(device int) error {
	ok, status, body, err := c.try(deviceID(device))
	if err != nil {
		return fmt.Errorf("call: %w", err)
	}
	if !ok {
		return fmt.Errorf("call: status %d, %.300q", status, body)
	}
	return nil
}

// try calls the device's tool and returns the answer. An error says that there is none.
func (c *caller) try(device string) (ok bool, status int, body []byte, err error) {
	c.request = append(append(append(c.request[:0], c.before...), device...), c.after...)
	if _, err := c.conn.Write(c.request); err != nil {
		return false, 0, nil, err
	}
	status, body, err = readResponse(c.br)
	return err == nil && status == 200 && bytes.Contains(body, callSuccess), status, body, err
}
