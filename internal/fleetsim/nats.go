package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// natsCommand is the hidden command under which this program runs one NATS server. Each has a process of its own, since
// the heap and the CPU of three servers in one process cannot be told apart.
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
	URL      string
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

// serveNATS runs a server until standard input ends, and answers each line there with its state. The line "collect"
// collects garbage first.
func serveNATS(text string, in io.Reader, out io.Writer) error {
	runtime.MemProfileRate = profiledRate
	var o natsOptions
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	options := &server.Options{ServerName: o.Name, Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: o.Dir,
		JetStreamMaxStore: 64 << 30, NoSigs: true, NoLog: true, PingInterval: natsPings, MaxPingsOut: 2,
		Cluster: server.ClusterOpts{Name: "fleetsim", Host: "127.0.0.1", Port: o.Ports[o.Index]}}
	for _, port := range o.Ports {
		options.Routes = append(options.Routes, &url.URL{Scheme: "nats", Host: fmt.Sprintf("127.0.0.1:%d", port)})
	}
	s, err := server.NewServer(options)
	if err != nil {
		return err
	}
	s.Start()
	defer s.WaitForShutdown()
	defer s.Shutdown()
	if !s.ReadyForConnections(startLimit) {
		return errors.New("the NATS server does not start")
	}
	encoder := json.NewEncoder(out)
	for lines := bufio.NewScanner(in); lines.Scan(); {
		state, err := stateOf(s, lines.Text() == "collect")
		if err != nil {
			return err
		}
		if err := encoder.Encode(state); err != nil {
			return err
		}
	}
	return nil
}

func stateOf(s *server.Server, collect bool) (*natsState, error) {
	v, err := s.Varz(nil)
	if err != nil {
		return nil, err
	}
	state := &natsState{URL: s.ClientURL(), Subs: int64(v.Subscriptions), In: v.InMsgs, Out: v.OutMsgs, InBytes: v.InBytes, OutBytes: v.OutBytes,
		RouteIn: v.InMsgs - v.InClientMsgs, Slow: v.SlowConsumers, CPU: ownCPU()}
	if s.JetStreamIsLeader() {
		state.Peers = len(s.JetStreamClusterPeers())
	}
	if collect {
		state.Heap, state.Events = heap(jetStream)
		state.CPU = ownCPU()
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

// ownCPU is the CPU time of this process.
func ownCPU() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // fails only for a wrong argument
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// natsServer is one server process.
type natsServer struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines *json.Decoder
}

// startNATS starts a cluster and waits until JetStream has a leader that sees all servers.
func startNATS(dir string, most int) (servers []*natsServer, err error) {
	defer func() {
		if err != nil {
			stopNATS(servers)
		}
	}()
	ports, err := freePorts(most)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	for i := range most {
		name := fmt.Sprintf("nats-%d", i+1)
		text, err := json.Marshal(natsOptions{Name: name, Dir: filepath.Join(dir, name), Ports: ports, Index: i})
		if err != nil {
			return servers, err
		}
		s := &natsServer{cmd: exec.Command(self, natsCommand, string(text))}
		s.cmd.Stderr = os.Stderr
		// An interruption of the terminal reaches only this program, which ends them by closing their standard input.
		s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		stdout, err := s.cmd.StdoutPipe()
		if err != nil {
			return servers, err
		}
		if s.stdin, err = s.cmd.StdinPipe(); err != nil {
			return servers, err
		}
		s.lines = json.NewDecoder(stdout)
		if err := s.cmd.Start(); err != nil {
			return servers, err
		}
		servers = append(servers, s)
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

func (s *natsServer) state(collect bool) (state natsState, err error) {
	line := "read\n"
	if collect {
		line = "collect\n"
	}
	if _, err := io.WriteString(s.stdin, line); err != nil {
		return state, fmt.Errorf("a NATS server has ended: %w", err)
	}
	err = s.lines.Decode(&state)
	return state, err
}

func stopNATS(servers []*natsServer) {
	for _, s := range servers {
		_ = s.stdin.Close() // ends it
	}
	for _, s := range servers {
		timer := time.AfterFunc(startLimit, func() { _ = s.cmd.Process.Kill() })
		_ = s.cmd.Wait() // how it ended is of no interest
		timer.Stop()
	}
}
