package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/bench/load"
	"fleetd/internal/api"
	"fleetd/internal/webhooks"
	"fleetd/simulator/firmware"
)

const (
	webhookEach  = 10 // events per second that a device sends at most, half of what it may
	webhookFast  = 5  // how many times -webhook-rate the events come that are to wait
	webhookDelay = 20 * time.Millisecond
	webhookLimit = 5 * time.Minute
	pathAll      = "/all"
	pathNone     = "/none"
)

// Figures of webhooks.
const (
	figureHooksCPU  = "CPU of the node per event, µs; baseline: with the one webhook that takes all"
	figureHooksRate = "events/s delivered"
	figurePending   = "until all waiting events are delivered, s"
)

var webhookVariants = []variant{
	{name: "webhooks-sqlite", title: "SQLite", settings: []string{"--webhook-allow", "127.0.0.1"}},
	{name: "webhooks-postgres", title: "Postgres", settings: []string{"--webhook-allow", "127.0.0.1"}, postgres: true},
}

var webhookLines = []line{
	{name: figureHooksCPU, precision: 1, goal: &goal{ratioAtMost, 1.5}}, {name: figureHooksRate}, {name: figurePending, precision: 1, goal: &goal{atMost, 60}},
}

var eventBody = []byte(`{"type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/button_pressed","params":{"count":3}}}`)

// measureWebhooks measures what webhooks cost that select no device of an event, and how fast events are delivered that wait.
func (b *bench) measureWebhooks(ctx context.Context) error {
	for _, v := range webhookVariants {
		if v.postgres && b.postgres == nil {
			b.leaveOut(v.name + ": no Postgres")
			continue
		}
		m := measurement{Name: v.name, Title: fmt.Sprintf("%d webhooks at %d events per second, of which one takes all, on %s; and %d events that wait for a receiver that answers after %v",
			webhooks.MaxHooks, b.opt.webhookRate, v.title, b.opt.webhookEvents, webhookDelay), Baseline: "the same node with one webhook"}
		all, one := samples{}, samples{}
		if err := b.webhooksOn(ctx, v, all, one); err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		m.tabulate(all, one, webhookLines)
		b.add(m)
	}
	return nil
}

// webhooksOn measures with one database.
func (b *bench) webhooksOn(ctx context.Context, v variant, all, one samples) (err error) {
	n := (webhookFast*b.opt.webhookRate + webhookEach - 1) / webhookEach
	d, f, end, err := b.stage(ctx, v, overWebSocket, n, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	r, err := receive()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.server.Close()) }()
	h := &hooked{b: b, d: d, r: r, lines: make([]*firmware.Line, n)}
	if err := load.InParallel(dialers, n, func() (func(i int) error, func(), error) {
		return func(i int) error {
			c, line, err := f.connectDevice(ctx, i)
			if err != nil {
				return err
			}
			h.lines[i] = line
			return f.keep(c, line, true)
		}, func() {}, nil
	}); err != nil {
		return err
	}
	if err := awaitHeld(ctx, []*daemon{d}, n, b.opt.limitReady); err != nil {
		return err
	}
	if _, err := h.create(ctx, 1, pathAll, ""); err != nil {
		return err
	}
	for run := range b.opt.runs {
		both := samples{}
		if err := b.quietly(v.name, both, func(into samples) error { return h.run(ctx, v.name, run, into) }); err != nil {
			return fmt.Errorf("run %d: %w", run+1, err)
		}
		all.merge(one, both)
		b.progress(v.name, run, all, one, figureHooksCPU)
	}
	return nil
}

// hooked is a node with webhooks, and the devices whose events they deliver.
type hooked struct {
	b     *bench
	d     *daemon
	r     *receiver
	lines []*firmware.Line
}

// run measures the one webhook, and all of them, in an order that changes with the run; and then what waits.
func (h *hooked) run(ctx context.Context, name string, run int, into samples) error {
	others := 0.0
	for step := range 2 {
		var err error
		if (run+step)%2 == 0 {
			err = h.evenly(ctx, "", baselineMark, into, &others)
		} else {
			err = h.beside(ctx, h.b.profileFile(name, run), into, &others)
		}
		if err != nil {
			return err
		}
	}
	into.add(figureOthers, others)
	return h.pending(ctx, into)
}

// beside measures all webhooks.
func (h *hooked) beside(ctx context.Context, profile string, into samples, others *float64) error {
	ids, err := h.create(ctx, webhooks.MaxHooks-1, pathNone, "group=none")
	if err != nil {
		return err
	}
	if err := h.evenly(ctx, profile, "", into, others); err != nil {
		return err
	}
	for _, id := range ids {
		if err := h.d.send(ctx, http.MethodDelete, "/v1/webhooks/"+id, struct{}{}, nil); err != nil {
			return err
		}
	}
	return h.awaitWorkers(ctx, 1)
}

// create creates webhooks for the events of devices, and waits until all are delivered.
func (h *hooked) create(ctx context.Context, n int, path, sel string) (ids []string, err error) {
	for range n {
		var hook api.CreatedWebhook
		if err := h.d.send(ctx, http.MethodPost, "/v1/webhooks", api.NewWebhook{URL: h.r.url + path, Types: []string{"notifications"}, Select: sel}, &hook); err != nil {
			return nil, err
		}
		ids = append(ids, hook.ID)
	}
	if sel == "" {
		return ids, h.awaitWorkers(ctx, n)
	}
	return ids, h.awaitWorkers(ctx, n+1)
}

func (h *hooked) awaitWorkers(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	return h.d.poll(ctx, 20*time.Millisecond, func() (bool, error) {
		m, err := h.d.metrics(ctx)
		return m[seriesWebhooks] == float64(n), err
	})
}

// evenly measures the node while devices send events at the rate.
func (h *hooked) evenly(ctx context.Context, profile, mark string, into samples, others *float64) error {
	rate := h.b.opt.webhookRate
	n := max(1, int(h.b.opt.duration.Seconds()*float64(rate)))
	if err := h.sendEvenly(ctx, n/2); err != nil { // warms up
		return err
	}
	saved := h.d.profile(ctx, profile, max(1, int(h.b.opt.duration.Seconds())))
	meter, err := startMeter("", h.d.pid())
	if err != nil {
		return err
	}
	if err := h.sendEvenly(ctx, n); err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err := errors.Join(err, saved()); err != nil {
		return err
	}
	into.add(mark+figureHooksCPU, s.daemon.Seconds()*1e6/float64(n))
	into.add(mark+figureHooksRate, float64(n)/s.wall.Seconds())
	*others = max(*others, s.others*100)
	return nil
}

// sendEvenly has devices send n events at the rate, and waits until all are delivered.
func (h *hooked) sendEvenly(ctx context.Context, n int) error {
	h.r.all.Store(0)
	if err := h.send(ctx, n, h.b.opt.webhookRate); err != nil {
		return err
	}
	return h.awaitDelivered(ctx, n)
}

// send has devices send n events at a rate.
func (h *hooked) send(ctx context.Context, n, rate int) error {
	begun := time.Now()
	for i := range n {
		if err := rest(ctx, time.Until(dueAt(begun, i, rate))); err != nil {
			return err
		}
		if err := h.lines[i%len(h.lines)].Send(eventBody); err != nil {
			return err
		}
	}
	return nil
}

// pending measures how long events take that have waited for a receiver, which then takes its time for each.
func (h *hooked) pending(ctx context.Context, into samples) error {
	h.r.all.Store(0)
	h.r.away.Lock()
	err := errors.Join(h.send(ctx, h.b.opt.webhookEvents, webhookFast*h.b.opt.webhookRate), h.d.awaitQuiet(ctx, startLimit))
	h.r.delay.Store(int64(webhookDelay))
	defer h.r.delay.Store(0)
	h.r.away.Unlock()
	if err != nil {
		return err
	}
	begun := time.Now()
	err = h.awaitDelivered(ctx, h.b.opt.webhookEvents)
	into.add(figurePending, time.Since(begun).Seconds())
	return err
}

// awaitDelivered waits until the receiver has n events more.
func (h *hooked) awaitDelivered(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, webhookLimit)
	defer cancel()
	err := h.d.poll(ctx, 5*time.Millisecond, func() (bool, error) { return h.r.all.Load() >= int64(n), nil })
	if err != nil {
		m, without := h.d.metrics(context.WithoutCancel(ctx))
		return errors.Join(fmt.Errorf("%d of %d events were delivered, and %v dropped: %w", h.r.all.Load(), n, m[seriesDropped], err), without)
	}
	if got := h.r.none.Load(); got > 0 {
		return fmt.Errorf("%d events were delivered to webhooks that select no device", got)
	}
	return nil
}

// receiver takes deliveries.
type receiver struct {
	server *http.Server
	url    string
	away   sync.RWMutex // locked while it does not answer
	delay  atomic.Int64 // before an answer
	all    atomic.Int64 // deliveries of the webhook that takes all
	none   atomic.Int64 // and of the others
}

// receive starts a receiver.
func receive() (*receiver, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &receiver{url: "http://" + l.Addr().String()}
	r.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if _, err := io.Copy(io.Discard, request.Body); err != nil {
			return
		}
		r.away.RLock()
		time.Sleep(time.Duration(r.delay.Load()))
		r.away.RUnlock()
		w.WriteHeader(http.StatusNoContent)
		if request.URL.Path == pathAll {
			r.all.Add(1)
		} else {
			r.none.Add(1)
		}
	})}
	go func() { _ = r.server.Serve(l) }() // until Close
	return r, nil
}
