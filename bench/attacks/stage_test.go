package attacks

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/bench/load"
	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/credential"
	"fleetd/internal/fleettest"
)

const (
	others  = 100  // devices that are called, half of them over each transport
	rate    = 200  // calls a second, of all of them
	callers = 32   // calls at once, at most
	members = 5000 // further members, which are not connected
	tool    = "self.audio_speaker.set_volume"

	// What the node may keep in memory of catalogs and records, bytes: smaller than by default, so that what is lost
	// is not taken for it.
	catalogMemory, recorderMemory = 16 << 20, 16 << 20
)

// Environment of this program when it starts itself again.
const (
	envPriorities = "ATTACK_PRIORITIES" // the parts have priorities
	envPrograms   = "ATTACK_PROGRAMS"   // the directory in which they were built
	envCaller     = "ATTACK_CALLER"     // it makes the other calls
	envBurn       = "ATTACK_BURN"       // it computes for this share of the processors
)

// Priorities of the parts (chrt(1)). Attackers, devices and callers stand for other machines: those that attack,
// which are this process, have what the node leaves of the processors, and the others, which need little, have them at
// once. So a call waits for the node and for nothing else, and an attack is as strong as a processor or two.
var (
	ofAttackers = []string{"chrt", "--idle", "0"}
	ofOthers    = []string{"chrt", "--rr", "1"}
	ofNode      = []string{"chrt", "--other", "0"}
)

// TestMain starts this program again at the priority of attackers.
func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	flag.Parse()
	switch {
	case os.Getenv(envCaller) != "":
		return 0, load.Answer("-", answerCalls)
	case os.Getenv(envBurn) != "":
		return 0, burn(os.Getenv(envBurn))
	case os.Getenv(envPrograms) != "" || testing.Short():
		return m.Run(), nil
	}
	dir, err := os.MkdirTemp("", "attacks")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if _, err := fleettest.Build(dir); err != nil {
		return 0, err
	}
	command, environment := os.Args, append(os.Environ(), envPrograms+"="+dir)
	if err := exec.Command(ofAttackers[0], slices.Concat(ofAttackers[1:], ofOthers, ofNode, []string{"true"})...).Run(); err != nil {
		fmt.Println("  attacks LACKS: chrt and the right to real-time priority; attackers take the processors from node, devices and callers, and ratios mean little")
	} else {
		command, environment = append(slices.Clone(ofAttackers), command...), append(environment, envPriorities+"=1")
	}
	again := exec.Command(command[0], command[1:]...)
	again.Env, again.Stdout, again.Stderr = environment, os.Stdout, os.Stderr
	if err := again.Run(); err != nil {
		return 1, err
	}
	return 0, nil
}

// prioritized is a command line at a priority.
func prioritized(priority []string, command ...string) []string {
	if os.Getenv(envPriorities) != "" {
		return append(slices.Clone(priority), command...)
	}
	return command
}

// prioritizedProgram is a program at a priority that writes its log to a file: this process, which is busy, would
// read a pipe so slowly that the program waits.
func prioritizedProgram(t *testing.T, priority []string, program, log string) string {
	t.Helper()
	script := filepath.Join(t.TempDir(), filepath.Base(program))
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec "+strings.Join(prioritized(priority, program), " ")+" \"$@\" 2>>"+log+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return script
}

// state is what a node holds.
type state struct {
	goroutines, files int
	resident, heap    int64 // bytes; heap in use after a collection
}

// stage is a node with other devices, which are called at a steady rate.
type stage struct {
	*testing.T
	node    *fleettest.Node
	token   string   // of the administrator
	devices []string // the others
	caller  *load.Child
	calling string // the question for the caller, with the seconds to come
	web     *http.Client
	mint    *credential.Mint
	idle    state

	device, mqtt, gateway string // addresses, host:port
	secure                bool   // the API speaks TLS
	member                struct {
		sync.Mutex
		next, keys int
		live       []string // ids of keys
	}
}

const gatewayKey = "Gq7Tz9mKfleet"

// trustedProxy is an address whose X-Forwarded-For the node believes.
const trustedProxy = "127.0.77.1"

// newStage starts a node with the settings of production but for what the attacks need: ports, a small photo store,
// a gateway API, a proxy.
func newStage(t *testing.T, secure bool) *stage {
	t.Helper()
	dir, logs := os.Getenv(envPrograms), t.TempDir()
	nodeLog := filepath.Join(logs, "node")
	programs := fleettest.Programs{Fleetd: prioritizedProgram(t, ofNode, filepath.Join(dir, "fleetd"), nodeLog), Simulator: prioritizedProgram(t, ofOthers, filepath.Join(dir, "simulator"), filepath.Join(logs, "simulator"))}
	t.Cleanup(func() { checkLog(t, nodeLog) })
	s := &stage{T: t, gateway: freeAddress(t), secure: secure,
		web: &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}}
	arguments := []string{"--log-level", "info", "--ota-rate", "3000", "--new-members-per-address", "60", "--device-listen", "[::]:0", "--nats-listen", "0.0.0.0:0",
		"--photo-limit", "16MiB",
		"--catalog-memory", fmt.Sprint(catalogMemory), "--recorder-memory", fmt.Sprint(recorderMemory), "--gateway-api-listen", s.gateway, "--gateway-signature-key", gatewayKey, "--trusted-proxies", trustedProxy + "/32"}
	if secure {
		cert, key := writeCertificate(t)
		arguments = append(arguments, "--api-tls-cert", cert, "--api-tls-key", key)
	}
	s.node = programs.Start(t, arguments...)
	s.token = s.node.Token(t)
	secret, err := os.ReadFile(filepath.Join(s.node.Dir, "secret"))
	if err != nil {
		t.Fatal(err)
	}
	if s.mint, err = credential.New([]byte(strings.TrimSpace(string(secret)))); err != nil {
		t.Fatal(err)
	}
	s.device, s.mqtt = strings.TrimPrefix(s.node.Info.Device, "http://"), s.node.Setting("--mqtt-listen")
	programs.Simulate(t, s.node.Info.OTA, "--transport", "mqtt", "--devices", strconv.Itoa(others/2), "--quiet")
	programs.Simulate(t, s.node.Info.OTA, "--transport", "websocket", "--devices", strconv.Itoa(others/2), "--mac-base", "02:aa:00:00:00:00", "--quiet")
	s.node.AwaitReady(t, others)
	for _, d := range s.node.List(t) {
		s.devices = append(s.devices, d.ID)
	}
	s.importMembers()
	s.startCaller()
	s.calls(2 * window) // warms up
	s.idle = s.held()
	s.idle.resident, s.idle.heap = s.resident(), s.heap()
	return s
}

// checkLog looks for bugs in the log of a node.
func checkLog(t *testing.T, file string) {
	t.Helper()
	log, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, sign := range []string{"panic:", "panic serving", "fatal error:", "internal error (bug)"} {
		if at := bytes.Index(log, []byte(sign)); at >= 0 {
			t.Errorf("the node's log has %q: %s", sign, log[at:min(len(log), at+2000)])
		}
	}
	t.Logf("the node's log has %d lines", bytes.Count(log, []byte("\n")))
}

// importMembers makes a fleet of some size, so that lists and exports are not short.
func (s *stage) importMembers() {
	s.Helper()
	var file bytes.Buffer
	file.WriteString("id,name,label.room,label.floor\n")
	for i := range members {
		fmt.Fprintf(&file, "02:cc:00:00:%02x:%02x,device %d,room-%d,%d\n", i>>8, i&255, i, i%50, i%7)
	}
	if _, err := s.node.ImportDevices(s.Context(), &file, apiclient.ImportOptions{}); err != nil {
		s.Fatal(err)
	}
}

// key is the token of a new API key.
func (s *stage) key(name string, scopes ...string) string {
	s.Helper()
	s.member.Lock()
	s.member.keys++
	name = fmt.Sprintf("%s key %d", name, s.member.keys) // a name is used once
	s.member.Unlock()
	k, err := s.node.CreateKey(s.Context(), api.NewKey{Name: name, Scopes: scopes})
	if err != nil {
		s.Fatal(err)
	}
	s.member.Lock()
	s.member.live = append(s.member.live, k.ID)
	s.member.Unlock()
	return k.Token
}

// revoke ends the keys of an attacker, as an operator does, and with them the sessions of MCP that it has opened.
func (s *stage) revoke() {
	s.Helper()
	s.member.Lock()
	defer s.member.Unlock()
	for _, id := range s.member.live {
		if _, err := s.node.RevokeKey(s.Context(), id); err != nil {
			s.Error(err)
		}
	}
	s.member.live = nil
}

// question is what the caller is asked to do.
type question struct {
	API, Token string
	Devices    []string
	Window     time.Duration
}

// answer is how the calls went.
type answer struct {
	Calls, Failed int
	Failure       string // one of them
	P99           time.Duration
}

// startCaller starts the process that makes the other calls.
func (s *stage) startCaller() {
	s.Helper()
	self, err := os.Executable()
	if err != nil {
		s.Fatal(err)
	}
	command := prioritized(ofOthers, self)
	if s.caller, err = load.StartChild(command[0], []string{envCaller + "=1"}, command[1:]...); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(s.caller.Stop)
	s.calling = s.key("console", "tools:call")
	s.member.live = nil // this one stays
}

// calls makes other calls for some time.
func (s *stage) calls(window time.Duration) (a answer) {
	s.Helper()
	q, err := json.Marshal(question{s.node.Info.API, s.calling, s.devices, window})
	if err == nil {
		err = s.caller.Ask(string(q), &a)
	}
	if err != nil {
		s.Fatal(err)
	}
	return a
}

// calling is the client of the callers.
var calling = &http.Client{Timeout: 35 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: callers, MaxConnsPerHost: callers, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}

// answerCalls makes calls at the rate, each at its time whatever became of those before.
func answerCalls(text string) (any, error) {
	var q question
	if err := json.Unmarshal([]byte(text), &q); err != nil {
		return nil, err
	}
	n := int(q.Window.Seconds() * rate)
	took, failures := make([]time.Duration, n), make([]error, n)
	var all sync.WaitGroup
	begun := time.Now()
	for i := range n {
		due := begun.Add(time.Duration(i) * time.Second / rate)
		time.Sleep(time.Until(due))
		all.Go(func() {
			failures[i] = call(q, q.Devices[i%len(q.Devices)])
			took[i] = time.Since(due)
		})
	}
	all.Wait()
	slices.Sort(took)
	a := answer{Calls: n, P99: load.Quantile(took, 0.99)}
	for _, err := range failures {
		if err != nil {
			a.Failed++
			a.Failure = err.Error()
		}
	}
	return a, nil
}

// call calls a tool of a device.
func call(q question, device string) error {
	request, err := http.NewRequest(http.MethodPost, q.API+"/v1/devices/"+device+"/tools/"+tool+"/call", strings.NewReader(`{"arguments":{"volume":50}}`))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+q.Token)
	response, err := calling.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.300s", response.Status, body)
	}
	return err
}

// get is the body of an answer to the administrator.
func (s *stage) get(path string) []byte {
	s.Helper()
	request, err := http.NewRequestWithContext(context.WithoutCancel(s.Context()), http.MethodGet, s.node.Info.API+path, nil)
	if err != nil {
		s.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+s.token)
	response, err := s.web.Do(request)
	if err != nil {
		s.Error(err)
		return nil
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		s.Errorf("GET %s: %s, %v", path, response.Status, err)
	}
	return body
}

// held is what the node holds now, without memory.
func (s *stage) held() (h state) {
	s.Helper()
	for line := range strings.Lines(string(s.get("/metrics"))) {
		if value, found := strings.CutPrefix(line, "go_goroutines "); found {
			n, err := strconv.Atoi(strings.TrimSpace(value))
			if err != nil {
				s.Fatal(err)
			}
			h.goroutines = n
		}
	}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.node.Info.PID))
	if err != nil {
		s.Fatal(err)
	}
	h.files = len(files)
	return h
}

// heap is what is in use of the heap after a collection, bytes.
func (s *stage) heap() int64 {
	s.Helper()
	for line := range strings.Lines(string(s.get("/debug/pprof/heap?gc=1&debug=1"))) {
		if value, found := strings.CutPrefix(line, "# HeapInuse = "); found {
			n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
			if err != nil {
				s.Fatal(err)
			}
			return n
		}
	}
	s.Fatal("the heap profile does not say how much of the heap is in use")
	return 0
}

func (s *stage) resident() int64 {
	s.Helper()
	n, err := load.ResidentSize(s.node.Info.PID)
	if err != nil {
		s.Fatal(err)
	}
	return n
}

// checkDevices checks that no other device is left without its connection.
func (s *stage) checkDevices() {
	s.Helper()
	online := map[string]bool{}
	for _, d := range s.node.List(s.T) {
		online[d.ID] = d.State == "online" && d.MCP.CatalogState == "ready"
	}
	for _, id := range s.devices {
		if !online[id] {
			s.Errorf("the device %s is not ready after the attacks", id)
		}
	}
}

// freeAddress is an address on which nothing listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func writeCertificate(t *testing.T) (cert, key string) {
	t.Helper()
	pair, err := load.SelfSigned()
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: pair.Certificate[0]}, key: {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}
