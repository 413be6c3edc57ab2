package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"fleetd/bench/load"
	"fleetd/simulator/firmware"
)

// loadStorm measures how fast devices get from dial to a stored tool list: upgrade, hello, initialize and three pages.
func loadStorm(ctx context.Context, arguments []string, out io.Writer) error {
	o := newOptions("storm")
	n := o.Int("n", 15_000, "devices")
	workers := o.Int("c", 64, "devices that connect at the same time")
	parse := o.choice("parse", "pages are decoded if their hash is new", "hash")
	store := o.choice("store", "lists are kept", storeMemory, storePostgres)
	dsn := o.String("dsn", "", "database of -store "+storePostgres+"; its tables of that name are replaced")
	if err := o.positive(arguments, n, workers); err != nil {
		return err
	}
	if *store == storePostgres && *dsn == "" {
		return errors.New("-store " + storePostgres + " needs -dsn")
	}
	lists, err := load.ToolLists(false)
	if err != nil {
		return err
	}
	var rate, tail, cpu, ownPerDevice series
	for range *o.runs {
		r, err := stormRun(ctx, lists, *n, *workers, *store, *dsn)
		if err != nil {
			return err
		}
		devices := float64(*n)
		rate = append(rate, devices/r.took.Seconds())
		tail = append(tail, load.Quantile(r.latencies, 0.99).Seconds()*1e3)
		cpu = append(cpu, r.cpu.Seconds()*1e6/devices)
		ownPerDevice = append(ownPerDevice, r.own.Seconds()*1e6/devices)
	}
	_, err = fmt.Fprintf(out, "parse=%s store=%s n=%d c=%d: %s devices/s | p99 %s ms | server cpu %s us/device | client cpu %s us\n",
		*parse, *store, *n, *workers, rate.text(0), tail.text(1), cpu.text(0), ownPerDevice.text(0))
	return err
}

// stormed is what one run took.
type stormed struct {
	took, cpu, own time.Duration
	latencies      []time.Duration // in order
}

// progress is what the server reports of its devices.
type progress struct {
	Ready int
	Error string // the first of a device
}

func stormRun(ctx context.Context, lists [][]string, n, workers int, store, dsn string) (r stormed, err error) {
	s, err := startServer(nil, "storm", store, dsn)
	if err != nil {
		return r, err
	}
	defer s.Stop()
	before, err := s.collected()
	if err != nil {
		return r, err
	}
	own, begun := load.OwnCPU(), time.Now()
	conns, latencies, err := connectStorm(ctx, s.Address, lists, n, workers)
	defer func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close() // it was measured
			}
		}
	}()
	if err != nil {
		return r, err
	}
	for p := (progress{}); p.Ready < n; time.Sleep(time.Millisecond) {
		if err := s.Ask("progress", &p); err != nil {
			return r, err
		}
		if p.Error != "" {
			return r, errors.New(p.Error)
		}
	}
	r = stormed{took: time.Since(begun), own: load.OwnCPU() - own, latencies: latencies}
	after, err := s.state()
	r.cpu = after.CPU - before.CPU
	slices.Sort(r.latencies)
	return r, err
}

func connectStorm(ctx context.Context, address string, lists [][]string, n, workers int) ([]net.Conn, []time.Duration, error) {
	conns, latencies := make([]net.Conn, n), make([]time.Duration, n)
	err := load.InParallel(workers, n, func() (func(i int) error, func(), error) {
		return func(i int) (err error) {
			begun := time.Now()
			var line *firmware.Line
			if conns[i], line, err = load.Attach(ctx, address, i, nil); err != nil {
				return err
			}
			if err := line.Send(load.Hello(attached)); err != nil {
				return err
			}
			err = load.ListTools(line, "2.0.3", lists[i%len(lists)])
			latencies[i] = time.Since(begun)
			return err
		}, func() {}, nil
	})
	return conns, latencies, err
}
