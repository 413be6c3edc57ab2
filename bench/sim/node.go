package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/audit"
	"fleetd/internal/cluster"
	"fleetd/internal/cluster/lease"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/events"
	"fleetd/internal/fleet"
	"fleetd/internal/store"
	"fleetd/internal/store/ledger"
)

// The settings of a node, as internal/node has them.
const (
	openAtMost    = time.Minute
	maxHandshakes = 256
	maxReconnects = 20
	prefix        = "fleetd.v1"
	eventLimit    = 1 << 30
	retention     = 24 * time.Hour
)

// node is one node of real parts, wired as internal/node does, without listeners, front ends and photos.
type node struct {
	name    string
	conn    *nats.Conn
	up      atomic.Bool
	store   *store.Store
	ledger  *ledger.Ledger
	events  *events.Bus
	link    *cluster.Link
	service *fleet.Service
	devices *responder
	log     *slog.Logger

	claims    atomic.Int64 // sent for connections
	reasserts atomic.Int64 // sent once a minute for each device
	cuts      atomic.Int64 // of the connection to NATS

	leases *lease.Nodes
	stop   context.CancelFunc
	tasks  sync.WaitGroup
	killed atomic.Bool
	ended  sync.Once
}

// directory counts the claims that the core sends.
type directory struct {
	*cluster.Link
	node *node
}

// Claim counts a claim, and sends it. Devices of a node that was killed are claimed no more.
func (d directory) Claim(c devices.Claim) {
	if d.node.killed.Load() {
		return
	}
	d.node.claims.Add(1)
	d.Link.Claim(c)
}

// Remind counts a reminder, and sends it.
func (d directory) Remind(c devices.Claim) {
	if d.node.killed.Load() {
		return
	}
	d.node.reasserts.Add(1)
	d.Link.Remind(c)
}

// noVision offers no photos.
type noVision struct{}

// Grant offers no uploads.
func (noVision) Grant(devices.ID, time.Time) (url, token string, expires time.Time) {
	return "", "", time.Time{}
}

// Snapshot offers no uploads.
func (noVision) Snapshot(devices.ID, time.Time) (url, photo string) { return "", "" }

// noAudit keeps no entries.
type noAudit struct{}

// Record drops an entry.
func (noAudit) Record(audit.Entry) {}

// startNode starts a node. dir is a directory of its own.
func startNode(ctx context.Context, name, natsURL, database, dir string, o options, mint *credential.Mint, to *responder, log *slog.Logger) (started *node, err error) {
	n := &node{name: name, devices: to, log: log.With("node", name)}
	defer func() {
		if err != nil {
			n.close()
		}
	}()
	back := make(chan struct{}, 1)
	if n.conn, err = nats.Connect(natsURL, nats.Name("fleetd "+name), nats.NoEcho(), nats.MaxReconnects(-1), nats.ReconnectWait(500*time.Millisecond), nats.ReconnectBufSize(-1),
		nats.PingInterval(natsPings), nats.MaxPingsOutstanding(2), nats.FlusherTimeout(natsPings), nats.Timeout(3*time.Second),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { n.log.Warn("NATS", "error", err) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			n.up.Store(false)
			if err != nil {
				n.cuts.Add(1)
				n.log.Warn("NATS connection lost", "error", err)
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) {
			n.up.Store(true)
			select {
			case back <- struct{}{}:
			default:
			}
		})); err != nil {
		return nil, err
	}
	n.up.Store(true)
	if n.events, err = events.New(events.Options{Conn: n.conn, Prefix: prefix, Node: name, Retention: retention, Limit: eventLimit, NotificationLimit: eventLimit, Replicas: o.servers, Log: n.log}); err != nil {
		return nil, err
	}
	n.events.Open(devices.Alone) // all nodes have the same limits
	if n.store, err = store.Open(ctx, database, dir, n.log, store.OnStaleWrite(func(p devices.Presence) { n.service.OnStaleWrite(p) })); err != nil {
		return nil, err
	}
	usable, cancel := context.WithTimeout(ctx, openAtMost)
	defer cancel()
	if err := n.store.WaitReady(usable); err != nil {
		return nil, err
	}
	n.ledger = ledger.New(n.store, n.log)
	n.link = cluster.New(cluster.Options{Conn: n.conn, Prefix: prefix, Mint: mint, Node: name, IsConnected: n.up.Load, Log: n.log})
	others := n.link.Peers()
	n.leases = lease.New(lease.Options{Node: name, Version: "simulated", Started: time.Now().UTC(), Lifetime: o.lease, Database: n.store, Devices: n.held, API: func() string { return "" },
		Refresh: n.refresh, IsConnected: n.up.Load, Log: n.log})
	n.service = fleet.New(fleet.Config{Node: name, Version: "simulated", CallsPerDevice: 1, Handshakes: maxHandshakes, Reconnects: maxReconnects, IsNodeAlive: n.leases.Has,
		Offer: devices.TransportWebSocket, Dir: dir, Fleet: mint.Fingerprint(), RosterKey: mint.RosterKey()},
		fleet.Ports{Records: n.store, Catalogs: n.store, Ledger: n.ledger, Changes: n.ledger, Publisher: n.events, Directory: directory{n.link, n},
			Router: n.link, Vision: noVision{}, Audio: n.events, Audit: noAudit{}, Peers: others, Log: n.log})
	if err := n.link.Attach(n.service); err != nil {
		return nil, err
	}
	if err := others.Follow(n.service.Registry()); err != nil {
		return nil, err
	}
	if err := n.service.Registry().Start(ctx); err != nil {
		return nil, err
	}
	var running context.Context
	running, n.stop = context.WithCancel(context.WithoutCancel(ctx))
	n.tasks.Go(func() { n.leases.Run(running, n.service) })
	n.tasks.Go(func() { n.reassert(running, back) })
	for !n.leases.IsLeased() { // the others see it before its first device comes
		select {
		case <-usable.Done():
			return nil, fmt.Errorf("node %s has no lease after %v: %w", name, openAtMost, usable.Err())
		case <-time.After(settleEvery):
		}
	}
	return n, nil
}

// reassert repeats what a lost connection left out.
func (n *node) reassert(ctx context.Context, back <-chan struct{}) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-back:
			n.link.Reconnected()
			n.service.Reassert()
		}
	}
}

func (n *node) refresh(ctx context.Context) {
	if err := n.service.Registry().Refresh(ctx); err != nil {
		n.log.Warn("cannot read registry changes", "error", err)
	}
}

// held is how many devices are connected to the node, ready how many of them have their tools read.
func (n *node) held() (all int) {
	n.service.Stats().States.Each(func(_ session.State, count int64) { all += int(count) })
	return all
}

func (n *node) ready() int {
	return int(n.service.Stats().States.Get(session.State{Transport: devices.TransportWebSocket, MCP: devices.MCPReady}))
}

// waiting is how many rows and events are not written yet.
func (n *node) waiting() int64 {
	s := n.store.Stats()
	return s.PresenceWaiting.Load() + s.DevicesWaiting.Load() + s.HistoryWaiting.Load() + int64(n.events.Depth())
}

// accept connects a device to the node.
func (n *node) accept(d *device, firmware int) error {
	c := &conn{to: n.devices, begun: time.Now().UnixNano(), firmware: uint8(firmware)}
	generation, _ := n.service.Generation(d.id)
	session, err := n.service.Accept(devices.Identity{Device: d.id, ClientID: clientID(d.id), Transport: devices.TransportWebSocket, Verified: true, Generation: generation}, c)
	if err != nil {
		return fmt.Errorf("device %s is not accepted by %s: %w", d.id, n.name, err)
	}
	c.session.Store(session)
	d.conn = c
	session.StartMCP(devices.FeaturesMCP)
	return nil
}

// clientID is a UUID, as the firmware makes one.
func clientID(id devices.ID) string {
	return "00000000-0000-4000-8000-" + strings.ReplaceAll(string(id), ":", "")
}

// kill ends the node as a crash does: its connections end, and nothing of what it had not written leaves it. What it
// holds in memory stays until close, so that the work of letting it go is not measured.
func (n *node) kill() {
	if n.killed.Swap(true) {
		return
	}
	n.up.Store(false)
	n.conn.Close()
	now, cancel := context.WithCancel(context.Background())
	cancel()
	_ = n.store.Close(now) // the error is how many rows were lost
	if n.stop != nil {
		n.stop()
	}
}

// close ends what was started. Its lease stays: the database is dropped, or the others have to find out.
func (n *node) close() {
	n.ended.Do(func() {
		if n.stop != nil {
			n.stop()
			n.tasks.Wait()
		}
		if n.service != nil {
			n.service.Close()
			n.link.Close()
			n.ledger.Close()
		}
		if n.store != nil {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_ = n.store.Close(ctx)
		}
		if n.events != nil {
			n.events.Close()
		}
		if n.conn != nil {
			n.conn.Close()
		}
	})
}
