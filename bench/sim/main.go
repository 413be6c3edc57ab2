// Fleetsim measures the cost of a fleet larger than one machine: many nodes made of fleetd's own parts in one process, with
// devices on connections in memory, beside a NATS cluster of three processes and Postgres. It gives the slope of each
// figure per device, and marks the slopes that rise.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"fleetd/bench/services"
)

// options are the command line.
type options struct {
	nodes, devices   int
	rate, returnRate float64
	away             float64
	sample, calls    int
	idle, lease      time.Duration
	tolerance        float64
	servers          int
	jsonFile, mdFile string
	profiles         string
	limit            time.Duration
	verbose          bool
}

func parseOptions(arguments []string, stderr io.Writer) (o options, err error) {
	flags := flag.NewFlagSet("sim", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&o.nodes, "nodes", 20, "nodes")
	flags.IntVar(&o.devices, "devices", 10_000, "devices of each node at the last of three steps; the others have a quarter and a half of that")
	flags.IntVar(&o.servers, "nats", natsServers, "servers of the NATS cluster, each of which keeps all events: 1 or 3")
	flags.Float64Var(&o.rate, "rate", 1000, "connections per second, over all nodes")
	flags.Float64Var(&o.returnRate, "return-rate", 500, "connections per second of the devices of the node that is killed")
	flags.Float64Var(&o.away, "away", 10, "`percentage` of them that does not return")
	flags.IntVar(&o.sample, "sample", 1000, "devices of them that every other node calls")
	flags.IntVar(&o.calls, "calls", 2000, "calls to devices on the node that takes the call, and as many to devices on other nodes, at each step")
	flags.DurationVar(&o.idle, "idle", time.Minute, "time over which idle devices are watched; a device is claimed anew once a minute")
	flags.DurationVar(&o.lease, "lease", 15*time.Second, "time after which a node that does not renew its lease is lost")
	flags.Float64Var(&o.tolerance, "tolerance", 0.25, "how much higher the last slope may be than the first")
	flags.StringVar(&o.jsonFile, "json", "", "write the figures as JSON to this `file`")
	flags.StringVar(&o.mdFile, "md", "", "write the tables as Markdown to this `file`")
	flags.StringVar(&o.profiles, "profile", "", "save a CPU profile of each phase and a heap profile of each step in this `directory`")
	flags.DurationVar(&o.limit, "limit", time.Hour, "end the whole run after this time")
	flags.BoolVar(&o.verbose, "v", false, "show warnings of the nodes")
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case o.nodes < 3 || o.devices < 4:
		return o, errors.New("-nodes must be at least 3, -devices at least 4")
	case o.servers != 1 && o.servers != natsServers:
		return o, errors.New("-nats must be 1 or 3")
	case o.rate <= 0 || o.returnRate <= 0 || o.sample < 1 || o.calls < 1 || o.idle <= 0 || o.lease <= 0 || o.away < 0 || o.away > 50:
		return o, errors.New("-rate, -return-rate, -sample, -calls, -idle and -lease must be positive, -away 0 to 50")
	}
	return o, nil
}

func main() { services.Main("sim", run, servers) }

// run makes all steps and prints the tables. Whatever happens, what it started is stopped.
func run(ctx context.Context, arguments []string, stdout, stderr io.Writer) (err error) {
	o, err := parseOptions(arguments, stderr)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.limit, fmt.Errorf("the limit of %v is over (-limit)", o.limit))
	defer cancel()
	s, err := start(ctx, o, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	r := newReport(o)
	if err = s.steps(ctx, r); err == nil {
		err = s.lose(ctx, r)
	}
	if len(r.Steps) > 1 { // what was measured before a failure counts
		err = errors.Join(err, r.write(stdout))
	}
	return err
}

// steps connects the devices in three steps, each of which is measured.
func (s *sim) steps(ctx context.Context, r *report) error {
	empty, err := s.gauge()
	if err != nil {
		return err
	}
	r.add(&step{gauges: empty})
	per := s.opt.devices
	for _, each := range []int{(per + 3) / 4, (per + 1) / 2, per} {
		total := each * s.opt.nodes
		next := &step{Devices: total}
		s.say("connecting up to %d devices", total)
		if next.connecting, err = s.during(ctx, fmt.Sprintf("connect-%d", total), func() error {
			if err := s.connect(ctx, s.devs[s.connected:total], s.opt.rate, nil); err != nil {
				return err
			}
			s.connected = total
			return s.settle(ctx, total)
		}); err != nil {
			return err
		}
		next.accepted, next.listed = s.times()
		s.say("watching %d idle devices for %v", total, s.opt.idle)
		if next.idle, err = s.during(ctx, fmt.Sprintf("idle-%d", total), func() error { return sleep(ctx, s.opt.idle) }); err != nil {
			return err
		}
		if next.gauges, err = s.gauge(); err != nil { // claims that waited for the nodes have been taken
			return err
		}
		if err := s.heapProfile(total); err != nil {
			return err
		}
		if next.local, err = s.callMany(ctx, true); err != nil {
			return err
		}
		if next.routed, err = s.callMany(ctx, false); err != nil {
			return err
		}
		r.add(next)
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
