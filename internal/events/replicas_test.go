package events

import (
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/natstest"
)

// natsCluster runs three servers that hold JetStream together.
func natsCluster(t *testing.T) (servers []*server.Server) {
	t.Helper()
	var routes []*url.URL
	var ports []int
	var listeners []net.Listener
	for range 3 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		listeners = append(listeners, l)
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
		routes = append(routes, &url.URL{Scheme: "nats", Host: l.Addr().String()})
	}
	for _, l := range listeners { // held until all three ports were known
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3 {
		servers = append(servers, natstest.Start(t, server.Options{ServerName: fmt.Sprintf("n%d", i), JetStream: true, StoreDir: t.TempDir(), Routes: routes,
			Cluster: server.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: ports[i]}}))
	}
	leads := func(s *server.Server) bool { return s.JetStreamIsLeader() }
	devicetest.Eventually(t, "the servers are connected", func() bool {
		return !slices.ContainsFunc(servers, func(s *server.Server) bool { return s.NumRemotes() < 2 })
	})
	devicetest.Eventually(t, "the cluster has a leader", func() bool { return slices.ContainsFunc(servers, leads) })
	devicetest.Eventually(t, "the leader has three peers", func() bool {
		return slices.ContainsFunc(servers, func(s *server.Server) bool { return leads(s) && len(s.JetStreamClusterPeers()) == 3 })
	})
	return servers
}

// With three replicas the events outlive any one server.
func TestReplicasOutliveAServer(t *testing.T) {
	t.Parallel()
	servers := natsCluster(t)
	nc := connect(t, servers[0].ClientURL())
	b, err := New(Options{Conn: nc, Prefix: "test.v1", Node: "n1", Retention: time.Hour, Limit: 10 << 20, NotificationLimit: 10 << 20, Replicas: 3, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	b.Open(devices.Alone)
	var leader string
	devicetest.Eventually(t, "the stream has three replicas", func() bool {
		stream, err := streams(t, nc).Stream(t.Context(), "TEST_V1_EVENTS")
		if err != nil {
			return false
		}
		info := stream.CachedInfo()
		if info.Config.Replicas != 3 || info.Cluster == nil || len(info.Cluster.Replicas) != 2 {
			return false
		}
		leader = info.Cluster.Leader
		return leader != ""
	})
	b.Publish(online(1))
	messages := func() uint64 {
		stream, err := streams(t, nc).Stream(t.Context(), "TEST_V1_EVENTS")
		if err != nil {
			return 0
		}
		return stream.CachedInfo().State.Msgs
	}
	devicetest.Eventually(t, "the event is kept", func() bool { return messages() == 1 })
	for _, s := range servers {
		if s.Name() == leader {
			s.Shutdown()
			s.WaitForShutdown()
		}
	}
	devicetest.Eventually(t, "the event is kept without the server that led", func() bool { return messages() == 1 })
}
