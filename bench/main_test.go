package main

import (
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/gobuild"
)

// Less CPU time than /proc counts does not spoil the report.
func TestPerCPU(t *testing.T) {
	if got := perCPU(400, 0); got != 40_000 {
		t.Errorf("%v packets per second of CPU for no tick, want those of one", got)
	}
	if got := perCPU(400, 2*time.Second); got != 200 {
		t.Errorf("%v packets per second of CPU, want 200", got)
	}
}

// A whole run with tiny numbers against the real program: every table has plausible figures, and nothing is left. Under
// -short it measures one of each kind; `make verify` measures all.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "fleetd")
	if err := gobuild.Build(t.Context(), ".", program, []string{"./cmd/fleetd"}); err != nil {
		t.Fatal(err)
	}
	temporary := filepath.Join(dir, "tmp")
	if err := os.Mkdir(temporary, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", temporary)
	jsonFile, mdFile, profiles := filepath.Join(dir, "report.json"), filepath.Join(dir, "report.md"), filepath.Join(dir, "profiles")
	var stdout, stderr strings.Builder
	only := measurements
	if testing.Short() {
		only = []string{"call", "storm", "udp", "scale"}
	}
	err := run(t.Context(), append(scaleArguments(), "-only", strings.Join(only, ","), "-fleetd", program, "-runs", "1", "-d", "200ms", "-callers", "8", "-devices", "20", "-idle-low", "10",
		"-idle-high", "50", "-idle-time", "300ms", "-idle-rate", "100", "-pace", "500", "-settle", "50ms", "-storm", "40", "-job-devices", "30", "-recorder-devices", "3000", "-recorder-pairs", "2", "-console-devices", "500",
		"-udp-devices", "20", "-udp-rate", "2000", "-udp-low", "3", "-udp-high", "20", "-webhook-rate", "100", "-webhook-events", "400", "-firmware-devices", "30", "-firmware-time", "500ms", "-embedded", "-quiet", "100", "-json", jsonFile, "-md", mdFile, "-profile", profiles), &stdout, &stderr)
	if err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	r := readReport(t, jsonFile)
	checkFigure(t, r, "call", figureCalls, 10, 1e6)
	checkFigure(t, r, "call", figureServerCPU, 1, 10_000)
	checkFigure(t, r, "call", figureMallocs, 10, 5000) // few calls in a short time carry what the daemon does besides
	checkFigure(t, r, "storm-embedded", figureDevices, 10, 1e5)
	checkFigure(t, r, "storm-embedded", figureDeviceP99, 0.1, 10_000)
	checkRatio(t, r, "call", figureCalls)
	checkRatio(t, r, "storm-embedded", figureDevices)
	checkRatio(t, r, "udp-embedded", figurePerCPU)
	checkScale(t, r, "sqlite")
	udp, kept := []string{"udp-embedded"}, []string{"call-1.pprof", "storm-embedded-1.pprof", "udp-embedded-1.pprof"}
	if !testing.Short() {
		checkOthers(t, r)
		udp, kept = append(udp, "udp-scale"), append(kept, "idle-embedded-heap-1.pprof", "mqtt-call-1.pprof")
	}
	for _, table := range udp {
		checkFigure(t, r, table, figurePerCPU, 10, 1e7)
		checkFigure(t, r, table, figureUnpublished, 0, 0)
		checkFigure(t, r, table, figureRejected, 0, 0)
	}
	if markdown, err := os.ReadFile(mdFile); err != nil || string(markdown) != stdout.String() || !strings.Contains(stdout.String(), "| "+figureCalls+" |") {
		t.Errorf("Markdown %q, %v; printed %q", markdown, err, &stdout)
	}
	for _, name := range kept {
		if info, err := os.Stat(filepath.Join(profiles, name)); err != nil || info.Size() == 0 {
			t.Errorf("profile %s: %v", name, err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(temporary, "fleetbench*")); err != nil || len(left) > 0 {
		t.Errorf("left over: %q, %v", left, err)
	}
}

// checkOthers checks the measurements that only a full run makes.
func checkOthers(t *testing.T, r report) {
	t.Helper()
	checkFigure(t, r, "idle-embedded", figureGoroutines, 0.7, 1.4) // 40 devices: tasks of the moment are some hundredths
	checkFigure(t, r, "pace", figureDue, 100, 1e7)
	checkRatio(t, r, "pace", figureDue)
	checkRatio(t, r, "idle-embedded", figureResident)
	checkRatio(t, r, "mqtt-idle-embedded", figureResident)
	checkFigure(t, r, "pace", figureAchieved, 10, 600)
	for _, transport := range []string{overWebSocket, overMQTT} {
		checkFigure(t, r, "idle-cpu-"+transport, figureIdleCPU, 0, 200)
		checkFigure(t, r, "idle-cpu-"+transport, figureBeside, 50, 1e7)
	}
	checkFigure(t, r, "mqtt-call", figureCalls, 10, 1e6)
	checkFigure(t, r, "jobs-sqlite", figurePrepared, 0.001, 20)
	checkFigure(t, r, "jobs-sqlite", figureIdleJobs, 0, 200)
	checkRatio(t, r, "jobs-sqlite", figureTasks)
	checkLargeJobs(t, r, "sqlite")
	checkFigure(t, r, "webhooks-sqlite", figureHooksCPU, 0, 1e6) // few events, which the ticks of the kernel may not show
	checkFigure(t, r, "webhooks-sqlite", figureHooksRate, 10, 120)
	checkFigure(t, r, "webhooks-sqlite", figurePending, 0.02, 60)
	checkFigure(t, r, "firmware-downloads", figureLoadingCPU, 0, 200)
	checkFigure(t, r, "firmware-downloads", figureTakenLeast, 1, 101)
	checkRatio(t, r, "firmware-downloads", figureBeside)
	checkRatio(t, r, "firmware-checks-sqlite", crowded+figureCheckTail)
	checkFigure(t, r, "firmware-checks-sqlite", figureOffers, 1, 10) // the default pace
	checkFigure(t, r, "mqtt-idle-embedded", figureGoroutines, 0.7, 1.4)
	checkFigure(t, r, "recorder", figureRecord, 10, 10_000)
	for _, figure := range []string{figureRecordAllocs, figureForgotten, figureEvicted} {
		checkFigure(t, r, "recorder", figure, 0, 0)
	}
	checkFigure(t, r, "recorder", figureRecorderHeap, 0.1, 64)
	if _, err := exec.LookPath("chromium-headless-shell"); err == nil {
		for _, l := range consoleLines {
			checkFigure(t, r, "console", l.name, -100, 60_000) // a heap may shrink
		}
		checkFigure(t, r, "console", figureConsoleBinary, 100, 10_000)
	}
	checkFigure(t, r, "recorder-call", figureServerCPU, 1, 10_000)
	checkRatio(t, r, "recorder-call", figureServerCPU)
}

// checkRatio checks that a figure was measured beside its baseline.
func checkRatio(t *testing.T, r report, table, name string) {
	t.Helper()
	for _, m := range r.Measurements {
		for _, f := range m.Figures {
			if m.Name == table && f.Name == name && f.Baseline != nil && f.Ratio != nil {
				return
			}
		}
	}
	t.Errorf("%s has no ratio of %q to a baseline", table, name)
}

func checkFigure(t *testing.T, r report, table, name string, low, high float64) {
	t.Helper()
	for _, m := range r.Measurements {
		if m.Name != table {
			continue
		}
		for _, f := range m.Figures {
			if f.Name == name {
				if f.Fleetd.Median < low || f.Fleetd.Median > high {
					t.Errorf("%s, %s is %v, want %v to %v", table, name, f.Fleetd.Median, low, high)
				}
				return
			}
		}
	}
	t.Errorf("the report has no %q in %q", name, table)
}

func TestOptions(t *testing.T) {
	o, err := parseOptions(nil, io.Discard)
	if err != nil || !slices.Equal(o.only, measurements) || o.runs != 5 {
		t.Errorf("defaults: %+v, %v", o, err)
	}
	o, err = parseOptions([]string{"-only", "storm,call", "-runs", "3"}, io.Discard)
	if err != nil || !slices.Equal(o.only, []string{"storm", "call"}) || o.runs != 3 {
		t.Errorf("given: %+v, %v", o, err)
	}
	for _, bad := range [][]string{{"-only", "calls"}, {"-only", ""}, {"-runs", "0"}, {"-idle-low", "20", "-idle-high", "20"}, {"-udp-rate", "-1"}, {"-udp-low", "9", "-udp-high", "9"}, {"extra"}, {"-unknown"}, {"-pace", "0"}, {"-kill", "2"}, {"-scale-devices", "5000"}, {"-scale-devices", "100000000"}, {"-scale-on", "mysql"},
		{"-scale-firings", "-1"}, {"-webhook-rate", "0"}, {"-webhook-events", "0"}, {"-firmware-devices", "0"}, {"-firmware-time", "0s"}, {"-firmware-time", "2m"}} {
		if _, err := parseOptions(bad, io.Discard); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// A disturbed run is repeated, and the least disturbed one counts.
func TestQuietly(t *testing.T) {
	for _, tc := range []struct {
		others []float64
		runs   int
		want   float64
	}{{[]float64{3}, 1, 0}, {[]float64{40, 5}, 2, 1}, {[]float64{40, 20, 30}, 3, 1}} {
		b := &bench{opt: options{quiet: 15}, out: io.Discard}
		runs, into := 0, samples{}
		err := b.quietly("x", into, func(s samples) error {
			s.add("run", float64(runs))
			s.add(figureOthers, tc.others[runs])
			runs++
			return nil
		})
		if err != nil || runs != tc.runs || !slices.Equal(into["run"], []float64{tc.want}) {
			t.Errorf("%v: %d runs, kept %v, %v", tc.others, runs, into["run"], err)
		}
	}
}

func TestFit(t *testing.T) {
	o := options{devices: 1000, idleLow: 5000, idleHigh: 15000, storm: 15000, kill: 9000, udpDevices: 4096, udpLow: 100, udpHigh: 5000}
	if changes := o.fit(20_000); len(changes) != 0 || o.storm != 15000 {
		t.Errorf("enough files: %q, %+v", changes, o)
	}
	changes := o.fit(4000 + reserveFiles)
	if len(changes) != 5 || o.kill != 1494 || o.storm != 4000 || o.idleHigh != 4000 || o.idleLow != 1333 || o.devices != 1000 || o.udpDevices != 4000 || o.udpLow != 80 || o.udpHigh != 4000 {
		t.Errorf("few files: %q, %+v", changes, o)
	}
}

func TestSpread(t *testing.T) {
	cases := []struct {
		values           []float64
		low, mid, high   float64
		text             string
		precision        int
		ratiosOf, ratios []float64
	}{
		{values: []float64{3, 1, 2}, low: 1, mid: 2, high: 3, text: "1 / 2 / 3", ratiosOf: []float64{6, 2, 1}, ratios: []float64{0.5, 0.5, 2}},
		{values: []float64{4, 1}, low: 1, mid: 2.5, high: 4, text: "1.0 / 2.5 / 4.0", precision: 1, ratiosOf: []float64{8, 0}, ratios: []float64{0.5}},
	}
	for _, tc := range cases {
		s := spreadOf(tc.values)
		if *s != (spread{tc.low, tc.mid, tc.high}) || s.text(tc.precision) != tc.text {
			t.Errorf("%v: %+v, %q", tc.values, s, s.text(tc.precision))
		}
		if r := ratios(tc.values, tc.ratiosOf); !slices.Equal(r, tc.ratios) {
			t.Errorf("%v over %v: %v", tc.values, tc.ratiosOf, r)
		}
	}
	if spreadOf(nil) != nil || (*spread)(nil).text(1) != "" {
		t.Error("no values must make no text")
	}
}

func TestJudge(t *testing.T) {
	cases := []struct {
		fleetd, baseline []float64
		goal             goal
		want             string
	}{
		{[]float64{76}, []float64{100}, goal{ratioAtLeast, 0.75}, "ratio at least 0.75: met"},
		{[]float64{74}, []float64{100}, goal{ratioAtLeast, 0.75}, "ratio at least 0.75: missed"},
		{[]float64{74}, nil, goal{ratioAtLeast, 0.75}, "ratio at least 0.75"},
		{[]float64{9.4}, nil, goal{atMost, 9.5}, "at most 9.5: met"},
		{[]float64{6000, 7000}, nil, goal{atLeast, 6500}, "at least 6500: met"},
		{[]float64{6000, 6900}, nil, goal{atLeast, 6500}, "at least 6500: missed"},
		{[]float64{9.6}, nil, goal{atMost, 9.5}, "at most 9.5: missed"},
		{[]float64{1, 1, 5}, nil, goal{atMostEver, 5}, "in every run at most 5: met"},
		{[]float64{0, 0, 1}, nil, goal{Kind: atMostEver}, "in every run at most 0: missed"},
		{[]float64{15}, []float64{10}, goal{ratioAtMost, 1.5}, "ratio at most 1.5: met"},
		{[]float64{16}, []float64{10}, goal{ratioAtMost, 1.5}, "ratio at most 1.5: missed"},
		{[]float64{16}, nil, goal{ratioAtMost, 1.5}, "ratio at most 1.5"},
	}
	for _, tc := range cases {
		m := measurement{}
		m.tabulate(samples{"x": tc.fleetd}, samples{"x": tc.baseline}, []line{{name: "x", goal: &tc.goal}})
		if len(m.Figures) != 1 || m.Figures[0].goalText() != tc.want {
			t.Errorf("%v beside %v: %+v", tc.fleetd, tc.baseline, m.Figures)
		}
	}
}

func TestReading(t *testing.T) {
	const output = "  run 0: goroutines 7\nhttp=net json=append: 30000 / 31000 / 32000 calls/s | p50 1.5 / 1.6 / 1.7 us | allocs 43.0 / 43.1 / 43.2\n"
	for _, tc := range []struct {
		before, after string
		want          float64
	}{{": ", " calls/s", 31000}, {"p50 ", " us", 1.6}, {"allocs ", "", 43.1}} {
		if got, err := reading(output, tc.before, tc.after); err != nil || got != tc.want {
			t.Errorf("%q: %v, %v, want %v", tc.before, got, err, tc.want)
		}
	}
	if _, err := reading(output, "p99 ", " us"); err == nil {
		t.Error("a figure that is not printed is read")
	}
}

func TestParseMetrics(t *testing.T) {
	m, err := parseMetrics("# HELP x y\nx{a=\"1 2\"} 3\nx{a=\"4\"} 4.5\ngo_goroutines 1.2e+03\n")
	if err != nil || m["x"] != 7.5 || m[`x{a="1 2"}`] != 3 || m["go_goroutines"] != 1200 {
		t.Errorf("%v, %v", m, err)
	}
	if _, err := parseMetrics("x one\n"); err == nil {
		t.Error("a value that is not a number is accepted")
	}
}

// A daemon that ends by itself is reported with its output, and leaves nothing.
func TestDaemonThatFails(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	program := filepath.Join(dir, "failing")
	if err := os.WriteFile(program, []byte("#!/bin/sh\necho the port is taken >&2\nexit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := startDaemon(t.Context(), program)
	if err == nil || !strings.Contains(err.Error(), "the port is taken") {
		t.Errorf("error %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "fleetbench*")); err != nil || len(left) > 0 {
		t.Errorf("left over: %q, %v", left, err)
	}
}

// readReport reads what -json wrote.
func readReport(t *testing.T, file string) (r report) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(content, &r); err != nil {
		t.Fatal(err)
	}
	return r
}
