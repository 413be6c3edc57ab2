package fleettest

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/clock"
	"fleetd/internal/durable"
	"fleetd/internal/natstest"
	"fleetd/internal/store/storetest"
)

// Cluster is a fleet of nodes over one database and one NATS server, reached
// by devices through one address. Every way between the parts is a wire.
type Cluster struct {
	Nodes []*Node
	OTA   string
	DB    storetest.Database
	// NATS and SQL lead from each node to its only server; HTTP and MQTT from
	// the devices to any node, by its number.
	NATS, SQL  []*Wire
	HTTP, MQTT *Wire

	// StepDatabase sets by how much the clock of the database is wrong.
	StepDatabase func(by time.Duration)

	bus *server.Server
}

// ClusterOptions change how a cluster is started.
type ClusterOptions struct {
	Nodes int      // 0: three
	Seed  uint64   // of which device goes where
	Args  []string // for every node
	// Clocks are how far the clocks of the nodes are off.
	Clocks []time.Duration
	Env    []string // for every node
	// Stepped has clocks that StepClock and StepDatabase set.
	Stepped bool
}

// StartCluster runs the nodes until the test ends.
func (p Programs) StartCluster(t testing.TB, o ClusterOptions) *Cluster {
	t.Helper()
	if o.Nodes == 0 {
		o.Nodes = 3
	}
	bus := natsServerOfItsOwn(t)
	c := &Cluster{DB: storetest.Postgres(t), bus: bus}
	if o.Stepped {
		c.DB, c.StepDatabase = c.DB.Stepped(t)
	}
	var http, mqtt []string
	for range o.Nodes {
		http, mqtt = append(http, freePort(t)), append(mqtt, freePort(t))
		c.NATS = append(c.NATS, NewWire(t, o.Seed, bus.Addr().String()))
		c.SQL = append(c.SQL, NewWire(t, o.Seed, c.DB.Address(t)))
	}
	c.HTTP, c.MQTT = NewWire(t, o.Seed, http...), NewWire(t, o.Seed+1, mqtt...)
	c.OTA = "http://" + c.HTTP.Address() + "/xiaozhi/ota/"
	c.Nodes = make([]*Node, o.Nodes)
	t.Cleanup(func() {
		c.Mend()
		var stopping sync.WaitGroup
		for _, n := range c.Nodes {
			if n != nil {
				stopping.Go(func() { n.Stop(t) })
			}
		}
		stopping.Wait()
	})
	for i := range c.Nodes {
		n := &Node{Dir: t.TempDir(), programs: p, args: append([]string{"--node", fmt.Sprintf("node-%d", i), "--secret", "one fleet, one secret",
			"--database", c.DB.Via(t, c.SQL[i].Address()), "--nats", "nats://" + c.NATS[i].Address(), "--event-limit", "64MiB", "--notification-limit", "64MiB", "--photo-limit", "64MiB",
			"--device-listen", http[i], "--mqtt-listen", mqtt[i], "--public-device-url", "http://" + c.HTTP.Address(), "--public-mqtt", c.MQTT.Address(),
			"--log-level", "info"}, o.Args...)}
		n.env = slices.Clone(o.Env)
		if o.Clocks != nil {
			n.env = append(n.env, clock.StepVariable+"="+o.Clocks[i].String())
		}
		if o.Stepped {
			n.env = append(n.env, clock.FileVariable+"="+n.clockFile())
		}
		c.Nodes[i] = n
		n.Run(t)
	}
	return c
}

func (n *Node) clockFile() string { return filepath.Join(n.Dir, "clock") }

// StepClock sets by how much the clock of the node is wrong.
func (n *Node) StepClock(t testing.TB, by time.Duration) {
	t.Helper()
	if err := durable.WriteFile(n.clockFile(), []byte(by.String())); err != nil {
		t.Fatal(err)
	}
}

// natsServerOfItsOwn runs a NATS server in this process that notices a silent
// client as quickly as docs/data.md requires.
func natsServerOfItsOwn(t testing.TB) *server.Server {
	t.Helper()
	return natstest.Start(t, server.Options{JetStream: true, StoreDir: t.TempDir(), JetStreamMaxStore: 64 << 30, PingInterval: scaled(2 * time.Second), MaxPingsOut: 2})
}

// BreakSQL breaks, or restores, the way of every node to the database.
func (c *Cluster) BreakSQL(fault Fault) {
	for _, w := range c.SQL {
		w.Break(0, fault)
	}
}

// Mend repairs every wire.
func (c *Cluster) Mend() {
	for i := range c.Nodes {
		c.NATS[i].Break(0, None)
		c.SQL[i].Break(0, None)
		c.HTTP.Break(i, None)
		c.MQTT.Break(i, None)
	}
}

// Held is how many sessions the nodes have, ready or not.
func (c *Cluster) Held(t testing.TB) (held int) {
	t.Helper()
	for _, n := range c.Nodes {
		held += int(n.Metric(t, "fleetd_devices"))
	}
	return held
}

// AwaitReady waits until the devices are held with verified tools, each once.
func (c *Cluster) AwaitReady(t testing.TB, count int, limit time.Duration) {
	t.Helper()
	c.Nodes[0].Await(t, fmt.Sprintf("%d devices are ready", count), limit, func() bool {
		ready := 0
		for _, n := range c.Nodes {
			ready += int(n.Metric(t, "fleetd_devices", `mcp_state="ready"`))
		}
		return ready == count && c.Held(t) == count
	})
}

// Volume calls the tool that every simulated device has.
func (n *Node) Volume(t testing.TB, id string, timeout time.Duration) (apiclient.CallResult, error) {
	return n.Call(t.Context(), id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`), Timeout: timeout})
}

// CreateJob creates a job. With a key that was used with the same job before, it returns that one.
func (n *Node) CreateJob(ctx context.Context, job api.NewJob, key string) (api.Job, error) {
	return apiclient.Send[api.Job](ctx, n.Client, apiclient.Request{Method: "POST", Path: []string{"jobs"}, Body: job, Header: apiclient.IdempotencyKey(key)})
}

// DoJob applies a verb to a job.
func (n *Node) DoJob(ctx context.Context, id, verb string) (api.Job, error) {
	return apiclient.Send[api.Job](ctx, n.Client, apiclient.JobVerb(id, verb, "", nil))
}
