package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"fleetd/bench/load"
	"fleetd/bench/services"
	"fleetd/internal/access"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// nodeConnections are what a node may open to Postgres.
const nodeConnections = 11

const (
	connectors  = 16 // devices that connect at once
	settleLimit = 3 * time.Minute
	settleEvery = 50 * time.Millisecond
)

// sim is a fleet in this process.
type sim struct {
	opt       options
	out       io.Writer
	dir       string
	postgres  *services.Postgres
	database  string       // name
	drop      func() error // the database
	nats      []natsServer
	urls      []string
	nodes     []*node
	devs      []device
	connected int // devices, the first of devs

	stopDevices context.CancelFunc
	tasks       sync.WaitGroup

	mu       sync.Mutex
	accepted []time.Duration

	postgresCPU map[string]time.Duration // by process, as last seen
	postgresAll time.Duration
}

func (s *sim) say(format string, args ...any) {
	fmt.Fprintf(s.out, time.Now().Format("15:04:05 ")+format+"\n", args...)
}

// start brings servers, database and nodes up, and makes the devices members.
func start(ctx context.Context, o options, out io.Writer) (s *sim, err error) {
	s = &sim{opt: o, out: out, drop: func() error { return nil }, postgresCPU: map[string]time.Duration{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
			s = nil
		}
	}()
	if s.dir, err = os.MkdirTemp("", "fleetsim"); err != nil {
		return s, err
	}
	if o.profiles != "" {
		if err := os.MkdirAll(o.profiles, 0o755); err != nil {
			return s, err
		}
	}
	database, err := s.createDatabase(ctx)
	if err != nil {
		return s, err
	}
	if s.nats, err = startNATS(s.dir, o.servers); err != nil {
		return s, err
	}
	for _, server := range s.nats {
		s.urls = append(s.urls, server.Address)
	}
	for i := range o.nodes * o.devices {
		s.devs = append(s.devs, newDevice(i, i%o.nodes))
	}
	mint, err := credential.New([]byte(credential.NewSecret()))
	if err != nil {
		return s, err
	}
	var answering context.Context
	answering, s.stopDevices = context.WithCancel(context.WithoutCancel(ctx))
	level := slog.LevelError
	if o.verbose {
		level = slog.LevelInfo
	}
	log := slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: level}))
	if o.verbose {
		log = slog.New(quieter{log.Handler()})
	}
	for i := range o.nodes {
		dir := filepath.Join(s.dir, fmt.Sprintf("node-%d", i+1))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return s, err
		}
		to := newResponder(answering)
		s.tasks.Go(to.run)
		n, err := startNode(ctx, filepath.Base(dir), s.urls[i%len(s.urls)], database, dir, o, mint, to, log)
		if err != nil {
			return s, err
		}
		s.nodes = append(s.nodes, n)
		if i == 0 { // the others read the members when they start
			if err := s.admit(ctx); err != nil {
				return s, err
			}
		}
	}
	return s, s.settle(ctx, 0)
}

// quieter leaves out records about single devices.
type quieter struct{ slog.Handler }

// Handle passes on what is not about a single device.
func (q quieter) Handle(ctx context.Context, r slog.Record) error {
	single := false
	r.Attrs(func(a slog.Attr) bool {
		single = single || a.Key == "device"
		return !single
	})
	if single && r.Level < slog.LevelWarn {
		return nil
	}
	return q.Handler.Handle(ctx, r)
}

// WithAttrs keeps the filter.
func (q quieter) WithAttrs(attrs []slog.Attr) slog.Handler {
	return quieter{q.Handler.WithAttrs(attrs)}
}

// createDatabase makes an empty database, if the server takes as many connections as the nodes may open.
func (s *sim) createDatabase(ctx context.Context) (address string, err error) {
	if s.postgres, err = services.FindPostgres(ctx); err != nil {
		return "", err
	}
	var most int
	if err := s.postgres.Query(ctx, "SELECT current_setting('max_connections')::int", &most); err != nil {
		return "", err
	}
	if wanted := s.opt.nodes * nodeConnections; most < wanted {
		return "", fmt.Errorf("%d nodes may open %d connections to Postgres, whose max_connections is %d: raise that, or simulate %d nodes", s.opt.nodes, wanted, most, most/nodeConnections)
	}
	address, drop, err := s.postgres.Create(ctx, "fleetd_sim_")
	if err == nil {
		s.drop, s.database = drop, path.Base(address)
	}
	return address, err
}

// admit makes all devices members.
func (s *sim) admit(ctx context.Context) error {
	s.say("importing %d devices", len(s.devs))
	by := access.Principal{Caller: access.Admin}
	for first := 0; first < len(s.devs); first += fleet.MaxImport {
		var rows []fleet.ImportRow
		for _, d := range s.devs[first:min(first+fleet.MaxImport, len(s.devs))] {
			client := clientID(d.id)
			rows = append(rows, fleet.ImportRow{Device: d.id, ClientID: &client})
		}
		done, err := s.nodes[0].service.Import(ctx, by, rows, false, nil)
		if err != nil {
			return fmt.Errorf("import: %w", err)
		}
		for _, outcome := range done {
			if outcome.Err != nil {
				return fmt.Errorf("import: %w", outcome.Err)
			}
		}
	}
	return nil
}

// connect connects devices to their nodes at a rate. done, if set, is called for each with when it was accepted.
func (s *sim) connect(ctx context.Context, devs []device, perSecond float64, done func(d *device, at time.Time)) error {
	limit := rate.NewLimiter(rate.Limit(perSecond), connectors)
	due := make(chan int)
	var connecting sync.WaitGroup
	var fault error
	for range connectors {
		connecting.Go(func() {
			for i := range due {
				d := &devs[i]
				begun := time.Now()
				err := s.nodes[d.home].accept(d, i%firmwares)
				at := time.Now()
				s.mu.Lock()
				s.accepted = append(s.accepted, at.Sub(begun))
				fault = errors.Join(fault, err)
				s.mu.Unlock()
				if done != nil && err == nil {
					done(d, at)
				}
			}
		})
	}
	var err error
	for i := 0; i < len(devs) && err == nil; i++ {
		if err = limit.Wait(ctx); err == nil {
			due <- i
		}
	}
	close(due)
	connecting.Wait()
	return errors.Join(fault, err)
}

// settle waits until so many devices are ready, and everything is written.
func (s *sim) settle(ctx context.Context, want int) error {
	for deadline := time.Now().Add(settleLimit); ; {
		ready, waiting := 0, int64(0)
		for _, n := range s.nodes {
			if !n.killed.Load() {
				ready += n.ready()
				waiting += n.waiting()
			}
		}
		if ready == want && waiting == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("after %v %d of %d devices are ready, and %d rows and events wait", settleLimit, ready, want, waiting)
		}
		if err := sleep(ctx, settleEvery); err != nil {
			return err
		}
	}
}

// times takes what connecting took: the core's part, and until the tools were listed.
func (s *sim) times() (accepted, listed latency) {
	var all []time.Duration
	for _, n := range s.nodes {
		all = append(all, n.devices.take()...)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	accepted = latencyOf(s.accepted)
	s.accepted = nil
	return accepted, latencyOf(all)
}

// call has a node call a tool of a device.
func (s *sim) call(ctx context.Context, n *node, id devices.ID) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err := n.service.CallTool(ctx, devices.ToolCall{Device: id, Tool: load.ToolSetVolume, Arguments: argumentsCalled, Principal: access.Principal{Caller: access.Admin}})
	return err
}

// callMany measures calls, one after the other, to devices on the node that takes the call, or on other nodes.
func (s *sim) callMany(ctx context.Context, local bool) (latency, error) {
	var took []time.Duration
	for i := range s.opt.calls {
		d := &s.devs[i*7919%s.connected] // a prime spreads them
		at := d.home
		if !local {
			at = (d.home + 1 + i%(len(s.nodes)-1)) % len(s.nodes)
		}
		begun := time.Now()
		if err := s.call(ctx, s.nodes[at], d.id); err != nil {
			return latency{}, fmt.Errorf("call to %s: %w", d.id, err)
		}
		took = append(took, time.Since(begun))
	}
	return latencyOf(took), nil
}

// close ends everything that start began; what fails is of the database and the files.
func (s *sim) close() (err error) {
	var ending sync.WaitGroup
	for _, n := range s.nodes {
		ending.Go(func() {
			n.kill() // goodbyes of all devices would take minutes
			n.close()
		})
	}
	ending.Wait()
	if s.stopDevices != nil {
		s.stopDevices()
		s.tasks.Wait()
	}
	stopNATS(s.nats)
	err = s.drop()
	if s.dir != "" {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	return err
}
