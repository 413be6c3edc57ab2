package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"fleetd/bench/load"
	"fleetd/bench/services"
)

// natsCommand is the hidden command under which this program runs one NATS server. Each has a process of its own, since
// the heap and the CPU of three servers in one process cannot be separated.
const natsCommand = "nats-server"

const (
	natsServers  = 3
	startLimit   = 30 * time.Second
	natsPings    = 2 * time.Second // as fleetd's own server
	profiledRate = 64 << 10        // bytes between two samples of the heap of a server
)

// natsOptions are what a server process is started with.
type natsOptions struct {
	Name, Dir string
	Ports     []int // of the cluster
	Index     int
}

// natsState is the state that a server reports. Counters begin with its start.
type natsState struct {
	Peers    int // of JetStream, if the server leads it
	Subs     int64
	RouteIn  int64 // messages from the other servers
	In, Out  int64 // messages, of clients and other servers
	InBytes  int64
	OutBytes int64
	Slow     int64 // consumers
	CPU      time.Duration
	Heap     int64 // after garbage collection, on the line "collect"
	Events   int64 // of it, what JetStream holds
}

// servers are what this program is instead for itself.
var servers = map[string]func(options string) error{natsCommand: serveNATS}

// serveNATS runs a server until standard input ends, and answers each line there with its state. The line "collect"
// collects garbage first.
func serveNATS(text string) error {
	runtime.MemProfileRate = profiledRate
	var o natsOptions
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	return services.ServeNATS(o.Name, o.Dir, func(options *server.Options) {
		options.PingInterval, options.MaxPingsOut = natsPings, 2
		options.Cluster = server.ClusterOpts{Name: "fleetsim", Host: "127.0.0.1", Port: o.Ports[o.Index]}
		for _, port := range o.Ports {
			options.Routes = append(options.Routes, &url.URL{Scheme: "nats", Host: fmt.Sprintf("127.0.0.1:%d", port)})
		}
	}, func(s *server.Server, question string) (any, error) { return stateOf(s, question == "collect") })
}

func stateOf(s *server.Server, collect bool) (*natsState, error) {
	v, err := s.Varz(nil)
	if err != nil {
		return nil, err
	}
	state := &natsState{Subs: int64(v.Subscriptions), In: v.InMsgs, Out: v.OutMsgs, InBytes: v.InBytes, OutBytes: v.OutBytes,
		RouteIn: v.InMsgs - v.InClientMsgs, Slow: v.SlowConsumers, CPU: load.OwnCPU()}
	if s.JetStreamIsLeader() {
		state.Peers = len(s.JetStreamClusterPeers())
	}
	if collect {
		state.Heap, state.Events = heap(jetStream)
		state.CPU = load.OwnCPU()
	}
	return state, nil
}

// allocators are functions whose allocations are counted apart: those of JetStream in a server; in the nodes messages that
// arrive during the collection, which it counts as in use.
var (
	jetStream = []string{"server.(*stream)", "server.(*raft)", "server.(*fileStore)", "server.(*msgBlock)", "server.(*jetStream)", "server.(*consumer)"}
	arriving  = []string{"nats%2ego.(*Conn).readLoop", "nats%2ego.(*Conn).waitForMsgs"}
)

// heap is the heap in use after garbage collection, and about how much of it these functions and what they call allocated.
func heap(allocators []string) (all, apart int64) {
	runtime.GC()
	runtime.GC() // the profile is that of the end of the collection before
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	records := make([]runtime.MemProfileRecord, 100_000)
	n, _ := runtime.MemProfile(records, false)
	for _, r := range records[:n] {
		if r.InUseObjects() == 0 || !calledBy(r.Stack(), allocators) {
			continue
		}
		size := float64(r.InUseBytes()) / float64(r.InUseObjects())
		apart += int64(float64(r.InUseBytes()) / (1 - math.Exp(-size/float64(runtime.MemProfileRate)))) // a sample stands for those that were passed over
	}
	return int64(m.HeapAlloc), apart
}

func calledBy(stack []uintptr, functions []string) bool {
	for frames := runtime.CallersFrames(stack); ; {
		f, more := frames.Next()
		if slices.ContainsFunc(functions, func(name string) bool { return strings.Contains(f.Function, name) }) {
			return true
		}
		if !more {
			return false
		}
	}
}

// natsServer is one server process.
type natsServer struct{ *load.Child }

// startNATS starts a cluster and waits until JetStream has a leader that sees all servers.
func startNATS(dir string, most int) (servers []natsServer, err error) {
	defer func() {
		if err != nil {
			stopNATS(servers)
		}
	}()
	ports, err := freePorts(most)
	if err != nil {
		return nil, err
	}
	for i := range most {
		name := fmt.Sprintf("nats-%d", i+1)
		text, err := json.Marshal(natsOptions{Name: name, Dir: filepath.Join(dir, name), Ports: ports, Index: i})
		if err != nil {
			return servers, err
		}
		c, err := load.StartChild("", nil, natsCommand, string(text))
		if err != nil {
			return servers, err
		}
		servers = append(servers, natsServer{c})
	}
	for deadline := time.Now().Add(startLimit); ; time.Sleep(100 * time.Millisecond) {
		for _, s := range servers {
			state, err := s.state(false)
			if err != nil {
				return servers, err
			}
			if state.Peers == most {
				return servers, nil
			}
		}
		if time.Now().After(deadline) {
			return servers, errors.New("the NATS servers do not form a cluster")
		}
	}
}

// freePorts finds ports for the routes, which all servers have to be started with.
func freePorts(n int) (ports []int, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer func() { _ = l.Close() }() // held until all are known
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

func (s natsServer) state(collect bool) (state natsState, err error) {
	question := "read"
	if collect {
		question = "collect"
	}
	return state, s.Ask(question, &state)
}

func stopNATS(servers []natsServer) {
	for _, s := range servers {
		s.Stop()
	}
}
