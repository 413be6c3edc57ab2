package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"fleetd/bench/load"
)

// loadCalls lets callers call devices over HTTP, each call as soon as the one before is answered.
func loadCalls(ctx context.Context, arguments []string, out io.Writer) error {
	o := newOptions("toolcall")
	server := o.choice("http", "HTTP server, Go's net/http", "net")
	codec := o.choice("json", "JSON of messages is put together from pieces that are checked, not decoded", "append")
	callers := o.Int("callers", 64, "concurrent callers")
	devices := o.Int("devices", 1000, "devices")
	duration := o.Duration("d", 5*time.Second, "measured time of one run")
	if err := o.positive(arguments, callers, devices); err != nil {
		return err
	}
	s, err := startServer(nil, "toolcall")
	if err != nil {
		return err
	}
	defer s.Stop()
	for i := range *devices {
		_, line, err := load.Attach(ctx, s.Address, i, nil)
		if err != nil {
			return err
		}
		go load.AnswerCalls(line)
	}
	target := load.AttachedTarget(s.Address)
	if _, err := load.CallLoad(ctx, target, *callers, *devices, *duration); err != nil { // warms up
		return err
	}
	var calls, half, tail, cpu, ownPerCall, mallocs series
	for range *o.runs {
		before, err := s.state()
		if err != nil {
			return err
		}
		own, begun := load.OwnCPU(), time.Now()
		latencies, err := load.CallLoad(ctx, target, *callers, *devices, *duration)
		if err != nil {
			return err
		}
		took, own := time.Since(begun), load.OwnCPU()-own
		after, err := s.state()
		if err != nil {
			return err
		}
		slices.Sort(latencies)
		n := float64(len(latencies))
		calls = append(calls, n/took.Seconds())
		half = append(half, load.Quantile(latencies, 0.5).Seconds()*1e6)
		tail = append(tail, load.Quantile(latencies, 0.99).Seconds()*1e6)
		cpu = append(cpu, (after.CPU-before.CPU).Seconds()*1e6/n)
		ownPerCall = append(ownPerCall, own.Seconds()*1e6/n)
		mallocs = append(mallocs, float64(after.Mallocs-before.Mallocs)/n)
	}
	_, err = fmt.Fprintf(out, "http=%s json=%s callers=%d: %s calls/s | p50 %s us | p99 %s us | server cpu %s us/call | client cpu %s us | allocs %s\n",
		*server, *codec, *callers, calls.text(0), half.text(0), tail.text(0), cpu.text(1), ownPerCall.text(1), mallocs.text(1))
	return err
}
