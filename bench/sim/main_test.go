package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fleetd/bench/services"
)

// TestMain lets the simulation start this program as a NATS server.
func TestMain(m *testing.M) {
	if err := services.Serve(os.Args, servers); services.Served(err) {
		if err != nil {
			panic(err) // the test that started it fails
		}
		return
	}
	os.Exit(m.Run())
}

// A whole run with few devices: figures are plausible, every device of the dead node is reached, and nothing is left.
func TestRun(t *testing.T) {
	postgres, err := services.FindPostgres(t.Context())
	if err != nil {
		t.Skipf("NOT RUN: no Postgres: %v", err)
	}
	databases := func() (n int) {
		if err := postgres.Query(t.Context(), `SELECT count(*) FROM pg_database WHERE datname LIKE 'fleetd\_sim\_%'`, &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := databases()
	dir := t.TempDir()
	temporary := filepath.Join(dir, "tmp")
	if err := os.Mkdir(temporary, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", temporary)
	jsonFile := filepath.Join(dir, "report.json")
	var stdout, stderr strings.Builder
	err = run(t.Context(), []string{"-nodes", "3", "-devices", "20", "-rate", "200", "-return-rate", "100", "-sample", "10", "-calls", "20", "-idle", "300ms", "-lease", "5s",
		"-json", jsonFile, "-profile", filepath.Join(dir, "profiles")}, &stdout, &stderr)
	if err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	content, err := os.ReadFile(jsonFile)
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(content, &r); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]float64{"subscriptions on the nodes, together": 1, "subscriptions on each NATS server, most": 1, "connecting: claims sent": 1, "connecting: claims received": 2} {
		found := false
		for _, f := range r.Figures {
			if f.Name == name {
				found = true
				if last := f.Slopes[len(f.Slopes)-1]; last < 0.9*want || last > 1.5*want { // sweeps claim a few of them again
					t.Errorf("%s: %v per device, want %v", name, last, want)
				}
			}
		}
		if !found {
			t.Errorf("the report has no %q", name)
		}
	}
	if l := r.Loss; l == nil || l.Devices != 20 || l.Returned != 18 || l.Online != 58 || l.Callable.N < 10 || l.Cleared < 1 {
		t.Errorf("loss: %+v", r.Loss)
	}
	if !strings.Contains(stdout.String(), "| routed call, p50, ms |") {
		t.Errorf("printed %q", &stdout)
	}
	if left, err := os.ReadDir(temporary); err != nil || len(left) > 0 || databases() > before {
		t.Errorf("left over: %v, %v, %d databases", left, err, databases()-before)
	}
}

func TestOptions(t *testing.T) {
	if o, err := parseOptions(nil, io.Discard); err != nil || o.nodes != 20 || o.devices != 10_000 {
		t.Errorf("defaults: %+v, %v", o, err)
	}
	for _, bad := range [][]string{{"-nodes", "2"}, {"-devices", "0"}, {"-nats", "2"}, {"-away", "60"}, {"-idle", "0"}, {"extra"}} {
		if _, err := parseOptions(bad, io.Discard); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// An interrupted run drops its database, too.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	interrupted := errors.New("interrupted")
	time.AfterFunc(50*time.Millisecond, func() { cancel(interrupted) })
	t.Setenv("TMPDIR", t.TempDir())
	if err := run(ctx, []string{"-nodes", "3", "-devices", "4"}, io.Discard, io.Discard); err == nil {
		t.Error("it ran to its end")
	}
	if left, err := os.ReadDir(os.Getenv("TMPDIR")); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}

func TestFlat(t *testing.T) {
	for _, tc := range []struct {
		slopes []float64
		want   bool
	}{{[]float64{10, 10, 12}, true}, {[]float64{10, 10, 13}, false}, {[]float64{10, 2, 1}, true}, {[]float64{0, 0, 0.001}, true}} {
		f := figure{Slopes: tc.slopes, slope: 1}
		if f.judge(0.25); *f.Flat != tc.want {
			t.Errorf("%v: flat is %v", tc.slopes, *f.Flat)
		}
	}
}
