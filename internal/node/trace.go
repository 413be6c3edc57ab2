package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/trace"
)

// traceFlush is how long the NATS server may take to confirm a subscription.
const traceFlush = 2 * time.Second

// maxUnreadTrace limits the entries, of some 2 KiB at most, that wait for one reader; further ones are dropped.
const maxUnreadTrace = 512

// startTracer starts the tracer, which publishes the entries of a trace on `<prefix>.trace.<device>`.
func (n *node) startTracer() {
	subject := func(id devices.ID) string { return n.cfg.NATSPrefix + ".trace." + id.Token() }
	// The devices of the readers on this node, by channel. The bus does not return to a node what it publishes (NoEcho), so
	// entries of devices that are connected to this node are passed to them directly.
	var readers sync.Map
	n.tracer = trace.New(trace.Options{Node: n.cfg.Node, Gather: n.cluster.Gather, Nodes: n.nodeNames, Log: n.log,
		Holder: func(key string) access.Holder { return n.service.Keys().Holder(key, clock.Now()) },
		Publish: func(id devices.ID, entry []byte) error {
			if !n.bus.up.Load() { // the library would keep the entry until it is connected again
				return nats.ErrDisconnected
			}
			for unread, device := range readers.Range {
				if device == id {
					select {
					case unread.(chan *nats.Msg) <- &nats.Msg{Data: entry}:
					default: // dropped, as NATS does for a slow reader
					}
				}
			}
			return n.bus.conn.Publish(subject(id), entry)
		},
		Subscribe: func(id devices.ID, deliver func([]byte)) (stop func(), err error) {
			if !n.bus.up.Load() {
				return nil, nats.ErrDisconnected
			}
			unread := make(chan *nats.Msg, maxUnreadTrace)
			entries, err := n.bus.conn.ChanSubscribe(subject(id), unread)
			if err != nil {
				return nil, err
			}
			if err := n.bus.conn.FlushTimeout(traceFlush); err != nil {
				return nil, errors.Join(err, entries.Unsubscribe())
			}
			readers.Store(unread, id)
			ctx, cancel := context.WithCancel(context.Background())
			var reading sync.WaitGroup
			reading.Go(func() {
				for {
					select {
					case msg := <-unread:
						deliver(msg.Data)
					case <-ctx.Done():
						return
					}
				}
			})
			return func() {
				readers.Delete(unread)
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
