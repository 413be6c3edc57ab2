package main

import (
	"context"
	"fmt"
	"hash/maphash"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
)

const (
	progressEvery = 2 * time.Second
	// spareFiles is what the process needs beside one socket per device: standard streams, epoll, photo uploads.
	spareFiles = 64
	// maxLatencies bounds the memory of the hello percentiles.
	maxLatencies = 1 << 20
)

// fleet is all devices of one run and what they share.
type fleet struct {
	options *options
	dialer  *dialer
	logger  *slog.Logger
	voice   recording
	// hashSeed makes the hashes that echoes are recognised by.
	hashSeed maphash.Seed
	devices  []*device
	started  time.Time

	ctx  context.Context
	stop context.CancelFunc

	// enter guards wg: after stopping nothing may begin.
	enter    sync.Mutex
	stopping bool
	wg       sync.WaitGroup

	callsLeft  atomic.Int64
	callsTotal atomic.Int64

	mu        sync.Mutex
	states    map[lifeState]int
	latencies []uint32 // microseconds from dial, with MQTT from the hello's publish, to the server's hello
	connects  []uint32 // microseconds from the start of a device to its first CONNACK
	returns   []uint32 // microseconds from the loss of an MQTT session to the next CONNACK
}

// newFleet makes the devices; nothing runs before run.
func newFleet(o *options) (*fleet, error) {
	d, err := newDialer(o.caFile, o.insecure)
	if err != nil {
		return nil, err
	}
	voice, err := openRecording(voiceFile)
	if err != nil {
		return nil, err
	}
	f := &fleet{options: o, dialer: d, logger: slog.New(slog.DiscardHandler), voice: voice, hashSeed: maphash.MakeSeed(), started: time.Now(), states: make(map[lifeState]int)}
	f.ctx, f.stop = context.WithCancel(context.Background())
	f.callsLeft.Store(int64(o.maxCalls))
	for i := range o.devices {
		f.devices = append(f.devices, newDevice(f, i, i, false))
	}
	for i := range o.devices {
		if f.devices[i].faults.has(faultClone) {
			f.devices = append(f.devices, newDevice(f, len(f.devices), i, true))
		}
	}
	f.states[lifeBooting] = len(f.devices)
	return f, nil
}

// raiseFileLimit lifts the soft limit to the hard one and says when the fleet does not fit. sockets is how many a device
// holds at a time.
func raiseFileLimit(devices, sockets int) error {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return fmt.Errorf("file limit: %w", err)
	}
	if lim.Cur < lim.Max {
		lim.Cur = lim.Max
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
			return fmt.Errorf("raise the file limit: %w", err)
		}
	}
	if need := uint64(devices*sockets) + spareFiles; need > lim.Cur {
		return fmt.Errorf("%d devices need %d open files, the limit is %d: start at most %d, or raise it with ulimit -Hn",
			devices, need, lim.Cur, (lim.Cur-spareFiles)/uint64(sockets))
	}
	return nil
}

// run starts the devices at the ramp's pace and returns when ctx ends or the duration is over.
func (f *fleet) run(ctx context.Context, progress io.Writer) {
	if f.options.duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.options.duration)
		defer cancel()
	}
	f.started = time.Now()
	if progress != nil {
		f.spawn(func(context.Context) { f.report(ctx, progress) })
	}
	limit := rate.NewLimiter(rate.Limit(f.options.ramp), max(1, int(f.options.ramp/100)))
	for _, d := range f.devices {
		if limit.Wait(ctx) != nil {
			break
		}
		f.spawn(d.boot)
	}
	<-ctx.Done()
}

// close ends everything and waits for it.
func (f *fleet) close() {
	f.enter.Lock()
	f.stopping = true
	f.enter.Unlock()
	f.stop()
	for _, d := range f.devices {
		d.mu.Lock()
		drop := d.detachLocked()
		d.mu.Unlock()
		drop()
	}
	f.wg.Wait()
}

// spawn runs work in a goroutine that close waits for; after close it does nothing.
func (f *fleet) spawn(work func(context.Context)) {
	if !f.begin() {
		return
	}
	go func() {
		defer f.wg.Done()
		work(f.ctx)
	}()
}

func (f *fleet) begin() bool {
	f.enter.Lock()
	defer f.enter.Unlock()
	if f.stopping {
		return false
	}
	f.wg.Add(1)
	return true
}

// after runs work once, later, unless the run has ended by then.
func (f *fleet) after(delay time.Duration, work func()) *time.Timer {
	return time.AfterFunc(delay, func() {
		if f.begin() {
			defer f.wg.Done()
			work()
		}
	})
}

// scaled applies --time-scale to a pause of the firmware.
func (f *fleet) scaled(t time.Duration) time.Duration {
	return time.Duration(float64(t) * f.options.timeScale)
}

func (f *fleet) count(from, to lifeState) {
	f.mu.Lock()
	f.states[from]--
	f.states[to]++
	f.mu.Unlock()
}

// hello notes how long one device waited for the server's hello.
func (f *fleet) hello(t time.Duration) { f.keep(&f.latencies, t) }

// waited notes how long one device was without an MQTT session, again after it had one.
func (f *fleet) waited(again bool, t time.Duration) {
	if again {
		f.keep(&f.returns, t)
		return
	}
	f.keep(&f.connects, t)
}

func (f *fleet) keep(list *[]uint32, t time.Duration) {
	f.mu.Lock()
	if len(*list) < maxLatencies {
		*list = append(*list, uint32(min(t.Microseconds(), 1<<32-1)))
	}
	f.mu.Unlock()
}

// report writes a progress line whenever something has changed.
func (f *fleet) report(ctx context.Context, to io.Writer) {
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	last := ""
	for {
		line := f.progressLine()
		if line != last {
			_, _ = fmt.Fprintf(to, "%6.1fs %s\n", time.Since(f.started).Seconds(), line)
			last = line
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		case <-f.ctx.Done():
			return
		}
	}
}

func (f *fleet) progressLine() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	line := fmt.Sprintf("devices %d connected %d", len(f.devices), f.states[lifeConnected])
	for _, s := range []lifeState{lifeBooting, lifeConnecting, lifeIdle, lifeWaiting, lifeBootLoop, lifeHung, lifeCrashed, lifeNoEndpoint, lifeFailed} {
		if n := f.states[s]; n > 0 {
			line += fmt.Sprintf(" %s %d", s, n)
		}
	}
	return line + fmt.Sprintf(" calls %d", f.callsTotal.Load())
}
