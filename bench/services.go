package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/bench/load"
	"fleetd/bench/services"
)

// natsCommand is the hidden command under which this program runs a NATS server for itself.
const natsCommand = "nats-server"

// servers are what this program is instead for itself.
var servers = map[string]func(dir string) error{natsCommand: func(dir string) error { return services.ServeNATS("fleetbench", dir, nil, nil) }}

// external is a NATS server outside the daemon.
type external struct {
	url  string
	pid  string // empty: not a process of this program
	stop func() error
}

// startNATS takes the server of FLEETD_TEST_NATS, else runs one in a process of its own.
func startNATS() (external, error) {
	if given := os.Getenv("FLEETD_TEST_NATS"); given != "" {
		return external{url: given, stop: func() error { return nil }}, nil
	}
	dir, err := os.MkdirTemp("", "fleetbench-nats")
	if err != nil {
		return external{}, err
	}
	c, err := load.StartChild("", nil, natsCommand, dir)
	if err != nil {
		return external{}, errors.Join(err, os.RemoveAll(dir))
	}
	return external{url: c.Address, pid: c.PID(), stop: func() error {
		c.Stop()
		return os.RemoveAll(dir)
	}}, nil
}

// removeStreams deletes what a node with this prefix left on the server.
func (x external) removeStreams(ctx context.Context, prefix string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	conn, err := nats.Connect(x.url)
	if err != nil {
		return fmt.Errorf("nats: %w", err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return fmt.Errorf("nats: %w", err)
	}
	mark := strings.ToUpper(strings.ReplaceAll(prefix, ".", "_"))
	var faults error
	names := js.StreamNames(ctx)
	for name := range names.Name() {
		if strings.Contains(name, mark) { // object stores are streams too, with a prefix of their own
			faults = errors.Join(faults, js.DeleteStream(ctx, name))
		}
	}
	return errors.Join(faults, names.Err())
}
