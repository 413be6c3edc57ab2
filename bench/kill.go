package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"fleetd/bench/load"
)

// Figures of a node that is killed.
const (
	figureLost      = "devices on the node that is killed"
	figureReturns   = "from the kill to a device's return, p99, s"
	figureAway      = "devices that did not return"
	figureUsable    = "from its return until a call through another node succeeds, longest, ms"
	figureUsableP99 = "the same, p99, ms"
	figureUsableP50 = "the same, p50, ms"
	figureWaited    = "of it, until the bench made the first call, p99, ms"
	figureAttempts  = "calls until then, per device"
	figureUnusable  = "devices not callable 5 s after their return"
	figureOffline   = "devices shown offline though connected, after the lease"
)

const (
	killNodes   = 3
	killLease   = 15 * time.Second // after which a node that shows no sign of life counts as lost (docs/howto/several-nodes.md)
	killWatch   = 15 * time.Second // how long presence is watched after that
	killUsable  = 5 * time.Second
	killReturns = 90 * time.Second // for the last device to return, and to be called
)

func killLines() []line {
	none := &goal{Kind: atMostEver}
	return []line{
		{name: figureLost}, {name: figureReturns, precision: 2}, {name: figureAway, goal: none},
		{name: figureUsable, precision: 1, goal: &goal{atMostEver, float64(killUsable.Milliseconds())}}, {name: figureUsableP99, precision: 1},
		{name: figureUsableP50, precision: 1}, {name: figureWaited, precision: 1}, {name: figureAttempts, precision: 2}, {name: figureUnusable, goal: none}, {name: figureOffline, goal: none},
	}
}

// measureKill measures what becomes of the devices of a node that ends without a word: the simulator's devices, which come
// back when somebody wakes them, through one address.
func (b *bench) measureKill(ctx context.Context) error {
	if b.postgres == nil {
		b.leaveOut("kill: nodes of one fleet need Postgres and an external NATS")
		return nil
	}
	m := measurement{Name: "kill", Title: fmt.Sprintf("One of %d nodes killed: %d simulated WebSocket devices, woken every %v, external NATS and Postgres", killNodes, b.opt.kill, b.opt.killWake)}
	fleetd := samples{}
	for run := range b.opt.runs { // what is judged is what no run may show, so a disturbed one counts too
		if err := b.killRun(ctx, run, fleetd); err != nil {
			return fmt.Errorf("kill, run %d: %w", run+1, err)
		}
		b.progress(m.Name, run, fleetd, nil, figureUsable)
	}
	m.tabulate(fleetd, nil, killLines())
	b.add(m)
	return nil
}

func (b *bench) killRun(ctx context.Context, run int, into samples) (err error) {
	var ports []string
	for range killNodes {
		port, err := freePort()
		if err != nil {
			return err
		}
		ports = append(ports, port)
	}
	way, err := newBalancer(ports...)
	if err != nil {
		return err
	}
	defer way.close()
	each := make([][]string, killNodes)
	for i, port := range ports {
		each[i] = []string{"--node", "node-" + strconv.Itoa(i), "--device-listen", port, "--public-device-url", "http://" + way.address()}
	}
	nodes, stop, err := b.startNodes(ctx, variant{postgres: true, nats: true}, each...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	simulator, stopDevices, err := b.simulate(way.address())
	if err != nil {
		return err
	}
	defer stopDevices()
	if err := awaitHeld(ctx, nodes, b.opt.kill, 2*b.opt.limitReady); err != nil {
		return err
	}
	return b.killOne(ctx, run%killNodes, nodes, way, simulator, into)
}

// simulate starts the devices of the real simulator, which have the ids of this program's.
func (b *bench) simulate(address string) (pid string, stop func(), err error) {
	var output bytes.Buffer
	cmd := exec.Command(b.opt.simulator, "--ota", "http://"+address+"/xiaozhi/ota/", "--transport", "websocket", "--devices", strconv.Itoa(b.opt.kill),
		"--wake", b.opt.killWake.String(), "--ramp", "1000/s", "--mac-base", load.DeviceID(0), "--quiet")
	load.DieWithParent(cmd)
	cmd.Stderr = &output
	if err := cmd.Start(); err != nil {
		return "", nil, fmt.Errorf("start %s (run `make build` first): %w", b.opt.simulator, err)
	}
	return strconv.Itoa(cmd.Process.Pid), func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		timer := time.AfterFunc(stopLimit, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
		if err := cmd.Wait(); err != nil {
			fmt.Fprintf(b.out, "the simulator ended with %v: %s\n", err, &output)
		}
	}, nil
}

// killOne kills a node and follows its devices.
func (b *bench) killOne(ctx context.Context, victim int, nodes []*daemon, way *balancer, simulator string, into samples) error {
	alive, processes := slices.Clone(nodes), []string{simulator}
	alive[victim] = nil
	targets := make([]load.Target, len(nodes))
	for i, d := range alive {
		if d != nil {
			processes = append(processes, d.pid())
			targets[i] = d.targetFor(`{"arguments":{"volume":50},"timeout":"` + killUsable.String() + `"}`)
		}
	}
	meter, err := startMeter(b.nats.pid, processes...)
	if err != nil {
		return err
	}
	probing, stopProbing := context.WithTimeout(ctx, killReturns)
	defer stopProbing()
	p := newProber(targets, b.opt.kill)
	lost := way.lose(victim, p.returned)
	killed := time.Now()
	if err := nodes[victim].cmd.Process.Kill(); err != nil {
		return err
	}
	p.begin(probing)
	offline := map[string]bool{}
	_ = rest(ctx, time.Until(killed.Add(killLease))) // ctx is asked next
	for ; ctx.Err() == nil && time.Since(killed) < killLease+killWatch; _ = rest(ctx, time.Second) {
		for _, d := range alive {
			if d == nil {
				continue
			}
			if err := way.missing(ctx, d, offline); err != nil {
				return err
			}
		}
	}
	p.await(probing, len(lost))
	stopProbing()
	results := p.end()
	s, err := meter.stop(runtime.NumCPU())
	if err := errors.Join(err, ctx.Err()); err != nil {
		return err
	}
	var usable, returns, waited []time.Duration
	attempts, late := 0, 0
	for _, r := range results {
		usable, returns, waited = append(usable, r.took), append(returns, r.since.Sub(killed)), append(waited, r.waited)
		attempts += r.attempts
		if r.took > killUsable || !r.ok {
			late++
		}
	}
	slices.Sort(usable)
	slices.Sort(returns)
	slices.Sort(waited)
	into.add(figureLost, float64(len(lost)))
	into.add(figureReturns, load.Quantile(returns, 0.99).Seconds())
	into.add(figureAway, float64(len(lost)-len(results)))
	into.add(figureUsable, load.Quantile(usable, 1).Seconds()*1e3)
	into.add(figureUsableP99, load.Quantile(usable, 0.99).Seconds()*1e3)
	into.add(figureUsableP50, load.Quantile(usable, 0.5).Seconds()*1e3)
	into.add(figureWaited, load.Quantile(waited, 0.99).Seconds()*1e3)
	into.add(figureAttempts, float64(attempts)/float64(max(1, len(results))))
	into.add(figureUnusable, float64(late))
	into.add(figureOffline, float64(len(offline)))
	into.add(figureOthers, s.others*100)
	return nil
}

// missing adds devices that have been connected for a while and that the node does not show as online.
func (b *balancer) missing(ctx context.Context, d *daemon, into map[string]bool) error {
	before, online := b.steady(time.Second), map[string]bool{}
	for cursor := ""; ; {
		body, err := d.get(ctx, "/v1/devices?state=online&limit=1000&cursor="+url.QueryEscape(cursor))
		if err != nil {
			return err
		}
		var page struct {
			Items      []struct{ ID string }
			NextCursor string `json:"next_cursor"`
		}
		if err := json.Unmarshal(body, &page); err != nil {
			return fmt.Errorf("list of devices: %w", err)
		}
		for _, item := range page.Items {
			online[item.ID] = true
		}
		if cursor = page.NextCursor; cursor == "" {
			break
		}
	}
	for device, p := range b.steady(time.Second) {
		if before[device] == p && !online[device] {
			into[device] = true
		}
	}
	return nil
}
