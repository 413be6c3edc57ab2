package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"fleetd/bench/services"
)

// variant is a way to run the daemon.
type variant struct {
	name, title string
	goal        float64 // of its main figure
	postgres    bool
	nats        bool // external
	settings    []string
}

// start runs the daemon as the variant specifies. stop removes everything it left.
func (b *bench) start(ctx context.Context, v variant) (d *daemon, stop func() error, err error) {
	nodes, stop, err := b.startNodes(ctx, v, nil)
	if err != nil {
		return nil, nil, err
	}
	return nodes[0], stop, nil
}

// startNodes runs a fleet of nodes as the variant specifies, each with settings of its own.
func (b *bench) startNodes(ctx context.Context, v variant, each ...[]string) (nodes []*daemon, stop func() error, err error) {
	prefix := "bench" + services.RandomName()
	shared := append([]string{"--nats-prefix", prefix}, v.settings...)
	if len(each) > 1 {
		shared = append(shared, "--secret", "the secret of one fleet "+prefix)
	}
	var steps []func() error
	stop = func() (err error) {
		for _, step := range slices.Backward(steps) {
			err = errors.Join(err, step())
		}
		return err
	}
	if v.postgres {
		database, drop, err := b.postgres.Create(ctx, "fleetd_bench_")
		if err != nil {
			return nil, nil, err
		}
		steps = append(steps, drop)
		shared = append(shared, "--database", database)
	}
	if v.nats {
		steps = append(steps, func() error { return b.nats.removeStreams(ctx, prefix) })
		shared = append(shared, "--nats", b.nats.url)
	}
	for _, own := range each {
		d, err := startDaemon(ctx, b.opt.program, slices.Concat(shared, own)...)
		if err != nil {
			return nil, nil, errors.Join(err, stop())
		}
		d.prefix = prefix
		nodes, steps = append(nodes, d), append(steps, d.stop)
	}
	return nodes, stop, nil
}

// awaitHeld waits until the nodes hold n devices together whose tools are listed, and until everything about them is
// written.
func awaitHeld(ctx context.Context, nodes []*daemon, n int, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	have := 0.0
	err := nodes[0].poll(ctx, 50*time.Millisecond, func() (bool, error) {
		have = 0
		for _, d := range nodes {
			m, err := d.metrics(ctx)
			if err != nil {
				return false, err
			}
			have += m.ready()
		}
		return have >= float64(n), nil
	})
	if err != nil {
		return fmt.Errorf("%.0f of %d devices became ready: %w", have, n, err)
	}
	for _, d := range nodes {
		err = errors.Join(err, d.awaitQuiet(ctx, limit))
	}
	return err
}

// freePort is a loopback address that nobody listens on now.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
