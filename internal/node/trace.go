package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/trace"
)

// traceFlush is how long a subscription may take to be in force.
const traceFlush = 2 * time.Second

// maxUnreadTrace is how many bytes of entries wait for one reader; more are left out.
const maxUnreadTrace = 1 << 20

// startTracer starts the traces of devices, whose entries are published on `<prefix>.trace.<device>`.
func (n *node) startTracer() {
	subject := func(id devices.ID) string { return n.cfg.NATSPrefix + ".trace." + id.Token() }
	n.tracer = trace.New(trace.Options{Node: n.cfg.Node, Gather: n.cluster.Gather, Nodes: n.nodeNames, Log: n.log,
		Publish: func(id devices.ID, entry []byte) error {
			if !n.bus.up.Load() { // or the library keeps it for the next connection
				return nats.ErrDisconnected
			}
			return n.bus.conn.Publish(subject(id), entry)
		},
		Subscribe: func(id devices.ID, deliver func([]byte)) (stop func(), err error) {
			if !n.bus.up.Load() {
				return nil, nats.ErrDisconnected
			}
			entries, err := n.bus.conn.SubscribeSync(subject(id))
			if err != nil {
				return nil, err
			}
			if err := errors.Join(entries.SetPendingLimits(-1, maxUnreadTrace), n.bus.conn.FlushTimeout(traceFlush)); err != nil {
				return nil, errors.Join(err, entries.Unsubscribe())
			}
			ctx, cancel := context.WithCancel(context.Background())
			var reading sync.WaitGroup
			reading.Go(func() {
				for {
					msg, err := entries.NextMsgWithContext(ctx)
					switch {
					case err == nil:
						deliver(msg.Data)
					case !errors.Is(err, nats.ErrSlowConsumer): // some were left out, which the numbers of entries show
						return
					}
				}
			})
			return func() {
				cancel()
				reading.Wait()
				_ = entries.Unsubscribe() // fails only with the connection
			}, nil
		}})
	n.cluster.OnGather(trace.Question, n.tracer.Answer)
	n.onStop(n.tracer.Close)
}

// nodeNames returns the names of the live nodes, this one included.
func (n *node) nodeNames() (names []string) {
	for _, other := range n.nodes() {
		names = append(names, other.Name)
	}
	return names
}
