package main

import (
	"context"
	"sync"
	"time"

	"fleetd/bench/load"
)

// prober calls devices that returned after the loss of their node, each through a node that does not hold it, until a
// call succeeds.
type prober struct {
	targets []load.Target // by node; of no address if it is dead
	queue   chan *probe
	stop    context.CancelFunc
	workers sync.WaitGroup

	mu   sync.Mutex
	all  []*probe
	open int // probes that go on
}

// probe is a device that returned, and what became of calls to it.
type probe struct {
	device   string
	via      int
	since    time.Time
	waited   time.Duration // until a worker was free for the first call
	took     time.Duration // until the call succeeded, or until now
	attempts int
	ok       bool
}

const (
	probeWorkers = 512                   // calls wait for a device that is about to be ready, and many are at a time
	probePause   = 20 * time.Millisecond // between two calls to a device
)

func newProber(targets []load.Target, devices int) *prober {
	return &prober{targets: targets, queue: make(chan *probe, devices)} // so that handing a probe over never blocks
}

// returned begins to call a device.
func (p *prober) returned(device string, link *pair) {
	via := (link.node + 1) % len(p.targets)
	for p.targets[via].Address == "" {
		via = (via + 1) % len(p.targets)
	}
	x := &probe{device: device, via: via, since: link.since}
	p.mu.Lock()
	p.all = append(p.all, x)
	p.open++
	p.mu.Unlock()
	p.queue <- x
}

// begin starts to call, until ctx ends or end is called.
func (p *prober) begin(ctx context.Context) {
	ctx, p.stop = context.WithCancel(ctx)
	for range probeWorkers {
		p.workers.Go(func() { p.work(ctx) })
	}
}

func (p *prober) work(ctx context.Context) {
	callers := make([]*load.Caller, len(p.targets))
	defer func() {
		for _, c := range callers {
			if c != nil {
				c.Close()
			}
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case x := <-p.queue:
			if callers[x.via] == nil {
				callers[x.via], _ = load.NewCaller(p.targets[x.via], time.Now().Add(2*killReturns)) // the next attempt tries again
			}
			if x.attempts == 0 {
				x.waited = time.Since(x.since)
			}
			ok := false
			if c := callers[x.via]; c != nil {
				var err error
				if ok, _, _, err = c.Try(x.device); err != nil {
					c.Close()
					callers[x.via] = nil
				}
			}
			p.note(x, ok)
			if !ok {
				time.AfterFunc(probePause, func() { p.queue <- x }) // there is room for every device
			}
		}
	}
}

func (p *prober) note(x *probe, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	x.took, x.ok = time.Since(x.since), ok
	x.attempts++
	if ok {
		p.open--
	}
}

// await waits until so many devices have returned and been called, or ctx ends.
func (p *prober) await(ctx context.Context, devices int) {
	for {
		p.mu.Lock()
		done := len(p.all) >= devices && p.open == 0
		p.mu.Unlock()
		if done || rest(ctx, probePause) != nil {
			return
		}
	}
}

// end stops calling and returns what became of the devices.
func (p *prober) end() []*probe {
	p.stop()
	p.workers.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range p.all {
		if !x.ok {
			x.took = time.Since(x.since)
		}
	}
	return p.all
}
