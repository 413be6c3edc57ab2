package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/simulator/firmware"
)

// Figures of audio over UDP. A packet counts if it was published.
const (
	figurePerCPU       = "packets per second of server CPU"
	figurePacketCPU    = "server CPU per packet, µs"
	figurePackets      = "packets/s handled"
	figureOffered      = "packets/s offered"
	figurePacketAllocs = "allocations per packet"
	figureUnpublished  = "accepted and not published, %"
	figureRejected     = "other verdicts, or lost in the socket, %"
	figureReceived     = "received by the subscriber, %"
	figureNATSCPU      = "CPU of the NATS server per packet, µs"
)

// Series of the daemon's metrics.
const (
	seriesAccepted    = `fleetd_udp_packets_total{verdict="accepted"}`
	seriesUnpublished = `fleetd_audio_dropped_total{reason="not_published"}`
	seriesAway        = `fleetd_events_dropped_total{reason="nats_away"}`
)

var udpWanted = []wanted{
	{figure: figurePacketCPU, before: "cpu ", after: " ns/packet", scale: 1e-3},
	{figure: figurePackets, before: "handled ", after: " pps"},
	{figure: figureOffered, before: "offered=", after: " |"},
	{figure: figurePacketAllocs, before: "allocs "},
}

// udpVariant is a variant with a goal, which is a ratio, and perhaps somebody who listens.
type udpVariant struct {
	variant
	ratio    float64
	received bool
}

func (v udpVariant) lines() []line {
	lines := []line{{name: figurePerCPU}, {name: figurePacketCPU, precision: 2}, {name: figurePackets}, {name: figureOffered},
		{name: figurePacketAllocs, precision: 1}, {name: figureUnpublished, precision: 2}, {name: figureRejected, precision: 2},
		{name: figureReceived, precision: 1}, {name: figureNATSCPU, precision: 2}}
	if v.ratio > 0 {
		lines[0].goal = &goal{ratioAtLeast, v.ratio}
	}
	return lines
}

// measureUDP measures what a packet of a device costs on its way to NATS, beside a program that does nothing but open
// and forward it.
func (b *bench) measureUDP(ctx context.Context) error {
	o := b.opt
	variants := []udpVariant{{variant: variant{name: "udp-embedded", title: "embedded NATS, no subscriber"}}}
	if !o.embedded {
		variants = append(variants,
			udpVariant{variant: variant{name: "udp-external", title: "external NATS, no subscriber", nats: true}, ratio: 0.6},
			udpVariant{variant: variant{name: "udp-received", title: "external NATS, one subscriber to all audio", nats: true}, received: true})
	}
	arguments := []string{"-io", "std", "-crypt", "manual", "-forward", "-sessions", strconv.Itoa(o.udpDevices), "-size", strconv.Itoa(audioPayload),
		"-pps", strconv.Itoa(o.udpRate), "-d", o.duration.String()}
	fleetd, baseline := make([]samples, len(variants)), samples{}
	for i := range fleetd {
		fleetd[i] = samples{}
	}
	for run := range o.runs {
		if err := b.quietly("udpaudio", baseline, func(into samples) error {
			err := b.baselines.measure(ctx, into, udpWanted, "udpaudio", arguments...)
			if err == nil {
				into.add(figurePerCPU, 1e6/into[figurePacketCPU][0])
			}
			return err
		}); err != nil {
			return err
		}
		for i, v := range variants {
			if err := b.quietly(v.name, fleetd[i], func(into samples) error { return b.udpRun(ctx, run, v, o.udpDevices, into) }); err != nil {
				return fmt.Errorf("%s, run %d: %w", v.name, run+1, err)
			}
			b.progress(v.name, run, fleetd[i], baseline, figurePerCPU)
		}
	}
	for i, v := range variants {
		m := measurement{Name: v.name, Title: fmt.Sprintf("UDP audio to NATS: %d devices, %s, %s", o.udpDevices, rateText(o.udpRate), v.title)}
		m.Baseline = commandLine("udpaudio", arguments)
		m.tabulate(fleetd[i], baseline, v.lines())
		b.add(m)
	}
	return nil
}

func rateText(rate int) string {
	if rate == 0 {
		return "as many packets as go"
	}
	return fmt.Sprintf("%d packets/s", rate)
}

// measureUDPScale compares many devices with few.
func (b *bench) measureUDPScale(ctx context.Context) error {
	o := b.opt
	few, many := o.udpLow, o.udpHigh
	v := udpVariant{variant: variant{name: "udp-scale", nats: !o.embedded}, ratio: 0.9}
	m := measurement{Name: v.name, Title: fmt.Sprintf("UDP audio of %d devices beside %d, %s", many, few, rateText(o.udpRate)),
		Baseline: fmt.Sprintf("fleetd with %d devices", few)}
	sides := map[int]samples{few: {}, many: {}}
	for run := range o.runs {
		order := []int{few, many}
		if run%2 == 1 {
			slices.Reverse(order)
		}
		for _, n := range order {
			v := v
			v.name += "-" + strconv.Itoa(n) // of its profile
			if err := b.quietly(v.name, sides[n], func(into samples) error { return b.udpRun(ctx, run, v, n, into) }); err != nil {
				return fmt.Errorf("%s, run %d: %w", v.name, run+1, err)
			}
		}
		b.progress(v.name, run, sides[many], sides[few], figurePerCPU)
	}
	m.tabulate(sides[many], sides[few], v.lines())
	b.add(m)
	return nil
}

// drained is how long packets under way take to be published.
const drained = 200 * time.Millisecond

// afterSpeech are the metrics once the daemon accepts no packet any more: on a busy machine those under way take longer.
func (d *daemon) afterSpeech(ctx context.Context) (metrics, error) {
	for last := -1.0; ; {
		if err := rest(ctx, drained); err != nil {
			return nil, err
		}
		m, err := d.metrics(ctx)
		if err != nil || m[seriesAccepted] == last {
			return m, err
		}
		last = m[seriesAccepted]
	}
}

func (b *bench) udpRun(ctx context.Context, run int, v udpVariant, devices int, into samples) (err error) {
	d, f, end, err := b.stage(ctx, v.variant, overMQTT, devices, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	f.channels = make([]*firmware.Audio, devices)
	if err := f.bring(ctx, d, 0, devices); err != nil {
		return err
	}
	var received *atomic.Int64
	if v.received {
		counter, end, err := b.listen(d.prefix)
		if err != nil {
			return err
		}
		defer end()
		received = counter
	}
	s, err := newSpeaker(f.channels)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if _, err := s.speak(ctx, b.opt.udpRate, b.opt.duration); err != nil { // warms up, and proves addresses
		return err
	}
	return b.udpMeasure(ctx, run, v, d, s, received, into)
}

// udpMeasure measures while the devices speak.
func (b *bench) udpMeasure(ctx context.Context, run int, v udpVariant, d *daemon, s *speaker, received *atomic.Int64, into samples) error {
	before, err := d.afterSpeech(ctx)
	if err != nil {
		return err
	}
	server := ""
	if v.nats {
		server = b.nats.pid
	}
	receivedBefore := int64(0)
	if received != nil {
		receivedBefore = received.Load()
	}
	saved := d.profile(ctx, b.profileFile(v.name, run), max(1, int(b.opt.duration.Seconds())))
	m, err := startMeter(server, d.pid())
	if err != nil {
		return err
	}
	begun := time.Now()
	sent, err := s.speak(ctx, b.opt.udpRate, b.opt.duration)
	took := time.Since(begun).Seconds()
	if err != nil {
		return err
	}
	after, err := d.afterSpeech(ctx)
	if err != nil {
		return err
	}
	used, err := m.stop(runtime.NumCPU())
	if err := errors.Join(err, saved()); err != nil {
		return err
	}
	grown := func(series string) float64 { return after[series] - before[series] }
	accepted := grown(seriesAccepted)
	n := accepted - grown(seriesUnpublished) - grown(seriesAway)
	if n <= 0 {
		return fmt.Errorf("no packet of %d was published; %.0f were accepted", sent, accepted)
	}
	into.add(figurePerCPU, perCPU(n, used.daemon))
	into.add(figurePacketCPU, used.daemon.Seconds()*1e6/n)
	into.add(figurePackets, n/took)
	into.add(figureOffered, float64(sent)/took)
	into.add(figurePacketAllocs, grown(seriesMallocs)/n)
	into.add(figureUnpublished, (accepted-n)/accepted*100)
	into.add(figureRejected, (1-accepted/float64(sent))*100)
	if server != "" {
		into.add(figureNATSCPU, used.nats.Seconds()*1e6/n)
	}
	if received != nil {
		into.add(figureReceived, float64(received.Load()-receivedBefore)/n*100)
	}
	into.add(figureOthers, used.others*100)
	return nil
}

// listen subscribes to the audio of every device at the external server.
func (b *bench) listen(prefix string) (received *atomic.Int64, end func(), err error) {
	conn, err := nats.Connect(b.nats.url)
	if err != nil {
		return nil, nil, fmt.Errorf("nats: %w", err)
	}
	received = &atomic.Int64{}
	subscription, err := conn.Subscribe(prefix+".devices.*.audio", func(*nats.Msg) { received.Add(1) })
	if err == nil {
		err = errors.Join(subscription.SetPendingLimits(-1, -1), conn.Flush())
	}
	if err != nil {
		conn.Close()
		return nil, nil, fmt.Errorf("nats: %w", err)
	}
	return received, conn.Close, nil
}
