package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"fleetd/bench/load"
)

// daemon is one running node of fleetd: the real program, with a data directory of its own.
type daemon struct {
	cmd    *exec.Cmd
	dir    string
	api    string      // base URL
	device string      // host:port
	secure *tls.Config // how devices connect; nil: without TLS
	token  string
	prefix string // of its NATS subjects
	exited chan error
	client http.Client
}

const (
	startLimit = 30 * time.Second
	stopLimit  = 30 * time.Second
)

// startDaemon runs `fleetd serve` on a new data directory and free loopback ports. The settings are added to the command
// line; fleetd's variables in this program's environment do not count.
func startDaemon(ctx context.Context, program string, settings ...string) (*daemon, error) {
	dir, err := os.MkdirTemp("", "fleetbench")
	if err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	d, err := startIn(ctx, startLimit, program, dir, settings...)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return d, nil
}

// startIn runs `fleetd serve` on a data directory that remains when it fails to become ready within the limit.
func startIn(ctx context.Context, limit time.Duration, program, dir string, settings ...string) (*daemon, error) {
	d := &daemon{dir: dir, exited: make(chan error, 1)}
	arguments := append([]string{"serve", "--data-dir", dir, "--device-listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0",
		"--mqtt-listen", "127.0.0.1:0", "--udp-listen", "127.0.0.1:0", "--public-host", "127.0.0.1", "--ota-rate", "0", "--new-members-per-address", "0", "--connections-per-address", "0", "--log-level", "warn"}, settings...)
	d.cmd = exec.Command(program, arguments...)
	// Freed memory must leave the resident set at once.
	d.cmd.Env = append(withoutFleetd(os.Environ()), "GODEBUG=madvdontneed=1")
	load.DieWithParent(d.cmd)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }() // the child has its own handle
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	go func() { d.exited <- d.cmd.Wait() }()
	if err := d.await(ctx, limit); err != nil {
		err = fmt.Errorf("fleetd does not start: %w\n%s", err, d.log())
		d.end()
		return nil, err
	}
	return d, nil
}

func withoutFleetd(environ []string) []string {
	var kept []string
	for _, e := range environ {
		if !strings.HasPrefix(e, "FLEETD_") {
			kept = append(kept, e)
		}
	}
	return kept
}

// await reads where the node listens from the files it leaves, and waits until it is ready.
func (d *daemon) await(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var info struct {
		API    string `json:"api"`
		Device string `json:"device"`
	}
	err := d.poll(ctx, 20*time.Millisecond, func() (bool, error) {
		content, err := os.ReadFile(filepath.Join(d.dir, "run.json"))
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		} else if err != nil {
			return false, err
		}
		return true, json.Unmarshal(content, &info)
	})
	if err != nil {
		return fmt.Errorf("no usable run.json: %w", err)
	}
	device, err := url.Parse(info.Device)
	if err != nil {
		return fmt.Errorf("run.json: %w", err)
	}
	token, err := os.ReadFile(filepath.Join(d.dir, "admin-token"))
	if err != nil {
		return err
	}
	if device.Scheme == "https" {
		d.secure = anyServer
	}
	d.api, d.device, d.token = info.API, device.Host, strings.TrimSpace(string(token))
	answer := ""
	err = d.poll(ctx, 20*time.Millisecond, func() (bool, error) {
		response, err := d.client.Get(d.api + "/readyz")
		if err != nil {
			return false, err
		}
		defer func() { _ = response.Body.Close() }() // read to its end below
		body, err := io.ReadAll(response.Body)
		answer = string(body)
		return response.StatusCode == http.StatusOK, err
	})
	if err != nil {
		return fmt.Errorf("not ready, reports %q: %w", answer, err)
	}
	return nil
}

// poll calls done until it returns true, fails, or ctx or the daemon ends.
func (d *daemon) poll(ctx context.Context, pause time.Duration, done func() (bool, error)) error {
	for {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		select {
		case err := <-d.exited:
			d.exited <- err
			return fmt.Errorf("the daemon ended by itself: %w", err)
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// log is the end of what the daemon wrote.
func (d *daemon) log() string {
	content, err := os.ReadFile(filepath.Join(d.dir, "log"))
	if err != nil {
		return err.Error()
	}
	return string(content[max(0, len(content)-4000):])
}

// stop ends the daemon and removes its directory.
func (d *daemon) stop() error {
	d.end()
	return os.RemoveAll(d.dir)
}

// end ends the daemon, by force if it takes too long.
func (d *daemon) end() {
	d.client.CloseIdleConnections()
	_ = d.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-d.exited:
	case <-time.After(stopLimit):
		_ = d.cmd.Process.Kill()
		<-d.exited
	}
}

func (d *daemon) pid() string { return strconv.Itoa(d.cmd.Process.Pid) }

// get sends a request to the API and returns the body of a 200.
func (d *daemon) get(ctx context.Context, path string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, d.api+path, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+d.token)
	response, err := d.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }() // read to its end below
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %.200s", path, response.Status, body)
	}
	return body, err
}

// Series of the daemon's metrics.
const (
	seriesGoroutines = "go_goroutines"
	seriesMallocs    = "go_memstats_mallocs_total"
	seriesAllocated  = "go_memstats_alloc_bytes_total"
	seriesIdle       = "go_memstats_heap_idle_bytes"
	seriesReleased   = "go_memstats_heap_released_bytes"
	seriesHeap       = "go_memstats_heap_alloc_bytes"
	seriesHeapInUse  = "go_memstats_heap_inuse_bytes"
	seriesStack      = "go_memstats_stack_inuse_bytes"
	seriesRows       = "fleetd_database_queue" // by table
	seriesEvents     = "fleetd_event_queue"
	seriesDropped    = "fleetd_events_dropped_total"
	seriesWebhooks   = "fleetd_webhooks"
)

// metrics are the daemon's, by series with labels, and summed by name.
type metrics map[string]float64

func (d *daemon) metrics(ctx context.Context) (metrics, error) {
	body, err := d.get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	return parseMetrics(string(body))
}

func parseMetrics(text string) (metrics, error) {
	m := metrics{}
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		line := lines.Text()
		cut := strings.LastIndexByte(line, ' ')
		if cut < 0 || line[0] == '#' {
			continue
		}
		value, err := strconv.ParseFloat(line[cut+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("metric %q: %w", line, err)
		}
		series := line[:cut]
		m[series] = value
		if name, _, labelled := strings.Cut(series, "{"); labelled {
			m[name] += value
		}
	}
	return m, lines.Err()
}

// ready is the number of devices whose tools are listed, whatever their transport.
func (m metrics) ready() float64 {
	return m[`fleetd_devices{mcp_state="ready",transport="`+overWebSocket+`"}`] + m[`fleetd_devices{mcp_state="ready",transport="`+overMQTT+`"}`]
}

// awaitReady waits until n devices have their tools listed.
func (d *daemon) awaitReady(ctx context.Context, n int, limit time.Duration) error {
	have := 0.0
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := d.poll(ctx, 5*time.Millisecond, func() (bool, error) {
		m, err := d.metrics(ctx)
		have = m.ready()
		return have >= float64(n), err
	})
	if err != nil {
		return fmt.Errorf("%.0f of %d devices became ready: %w", have, n, err)
	}
	return nil
}

// awaitGone waits until no device is left.
func (d *daemon) awaitGone(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return d.poll(ctx, 20*time.Millisecond, func() (bool, error) {
		m, err := d.metrics(ctx)
		return m.ready() == 0, err
	})
}

// awaitQuiet waits until rows and events are written.
func (d *daemon) awaitQuiet(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return d.poll(ctx, 10*time.Millisecond, func() (bool, error) {
		m, err := d.metrics(ctx)
		return m[seriesRows] == 0 && m[seriesEvents] == 0, err
	})
}

// collect forces garbage collections: the second one empties what pools kept over the first.
func (d *daemon) collect(ctx context.Context) error {
	for range 3 {
		if _, err := d.get(ctx, "/debug/pprof/heap?gc=1"); err != nil {
			return err
		}
	}
	return nil
}

// profile begins to save a CPU profile of the next seconds as file, and returns a function that waits for its end. An
// empty file means none.
func (d *daemon) profile(ctx context.Context, file string, seconds int) (wait func() error) {
	if file == "" {
		return func() error { return nil }
	}
	ended := make(chan error, 1)
	go func() { ended <- d.save(ctx, fmt.Sprintf("/debug/pprof/profile?seconds=%d", seconds), file) }()
	return func() error { return <-ended }
}

func (d *daemon) save(ctx context.Context, path, file string) error {
	body, err := d.get(ctx, path)
	if err != nil {
		return fmt.Errorf("profile: %w", err)
	}
	return os.WriteFile(file, body, 0o644)
}
