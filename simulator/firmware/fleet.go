package firmware

import (
	"context"
	"fmt"
	"hash/maphash"
	"io"
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
	// maxLatencies bounds the memory of the hello Percentiles.
	maxLatencies = 1 << 20
)

// Fleet is the devices of one run and what they share.
type Fleet struct {
	options *Options
	dialer  *dialer
	voice   recording
	// hashSeed makes the hashes that echoes are recognised by.
	hashSeed maphash.Seed
	devices  []*Device
	started  time.Time

	ctx  context.Context
	stop context.CancelFunc

	// enter guards wg: after stopping nothing may begin.
	enter    sync.Mutex
	stopping bool
	wg       sync.WaitGroup

	callsLeft  atomic.Int64
	callsTotal atomic.Int64
	marked     atomic.Int64 // calls with a marker
	repeated   atomic.Int64 // of those, the ones whose device had executed the marker before

	mu        sync.Mutex
	states    map[State]int
	latencies []uint32 // microseconds from dial, with MQTT from the hello's publish, to the server's hello
	connects  []uint32 // microseconds from the start of a device to its first CONNACK
	returns   []uint32 // microseconds from the loss of an MQTT session to the next CONNACK
}

// New makes the devices; nothing runs before Run. It raises the soft limit of open files to the hard one, and fails if the
// fleet does not fit even so.
func New(o Options) (*Fleet, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	d, err := newDialer(o.CA, o.Insecure)
	if err != nil {
		return nil, err
	}
	voice, err := openRecording(voiceFile)
	if err != nil {
		return nil, err
	}
	f := &Fleet{options: &o, dialer: d, voice: voice, hashSeed: maphash.MakeSeed(), started: time.Now(), states: make(map[State]int)}
	f.ctx, f.stop = context.WithCancel(context.Background())
	f.callsLeft.Store(int64(o.MaxCalls))
	for i := range o.Devices {
		f.devices = append(f.devices, newDevice(f, i, i, false))
	}
	for i := range o.Devices {
		if f.devices[i].faults.has(faultClone) {
			f.devices = append(f.devices, newDevice(f, len(f.devices), i, true))
		}
	}
	f.states[StateBooting] = len(f.devices)
	if err := raiseFileLimit(len(f.devices), o.sockets()); err != nil {
		f.stop()
		return nil, err
	}
	return f, nil
}

// raiseFileLimit lifts the soft limit to the hard one and reports when the fleet does not fit. sockets is how many a device
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

// Run starts the devices at the ramp's pace and returns when ctx ends. The devices live on until Close. progress, if not
// nil, is given a line whenever something has changed.
func (f *Fleet) Run(ctx context.Context, progress io.Writer) {
	f.started = time.Now()
	if progress != nil {
		f.spawn(func(context.Context) { f.report(ctx, progress) })
	}
	limit := rate.NewLimiter(rate.Limit(f.options.Ramp), max(1, int(f.options.Ramp/100)))
	for _, d := range f.devices {
		if limit.Wait(ctx) != nil {
			break
		}
		f.spawn(d.boot)
		d.armAway()
	}
	<-ctx.Done()
}

// Close ends everything and waits for it. Take the report before: it shows the fleet as it is then.
func (f *Fleet) Close() {
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
func (f *Fleet) spawn(work func(context.Context)) {
	if !f.begin() {
		return
	}
	go func() {
		defer f.wg.Done()
		work(f.ctx)
	}()
}

func (f *Fleet) begin() bool {
	f.enter.Lock()
	defer f.enter.Unlock()
	if f.stopping {
		return false
	}
	f.wg.Add(1)
	return true
}

// after runs work once, later, unless the run has ended by then.
func (f *Fleet) after(delay time.Duration, work func()) *time.Timer {
	return time.AfterFunc(delay, func() {
		if f.begin() {
			defer f.wg.Done()
			work()
		}
	})
}

// scaled applies --time-scale to a pause of the firmware.
func (f *Fleet) scaled(t time.Duration) time.Duration {
	return time.Duration(float64(t) * f.options.TimeScale)
}

func (f *Fleet) count(from, to State) {
	f.mu.Lock()
	f.states[from]--
	f.states[to]++
	f.mu.Unlock()
}

// hello notes how long one device waited for the server's hello.
func (f *Fleet) hello(t time.Duration) { f.keep(&f.latencies, t) }

// waited notes how long one device was without an MQTT session, again after it had one.
func (f *Fleet) waited(again bool, t time.Duration) {
	if again {
		f.keep(&f.returns, t)
		return
	}
	f.keep(&f.connects, t)
}

func (f *Fleet) keep(list *[]uint32, t time.Duration) {
	f.mu.Lock()
	if len(*list) < maxLatencies {
		*list = append(*list, uint32(min(t.Microseconds(), 1<<32-1)))
	}
	f.mu.Unlock()
}

// report writes a progress line whenever something has changed.
func (f *Fleet) report(ctx context.Context, to io.Writer) {
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

func (f *Fleet) progressLine() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	line := fmt.Sprintf("devices %d connected %d", len(f.devices), f.states[StateConnected])
	for _, s := range []State{StateBooting, StateConnecting, StateIdle, StateWaiting, StateBootLoop, StateHung, StateCrashed, StateNoEndpoint, StateFailed, StateAway, StateUpgrading} {
		if n := f.states[s]; n > 0 {
			line += fmt.Sprintf(" %s %d", s, n)
		}
	}
	line += fmt.Sprintf(" calls %d", f.callsTotal.Load())
	if marked := f.marked.Load(); marked > 0 {
		line += fmt.Sprintf(" marked %d repeated %d", marked, f.repeated.Load())
	}
	return line
}
