package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/bench/load"
	"fleetd/internal/devices"
)

// counters are figures by name: what has been counted since the start, or the difference of two readings.
type counters map[string]float64

// Names of counters.
const (
	wall           = "wall, s"
	cpuNodes       = "CPU of the nodes, s"
	cpuNATS        = "CPU of the NATS servers, s"
	cpuPostgres    = "CPU of Postgres, s"
	claimsSent     = "claims sent"
	reasserted     = "claims sent for idle devices"
	claimsTaken    = "claims received"
	claimsLost     = "claims lost"
	presenceRows   = "presence rows written"
	staleRows      = "presence rows refused as stale"
	historyRows    = "history rows written"
	groups         = "transactions of rows"
	natsMessages   = "messages to and from NATS servers"
	natsBytes      = "bytes to and from NATS servers"
	routeMessages  = "messages between NATS servers"
	onlineEvents   = "events online"
	offlineEvents  = "events offline"
	eventsDropped  = "events dropped"
	natsCuts       = "NATS connections lost"
	slowConsumers  = "slow consumers of NATS servers"
	retriedCalls   = "calls that had to be repeated"
	subscriptions  = "subscriptions on a NATS server, most"
	natsHeap       = "heap of a NATS server without JetStream, mean, bytes"
	natsEvents     = "heap of a NATS server for JetStream, mean, bytes"
	nodeSubs       = "subscriptions of all nodes"
	nodesHeap      = "heap of all nodes and devices, bytes"
	nodesRoutines  = "goroutines of all nodes"
	natsTrafficIn  = "messages into NATS servers"
	natsTrafficOut = "messages out of NATS servers"
)

// less subtracts another reading, times a factor.
func (c counters) less(other counters, factor float64) counters {
	out := maps.Clone(c)
	for name, value := range other {
		out[name] -= value * factor
	}
	return out
}

// read counts everything up to now.
func (s *sim) read(ctx context.Context) (counters, error) {
	c := counters{wall: float64(time.Now().UnixMicro()) / 1e6, cpuNodes: load.OwnCPU().Seconds()}
	for _, n := range s.nodes {
		stats := n.store.Stats()
		c[claimsSent] += float64(n.claims.Load())
		c[reasserted] += float64(n.reasserts.Load())
		c[claimsTaken] += float64(n.link.Requests.Get("claim"))
		c[claimsLost] += float64(n.link.ClaimsLost.Load())
		c[presenceRows] += float64(stats.PresenceRows.Load())
		c[staleRows] += float64(stats.StalePresence.Load())
		c[historyRows] += float64(stats.HistoryRows.Load())
		c[groups] += float64(stats.Groups.Load())
		c[onlineEvents] += float64(n.events.Published.Get(devices.EventOnline))
		c[offlineEvents] += float64(n.events.Published.Get(devices.EventOffline))
		n.events.Dropped.Each(func(_ string, count int64) { c[eventsDropped] += float64(count) })
		c[natsCuts] += float64(n.cuts.Load())
	}
	for _, server := range s.nats {
		state, err := server.state(false)
		if err != nil {
			return nil, err
		}
		c[cpuNATS] += state.CPU.Seconds()
		c[natsTrafficIn] += float64(state.In)
		c[natsTrafficOut] += float64(state.Out)
		c[natsMessages] += float64(state.In + state.Out)
		c[natsBytes] += float64(state.InBytes + state.OutBytes)
		c[routeMessages] += float64(state.RouteIn)
		c[slowConsumers] += float64(state.Slow)
	}
	var err error
	c[cpuPostgres], err = s.readPostgres(ctx)
	return c, err
}

// readPostgres is the CPU time of the server's processes for this database, as far as they are processes of this machine.
func (s *sim) readPostgres(ctx context.Context) (float64, error) {
	var processes []int32
	if err := s.postgres.Query(ctx, "SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity WHERE datname = '"+s.database+"'", &processes); err != nil {
		return 0, err
	}
	for _, pid := range processes {
		name := strconv.Itoa(int(pid))
		used := processCPU(name)
		s.postgresAll += max(0, used-s.postgresCPU[name])
		s.postgresCPU[name] = used
	}
	return s.postgresAll.Seconds(), nil
}

// processCPU is the CPU time of a process of Postgres, 0 if it is not of this machine.
func processCPU(pid string) time.Duration {
	content, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil || !strings.Contains(string(content), "postgres") {
		return 0
	}
	used, _ := load.ProcessCPU(pid, false) // it may have ended meanwhile
	return used
}

// during counts what happens while f runs.
func (s *sim) during(ctx context.Context, name string, f func() error) (counters, error) {
	before, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	stop := func() error { return nil }
	if s.opt.profiles != "" {
		file, err := os.Create(filepath.Join(s.opt.profiles, "cpu-"+name+".pprof"))
		if err != nil {
			return nil, err
		}
		if err := pprof.StartCPUProfile(file); err != nil {
			return nil, errors.Join(err, file.Close())
		}
		stop = func() error {
			pprof.StopCPUProfile()
			return file.Close()
		}
	}
	if err := errors.Join(f(), stop()); err != nil {
		return nil, err
	}
	after, err := s.read(ctx)
	return after.less(before, 1), err
}

// gauge reads what is held now, after garbage collection.
func (s *sim) gauge() (counters, error) {
	c := counters{nodesRoutines: float64(runtime.NumGoroutine())}
	all, messages := heap(arriving)
	c[nodesHeap] = float64(all - messages)
	for _, n := range s.nodes {
		if !n.killed.Load() {
			c[nodeSubs] += float64(n.conn.NumSubscriptions())
		}
	}
	for _, server := range s.nats {
		state, err := server.state(true)
		if err != nil {
			return nil, err
		}
		c[subscriptions] = max(c[subscriptions], float64(state.Subs))
		c[natsHeap] += float64(state.Heap-state.Events) / float64(len(s.nats))
		c[natsEvents] += float64(state.Events) / float64(len(s.nats))
	}
	return c, nil
}

func (s *sim) heapProfile(total int) error {
	if s.opt.profiles == "" {
		return nil
	}
	file, err := os.Create(filepath.Join(s.opt.profiles, fmt.Sprintf("heap-%d.pprof", total)))
	if err != nil {
		return err
	}
	return errors.Join(pprof.WriteHeapProfile(file), file.Close())
}

// latency sums up how long something took, in milliseconds.
type latency struct {
	N   int     `json:"n"`
	P50 float64 `json:"p50_ms"`
	P99 float64 `json:"p99_ms"`
	Max float64 `json:"max_ms"`
}

func latencyOf(took []time.Duration) latency {
	if len(took) == 0 {
		return latency{}
	}
	slices.Sort(took)
	at := func(share float64) float64 { return float64(took[int(share*float64(len(took)-1))]) / 1e6 }
	return latency{len(took), at(0.5), at(0.99), at(1)}
}
