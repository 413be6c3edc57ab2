// Package fleettest runs the real programs, fleetd and the simulator, as their
// users do, and gives tests the verbs of a fleet: start a node, kill it,
// simulate devices, read their report. Production never imports it.
package fleettest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/datadir"
	"fleetd/internal/devicetest"
	"fleetd/internal/gobuild"
	"fleetd/internal/racetest"
	"fleetd/internal/timescale"
	"fleetd/simulator/firmware"
)

// Programs are the binaries, built once per test process.
type Programs struct {
	Fleetd, Simulator, EchoService string
}

// Build compiles the programs into dir, with these build tags, with intervals that scale, and with the race detector if
// the test has it.
func Build(dir string, tags ...string) (Programs, error) {
	p := Programs{filepath.Join(dir, "fleetd"), filepath.Join(dir, "simulator"), filepath.Join(dir, "echo")}
	flags := []string{"-tags", strings.Join(tags, ","), "-ldflags", "-s -w -X " + timescale.Flag}
	if racetest.Enabled {
		flags = append(flags, "-race", "-gcflags=modernc.org/...=-d=checkptr=0", "-gcflags=modernc.org/sqlite/lib=-race=false -d=checkptr=0",
			"-gcflags=modernc.org/libc=-race=false -d=checkptr=0") // as in scripts/mode
	}
	return p, gobuild.Build(context.Background(), ".", dir, []string{"./cmd/fleetd", "./simulator", "./examples/echo"}, flags...)
}

// volume is a tool that every simulated device has.
const volume = "self.audio_speaker.set_volume"

// Output collects what a program prints, for the log of a failed test.
type Output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// Node is one running fleetd.
type Node struct {
	*apiclient.Client
	Dir  string
	Info datadir.RunInfo
	Log  *Output

	programs Programs
	args     []string
	env      []string
	process  *exec.Cmd
	ended    chan struct{}
}

// Start runs a node with a fresh data directory and free ports, and waits
// until it serves. It is stopped with the test, which fails if the node
// panicked or raced.
func (p Programs) Start(t testing.TB, args ...string) *Node {
	t.Helper()
	return p.startWith(t, nil, args...)
}

// startWith is Start with variables of the environment.
func (p Programs) startWith(t testing.TB, env []string, args ...string) *Node {
	t.Helper()
	n := &Node{Dir: t.TempDir(), programs: p, args: args, env: env}
	n.launch(t)
	t.Cleanup(func() { n.Stop(t) })
	n.awaitStart(t)
	return n
}

// Refused runs a node that must not start, and returns its output.
func (p Programs) Refused(t testing.TB, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	args = append([]string{"serve", "--data-dir", t.TempDir(), "--public-host", "127.0.0.1"}, args...)
	for _, flag := range portFlags {
		args = append(args, flag, freePort(t))
	}
	c := exec.CommandContext(ctx, p.Fleetd, args...)
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGQUIT) } // its goroutines are in the output then
	c.WaitDelay = 5 * time.Second
	output, err := c.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || ctx.Err() != nil {
		t.Errorf("the node was not refused: %v\n%s", err, output)
	}
	return string(output)
}

// portFlags are the settings that name a port of every node.
var portFlags = []string{"--device-listen", "--api-listen", "--mqtt-listen", "--udp-listen"}

// Run starts the node (again) on its data directory, and waits until it serves.
func (n *Node) Run(t testing.TB) {
	t.Helper()
	n.launch(t)
	n.awaitStart(t)
}

// launch starts the node's process.
func (n *Node) launch(t testing.TB) {
	t.Helper()
	if n.Log == nil { // a restarted node goes on with its log
		n.Log = &Output{}
	}
	args := []string{"serve", "--data-dir", n.Dir}
	for _, given := range [][2]string{{"--public-host", "127.0.0.1"}, {"--log-level", "debug"}, {"--ota-rate", "0"}, {"--new-members-per-address", "0"}} {
		if n.Setting(given[0]) == "" { // a flag is given once
			args = append(args, given[0], given[1])
		}
	}
	if n.Info.API == "" { // the first start chooses ports, which the data directory keeps
		for _, flag := range portFlags {
			if n.Setting(flag) == "" {
				n.args = append(n.args, flag, freePort(t))
			}
		}
	}
	args = append(args, n.args...)
	n.process = exec.Command(n.programs.Fleetd, args...)
	n.process.Env = append(append(os.Environ(), "GORACE=halt_on_error=0", fmt.Sprintf("FLEETD_TEST_TIME_SCALE=%v", scale())), n.env...)
	n.process.Stdout, n.process.Stderr = n.Log, n.Log
	if err := n.process.Start(); err != nil {
		t.Fatal(err)
	}
	n.ended = make(chan struct{})
	go func(process *exec.Cmd, ended chan struct{}) {
		_ = process.Wait() // the log has more
		close(ended)
	}(n.process, n.ended)
}

// awaitStart waits until the process serves.
func (n *Node) awaitStart(t testing.TB) {
	t.Helper()
	pid := n.process.Process.Pid
	n.Await(t, "the node runs", 30*time.Second, func() bool { // without its database it waits for that first
		select {
		case <-n.ended:
			t.Fatalf("the node ended at its start:\n%s", n.Log)
		default:
		}
		info, err := datadir.ReadRunInfo(n.Dir)
		n.Info = info
		return err == nil && info.PID == pid
	})
	if n.Client != nil {
		return // ports and token outlive a restart, and others may be calling
	}
	var err error
	if n.Client, err = apiclient.Discover(n.Dir, "", ""); err != nil {
		t.Fatal(err)
	}
}

// The ports of nodes lie below those that the system gives to outgoing
// connections: one that is free now is then still free when the node opens it,
// or opens it again. Test processes start at different places.
const firstPort, lastPort = 16_000, 32_000

var nextPort = struct {
	sync.Mutex
	port int
}{port: firstPort + os.Getpid()*61%(lastPort-firstPort)}

// freePort returns an address of this machine on which nothing listens, TCP or
// UDP.
func freePort(t testing.TB) string {
	t.Helper()
	nextPort.Lock()
	defer nextPort.Unlock()
	for range lastPort - firstPort {
		if nextPort.port++; nextPort.port > lastPort {
			nextPort.port = firstPort
		}
		address := fmt.Sprintf("127.0.0.1:%d", nextPort.port)
		l, err := net.Listen("tcp", address)
		if err != nil {
			continue
		}
		_ = l.Close()
		c, err := net.ListenPacket("udp4", address)
		if err != nil {
			continue
		}
		_ = c.Close()
		return address
	}
	t.Fatal("no port is free")
	return ""
}

// Setting is the last value that the node was given for a flag, such as a port.
func (n *Node) Setting(flag string) string {
	for i := len(n.args) - 2; i >= 0; i-- {
		if n.args[i] == flag {
			return n.args[i+1]
		}
	}
	return ""
}

// Metric is the sum of the samples of a metric whose labels contain all of
// these, such as `verdict="accepted"`. It is 0 while there are none.
func (n *Node) Metric(t testing.TB, name string, labels ...string) (sum float64) {
	t.Helper()
	request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, n.Info.API+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Accept-Encoding", "identity") // compressing takes longer than all else
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	lines := bufio.NewScanner(response.Body)
next:
	for lines.Scan() {
		rest, found := strings.CutPrefix(lines.Text(), name)
		if !found || rest == "" || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		for _, label := range labels {
			if !strings.Contains(rest, label) {
				continue next
			}
		}
		value, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		if err != nil {
			t.Fatalf("%s: %v", lines.Text(), err)
		}
		sum += value
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return sum
}

// CheckIn makes an OTA check, which has to be answered, and returns the reply.
func (n *Node) CheckIn(t testing.TB, id, body string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.Info.OTA, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Device-Id", id)
	r.Header.Set("Client-Id", "client of "+id)
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("%s %s %v", answer.Status, text, err)
	}
	return string(text)
}

// Kill ends the node with SIGKILL.
func (n *Node) Kill(t testing.TB) {
	t.Helper()
	if err := n.process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-n.ended
}

// Freeze stops the node's process as SIGSTOP does, until Thaw.
func (n *Node) Freeze(t testing.TB) { n.signal(t, syscall.SIGSTOP) }

// Thaw lets a frozen node go on.
func (n *Node) Thaw(t testing.TB) { n.signal(t, syscall.SIGCONT) }

func (n *Node) signal(t testing.TB, s syscall.Signal) {
	t.Helper()
	if err := n.process.Process.Signal(s); err != nil {
		t.Errorf("signal %v: %v", s, err)
	}
}

// Stop drains the node and checks its log.
func (n *Node) Stop(t testing.TB) {
	t.Helper()
	_ = n.process.Process.Signal(syscall.SIGCONT) // it may be frozen, or have ended
	_ = n.process.Process.Signal(syscall.SIGTERM)
	select {
	case <-n.ended:
	case <-time.After(30 * time.Second):
		_ = n.process.Process.Signal(syscall.SIGQUIT) // its stacks go to the log
		<-n.ended
		t.Errorf("the node did not stop within 30 s:\n%s", n.Log)
	}
	log := n.Log.String()
	for _, sign := range []string{"DATA RACE", "panic:", "panic serving", "fatal error:", "internal error (bug)"} {
		if strings.Contains(log, sign) {
			t.Errorf("the node's log has %q:\n%s", sign, log)
		}
	}
	if t.Failed() {
		t.Logf("log of the node:\n%s", tail(log, 8000))
	}
}

func tail(text string, n int) string { return text[max(0, len(text)-n):] }

// Command runs a client command against the node and returns what it printed
// and its exit status.
func (n *Node) Command(t testing.TB, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	var out, errs bytes.Buffer
	c := exec.Command(n.programs.Fleetd, append(args, "--data-dir", n.Dir)...)
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); c.ProcessState == nil {
		t.Fatal(err)
	}
	return out.String(), errs.String(), c.ProcessState.ExitCode()
}

// List returns all devices.
func (n *Node) List(t testing.TB) []api.Device {
	t.Helper()
	list, err := apiclient.Collect(n.Devices(t.Context(), nil))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// AwaitReady waits until count devices are online with verified tools.
func (n *Node) AwaitReady(t testing.TB, count int) {
	t.Helper()
	n.Await(t, fmt.Sprintf("%d devices are ready", count), 60*time.Second, func() bool { return n.Ready(t) >= count })
}

// Ready counts the devices that are online with verified tools.
func (n *Node) Ready(t testing.TB) (ready int) {
	t.Helper()
	list, err := apiclient.Collect(n.Devices(t.Context(), apiclient.Query{"state": "online"}))
	if err != nil {
		return -1
	}
	for _, d := range list {
		if d.MCP.CatalogState == "ready" {
			ready++
		}
	}
	return ready
}

// AwaitStored waits until the database has every row: what the API shows is
// ahead of it by the length of a group.
func (n *Node) AwaitStored(t testing.TB) {
	t.Helper()
	empty := 0 // looks; a group that has left the queue is on its way for one
	n.Await(t, "every row is stored", 20*time.Second, func() bool {
		if n.Metric(t, "fleetd_database_queue") != 0 {
			empty = 0
			return false
		}
		empty++
		return empty > 3
	})
}

// Await waits until done, looking ten times a second.
func (n *Node) Await(t testing.TB, what string, limit time.Duration, done func() bool) {
	t.Helper()
	if testing.Short() {
		limit *= shortPatience
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-ctx.Done():
			t.Fatalf("did not come true within %v: %s", limit, what)
		case <-tick.C:
		}
	}
}

// Echo runs the voice service that repeats what devices say, attached to the
// NATS of a node that was started with --nats-listen. It is ended with the
// test.
func (p Programs) Echo(t testing.TB, n *Node) {
	t.Helper()
	log := &Output{}
	process := exec.Command(p.EchoService, "--data-dir", n.Dir)
	process.Stdout, process.Stderr = log, log
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = process.Process.Kill()
		_ = process.Wait() // killed
		if t.Failed() {
			t.Logf("log of the echo service:\n%s", tail(log.String(), 2000))
		}
	})
	devicetest.Eventually(t, "the echo service listens", func() bool { return strings.Contains(log.String(), "listening") })
}

// Report is the simulator's report.
type Report = firmware.Report

// Simulation is one running simulator.
type Simulation struct {
	process *exec.Cmd
	out     *Output
	log     *Output
	ended   chan struct{}
}

// Simulate starts devices that boot from the node's OTA address. It is ended
// with the test.
func (p Programs) Simulate(t testing.TB, ota string, args ...string) *Simulation {
	t.Helper()
	s := &Simulation{out: &Output{}, log: &Output{}, ended: make(chan struct{})}
	s.process = exec.Command(p.Simulator, append([]string{"--ota", ota, "--report", "json"}, args...)...)
	s.process.Stdout, s.process.Stderr = s.out, s.log
	if err := s.process.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = s.process.Wait() // the report has more
		close(s.ended)
	}()
	t.Cleanup(func() {
		_ = s.process.Process.Kill()
		<-s.ended
		if t.Failed() {
			t.Logf("log of the simulator:\n%s", tail(s.log.String(), 2000))
		}
	})
	return s
}

// Freeze stops the devices as SIGSTOP does, until Thaw.
func (s *Simulation) Freeze(t testing.TB) { s.signal(t, syscall.SIGSTOP) }

// Thaw lets frozen devices go on.
func (s *Simulation) Thaw(t testing.TB) { s.signal(t, syscall.SIGCONT) }

func (s *Simulation) signal(t testing.TB, signal syscall.Signal) {
	t.Helper()
	if err := s.process.Process.Signal(signal); err != nil {
		t.Errorf("signal %v: %v", signal, err)
	}
}

// Report ends the simulation and returns what the devices saw.
func (s *Simulation) Report(t testing.TB) Report {
	t.Helper()
	_ = s.process.Process.Signal(syscall.SIGTERM) // it may have ended by its --duration
	<-s.ended
	var r Report
	if err := json.Unmarshal([]byte(s.out.String()), &r); err != nil {
		t.Fatalf("simulator report: %v\n%s\n%s", err, tail(s.out.String(), 500), tail(s.log.String(), 2000))
	}
	return r
}

// Token is the node's admin token.
func (n *Node) Token(t testing.TB) string {
	t.Helper()
	token, err := os.ReadFile(filepath.Join(n.Dir, "admin-token"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(token))
}

// Status is what the API answers to a token; 0 if it does not answer.
func (n *Node) Status(t testing.TB, token string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, n.Info.API+"/v1/self", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0
	}
	_ = answer.Body.Close() // the status is enough
	return answer.StatusCode
}
