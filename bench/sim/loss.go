package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
)

const (
	probers    = 64
	probePause = 20 * time.Millisecond
	probeLimit = 30 * time.Second
	lostLimit  = 2 * time.Minute // after the lease has ended
)

// loss is what the end of one node costs the others.
type loss struct {
	Devices  int `json:"devices"`
	Returned int `json:"returned"`
	// Cost is counted over the other nodes from the kill until the dead node is cleared away, less what as many idle
	// devices cost afterwards.
	Cost counters `json:"cost"`
	// Callable is the time from a device's return until every other node has called it.
	Callable latency `json:"callable"`
	// AllCallable is the time from the kill until that was so for the last of the sample.
	AllCallable float64 `json:"all_callable_s"`
	Cleared     float64 `json:"cleared_s"` // from the kill until no node sees the dead one's lease
	Online      int64   `json:"online"`    // devices shown online at the end
	Subs        float64 `json:"subscriptions"`
}

// lose kills the first node, has its devices return to the others, and measures.
func (s *sim) lose(ctx context.Context, r *report) error {
	dead := s.nodes[0]
	var lost []device
	var places []int
	for i := range s.devs {
		if s.devs[i].home == 0 {
			lost, places = append(lost, s.devs[i]), append(places, i)
		}
	}
	l := &loss{Devices: len(lost), Returned: len(lost) - int(float64(len(lost))*s.opt.away/100)}
	s.say("killing a node with %d devices, of which %d return", l.Devices, l.Returned)
	back := lost[:l.Returned]
	for i := range back {
		back[i].home = 1 + i%(len(s.nodes)-1)
		s.devs[places[i]] = back[i]
	}
	var retried atomic.Int64
	killed := time.Now()
	cost, err := s.during(ctx, "loss", func() error {
		dead.kill()
		probed := make(chan probe, len(back))
		var took []time.Duration
		var faults error
		var mu sync.Mutex
		var probing sync.WaitGroup
		for range probers {
			probing.Go(func() {
				for p := range probed {
					until, again, err := s.reach(ctx, p)
					retried.Add(again)
					mu.Lock()
					took = append(took, until.Sub(p.since))
					l.AllCallable = max(l.AllCallable, until.Sub(killed).Seconds())
					if err != nil {
						faults = err
					}
					mu.Unlock()
				}
			})
		}
		every := max(1, len(back)/s.opt.sample)
		var nth atomic.Int64
		err := s.connect(ctx, back, s.opt.returnRate, func(d *device, at time.Time) {
			if nth.Add(1)%int64(every) == 0 {
				probed <- probe{d, at}
			}
		})
		close(probed)
		probing.Wait()
		l.Callable = latencyOf(took)
		if err != nil {
			return err
		}
		if faults != nil {
			return faults
		}
		if err := s.cleared(ctx, dead); err != nil {
			return err
		}
		l.Cleared = time.Since(killed).Seconds()
		return s.settle(ctx, s.connected-len(lost)+len(back))
	})
	if err != nil {
		return err
	}
	s.say("watching %d idle devices for %v", s.connected-len(lost)+len(back), s.opt.idle)
	idle, err := s.during(ctx, "idle-loss", func() error { return sleep(ctx, s.opt.idle) })
	if err != nil {
		return err
	}
	cost[retriedCalls] = float64(retried.Load())
	l.Cost = cost.less(idle, cost[wall]/idle[wall])
	l.Cost[wall] = cost[wall]
	// Claims of idle devices come in waves, and each reaches every other node.
	l.Cost[claimsTaken] = cost[claimsTaken] - cost[reasserted]*float64(len(s.nodes)-2)
	gauges, err := s.gauge()
	if err != nil {
		return err
	}
	l.Subs = gauges[subscriptions] - r.Steps[len(r.Steps)-1].gauges[subscriptions]
	counts, err := s.nodes[1].store.Counts(ctx)
	if err != nil {
		return err
	}
	l.Online = onlineOf(counts)
	if want := int64(s.connected - len(lost) + len(back)); l.Online != want {
		return fmt.Errorf("%d devices are shown online, %d are connected", l.Online, want)
	}
	r.Loss = l
	return nil
}

// probe is a device that has returned.
type probe struct {
	device *device
	since  time.Time
}

// reach calls a device through every other node until that succeeds, and returns when the last call did.
func (s *sim) reach(ctx context.Context, p probe) (until time.Time, again int64, err error) {
	for i, n := range s.nodes {
		if n.killed.Load() || i == p.device.home {
			continue
		}
		for {
			if err = s.call(ctx, n, p.device.id); err == nil {
				break
			}
			if time.Since(p.since) > probeLimit || ctx.Err() != nil {
				return time.Now(), again, fmt.Errorf("%s cannot be called through %s after %v: %w", p.device.id, n.name, probeLimit, err)
			}
			again++
			time.Sleep(probePause)
		}
	}
	return time.Now(), again, nil
}

// cleared waits until no node sees the lease of the dead one, and nothing of it is online.
func (s *sim) cleared(ctx context.Context, dead *node) error {
	for deadline := time.Now().Add(s.opt.lease + lostLimit); ; {
		seen := false
		for _, n := range s.nodes {
			seen = seen || !n.killed.Load() && n.leases.Has(dead.name)
		}
		if !seen {
			left, err := s.nodes[1].store.OnlineOf(ctx, dead.name, "", 1)
			if err == nil && len(left) == 0 {
				return nil
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the dead node is not cleared away after %v", s.opt.lease+lostLimit)
		}
		if err := sleep(ctx, settleEvery); err != nil {
			return err
		}
	}
}

// onlineOf reads the number of devices that are shown online.
func onlineOf(c devices.Counts) (n int64) {
	for _, v := range c.Dimensions["state"].Top {
		if v.Value == string(devices.StateOnline) {
			n = v.N
		}
	}
	return n
}
