// Package fleettest runs the real programs, fleetd and the simulator, as their
// users do, and gives tests the verbs of a fleet: start a node, kill it,
// simulate devices, read their report. Production never imports it.
package fleettest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"fleetd/internal/apiclient"
	"fleetd/internal/devicetest"
)

// Programs are the two binaries, built once per test process.
type Programs struct {
	Fleetd, Simulator string
}

// Build compiles the programs into dir, with the race detector if the test has
// it.
func Build(dir string) (Programs, error) {
	p := Programs{filepath.Join(dir, "fleetd"), filepath.Join(dir, "simulator")}
	args := []string{"build", "-o", dir}
	if raceEnabled {
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, "fleetd/cmd/fleetd", "fleetd/simulator")...).CombinedOutput()
	if err != nil {
		return p, fmt.Errorf("build: %w\n%s", err, out)
	}
	return p, nil
}

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
	Info apiclient.RunInfo
	Log  *Output

	programs Programs
	args     []string
	process  *exec.Cmd
	ended    chan struct{}
}

// Start runs a node with a fresh data directory and free ports, and waits
// until it serves. It is stopped with the test, which fails if the node
// panicked or raced.
func (p Programs) Start(t testing.TB, args ...string) *Node {
	t.Helper()
	n := &Node{Dir: t.TempDir(), programs: p, args: args}
	n.Run(t)
	t.Cleanup(func() { n.Stop(t) })
	return n
}

// Run starts the node (again) on its data directory.
func (n *Node) Run(t testing.TB) {
	t.Helper()
	n.Log = &Output{}
	args := append([]string{"serve", "--data-dir", n.Dir, "--public-host", "127.0.0.1", "--log-level", "debug", "--ota-rate", "0"}, n.args...)
	if n.Info.API == "" { // the first start chooses ports, which the data directory keeps
		args = append(args, "--device-listen", freePort(t), "--api-listen", freePort(t))
		n.args = append(n.args, args[len(args)-4:]...)
	}
	n.process = exec.Command(n.programs.Fleetd, args...)
	n.process.Env = append(os.Environ(), "GORACE=halt_on_error=0")
	n.process.Stdout, n.process.Stderr = n.Log, n.Log
	if err := n.process.Start(); err != nil {
		t.Fatal(err)
	}
	n.ended = make(chan struct{})
	go func(process *exec.Cmd, ended chan struct{}) {
		_ = process.Wait() // the log tells more
		close(ended)
	}(n.process, n.ended)
	pid := n.process.Process.Pid
	devicetest.Eventually(t, "the node runs", func() bool {
		select {
		case <-n.ended:
			t.Fatalf("the node ended at its start:\n%s", n.Log)
		default:
		}
		info, err := apiclient.ReadRunInfo(n.Dir)
		n.Info = info
		return err == nil && info.PID == pid
	})
	var err error
	if n.Client, err = apiclient.Discover(n.Dir, "", ""); err != nil {
		t.Fatal(err)
	}
}

func freePort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// Kill ends the node with SIGKILL.
func (n *Node) Kill(t testing.TB) {
	t.Helper()
	if err := n.process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-n.ended
}

// Stop drains the node and checks its log.
func (n *Node) Stop(t testing.TB) {
	t.Helper()
	_ = n.process.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-n.ended:
	case <-time.After(30 * time.Second):
		_ = n.process.Process.Signal(syscall.SIGQUIT) // its stacks go to the log
		<-n.ended
		t.Errorf("the node did not stop within 30 s:\n%s", n.Log)
	}
	log := n.Log.String()
	for _, sign := range []string{"DATA RACE", "panic:", "fatal error:"} {
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
func (n *Node) List(t testing.TB) []apiclient.Device {
	t.Helper()
	list, err := apiclient.Collect(n.Devices(t.Context(), apiclient.DeviceFilter{}))
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
	list, err := apiclient.Collect(n.Devices(t.Context(), apiclient.DeviceFilter{}))
	if err != nil {
		return -1
	}
	for _, d := range list {
		if d.State == "online" && d.MCP.CatalogState == "ready" {
			ready++
		}
	}
	return ready
}

// Await waits until done, looking ten times a second.
func (n *Node) Await(t testing.TB, what string, limit time.Duration, done func() bool) {
	t.Helper()
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
		_ = s.process.Wait() // the report tells more
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

// Report is the part of the simulator's report that tests assert on; its
// README describes all of it.
type Report struct {
	Devices []ReportDevice `json:"devices"`
	Totals  struct {
		DuplicateCallIDs int `json:"duplicate_call_ids"`
		Crashes          int `json:"crashes"`
		CallsTotal       int `json:"calls_total"`
	} `json:"totals"`
}

// ReportDevice is one simulated device.
type ReportDevice struct {
	ID            string `json:"id"`
	ClientID      string `json:"client_id"`
	Profile       string `json:"profile"`
	Firmware      string `json:"firmware"`
	Board         string `json:"board"`
	State         string `json:"state"`
	Error         string `json:"error"`
	Connects      int    `json:"connects"`
	Tools         int    `json:"tools"`
	CatalogSHA256 string `json:"catalog_sha256"`
	PublicSHA256  string `json:"catalog_public_sha256"`
	Calls         []struct {
		ID   int    `json:"id"`
		Tool string `json:"tool"`
	} `json:"calls"`
	CallsTotal       int `json:"calls_total"`
	DuplicateCallIDs int `json:"duplicate_call_ids"`
	Notifications    int `json:"notifications_sent"`
	Photos           []struct {
		SHA256 string `json:"sha256"`
		Bytes  int64  `json:"bytes"`
		Status int    `json:"status"`
		Answer string `json:"answer"`
	} `json:"photos"`
	Snapshots []struct {
		SHA256 string `json:"sha256"`
		Status int    `json:"status"`
	} `json:"snapshots"`
}
