package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"time"

	"fleetd/bench/load"
	"fleetd/simulator/firmware"
)

// loadMQTT measures what idle MQTT devices cost, or calls to devices.
func loadMQTT(ctx context.Context, arguments []string, out io.Writer) error {
	o := newOptions("mqttbench")
	broker := o.choice("broker", "a listener that answers the packets, one goroutine for a device and no tree of topics", "mini")
	idle := o.Int("idle", 0, "measure the memory of so many idle devices; 0: measure calls")
	devices := o.Int("devices", 1000, "devices that are called")
	callers := o.Int("callers", 64, "calls at the same time")
	duration := o.Duration("d", 3*time.Second, "measured time of one run of calls")
	if err := o.positive(arguments, devices, callers); err != nil {
		return err
	}
	if *idle == 0 {
		return mqttCalls(ctx, out, *broker, *devices, *callers, *o.runs, *duration)
	}
	var asIs, collected series
	for range *o.runs {
		perDevice, err := idleRun(*idle, func() (server, error) { return startServer(nil, "mqttbench") },
			func(address string) ([]net.Conn, error) { return connectMQTT(ctx, address, *idle, false) })
		if err != nil {
			return err
		}
		asIs, collected = append(asIs, perDevice[0]), append(collected, perDevice[1])
	}
	_, err := fmt.Fprintf(out, "broker=%s idle=%d: RSS/device as-is %s B | after GC %s B\n", *broker, *idle, asIs.text(0), collected.text(0))
	return err
}

// mqttCalls measures calls that begin in the server: it publishes to a device and waits for the answer.
func mqttCalls(ctx context.Context, out io.Writer, broker string, devices, callers, runs int, duration time.Duration) error {
	s, err := startServer(nil, "mqttbench")
	if err != nil {
		return err
	}
	defer s.Stop()
	if _, err := connectMQTT(ctx, s.Address, devices, true); err != nil {
		return err
	}
	var calls, half, tail, cpu series
	for i := range runs + 1 {
		before, err := s.state()
		if err != nil {
			return err
		}
		var r mqttCalled
		if err := s.Ask(fmt.Sprintf("call %d %d %d", callers, devices, duration), &r); err != nil {
			return err
		}
		after, err := s.state()
		if err != nil {
			return err
		}
		if r.Error != "" {
			return errors.New(r.Error)
		}
		if i == 0 { // warms up
			continue
		}
		slices.Sort(r.Latencies)
		n := float64(len(r.Latencies))
		calls = append(calls, n/r.Took.Seconds())
		half = append(half, load.Quantile(r.Latencies, 0.5).Seconds()*1e6)
		tail = append(tail, load.Quantile(r.Latencies, 0.99).Seconds()*1e6)
		cpu = append(cpu, (after.CPU-before.CPU).Seconds()*1e6/n)
	}
	_, err = fmt.Fprintf(out, "broker=%s callers=%d: %s calls/s | p50 %s us | p99 %s us | server cpu %s us/call\n",
		broker, callers, calls.text(0), half.text(0), tail.text(0), cpu.text(1))
	return err
}

// Topics of a device: these and its number.
const (
	topicDown = "down/"
	topicUp   = "up/"
)

// connectMQTT connects devices that subscribe to their topic; with calls they answer every request.
func connectMQTT(ctx context.Context, address string, n int, calls bool) ([]net.Conn, error) {
	conns := make([]net.Conn, n)
	return conns, load.InParallel(idleDialers, n, func() (func(i int) error, func(), error) {
		return func(i int) (err error) {
			if conns[i], err = load.Dial(ctx, address, i); err != nil {
				return err
			}
			device := strconv.Itoa(i)
			line, err := firmware.Login{Endpoint: address, ClientID: device, Keepalive: 240, PublishTopic: topicUp + device, SubscribeTopic: topicDown + device}.Open(ctx, conns[i])
			if err != nil {
				return fmt.Errorf("device %d: %w", i, err)
			}
			if calls {
				go load.AnswerCalls(line)
			}
			return conns[i].SetDeadline(time.Time{})
		}, func() {}, nil
	})
}
