package main

import (
	"encoding/csv"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"

	"fleetd/internal/fleetbench/load"
)

// No two known devices have the same id, none that of a device that connects, and their order is not that of the file.
func TestKnownID(t *testing.T) {
	const n = 200_000
	seen, ascending := make(map[string]bool, n), 0
	for i := range n {
		id := knownID(i)
		if parsed, err := devices.ParseID(id); err != nil || string(parsed) != id || seen[id] || !strings.HasPrefix(id, "06:") {
			t.Fatalf("device %d is %q, %v", i, id, err)
		}
		seen[id] = true
		if i > 0 && knownID(i-1) < id {
			ascending++
		}
	}
	if ascending < n*2/5 || ascending > n*3/5 {
		t.Errorf("%d of %d ids follow the one before", ascending, n)
	}
	random := rand.New(rand.NewPCG(1, 1))
	for range 100 {
		if id := middleID(random); id < "06:66" || id > "06:99:99:99:99:99" {
			t.Errorf("%q is not in the middle", id)
		}
	}
}

func TestWriteDevices(t *testing.T) {
	file := filepath.Join(t.TempDir(), "devices.csv")
	if err := writeDevices(file, 3, 12, 5); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil || len(rows) != 1+9 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	for at, want := range map[int][]string{
		1: {load.DeviceID(3), "Speaker 0000003", "", clientID(3), "asset-0000003", "production", "site-003"},
		4: {knownID(6), "Speaker 0000006", "", clientID(6), "asset-0000006", "production", "site-006"},
		7: {knownID(9), "Speaker 0000009", "", clientID(9), "asset-0000009", "", "site-009"},
		9: {knownID(11), "Speaker 0000011", overWebSocket, clientID(11), "asset-0000011", "production", "site-011"},
	} {
		if !slices.Equal(rows[at], want) {
			t.Errorf("line %d is %q, want %q", at+1, rows[at], want)
		}
	}
}

// Every kind of request has a name of its own, a goal, and cursors that the list takes.
func TestScaleRequests(t *testing.T) {
	names := map[string]bool{}
	for _, r := range scaleRequests(1000, 100, time.Now()) {
		if names[r.name] || r.p50+r.p99 == 0 {
			t.Errorf("%q: twice, or without a goal", r.name)
		}
		names[r.name] = true
		if r.query == nil {
			continue
		}
		q := r.query("")
		if _, err := devices.ParseCursor(q.Get("cursor"), devices.Sort(q.Get("sort"))); err != nil {
			t.Errorf("%q: %v", r.name, err)
		}
		if middle := strings.HasSuffix(r.name, ", middle"); middle != q.Has("cursor") {
			t.Errorf("%q: cursor %q", r.name, q.Get("cursor"))
		}
	}
}

func TestTimingGoals(t *testing.T) {
	for _, tc := range []struct {
		timing
		want string
	}{
		{timing{P50: 5, P99: 50, GoalP50: 5, GoalP99: 50}, "p50 at most 5, p99 at most 50: met"},
		{timing{P50: 6, P99: 50, GoalP50: 5, GoalP99: 50}, "p50 at most 5, p99 at most 50: missed"},
		{timing{P50: 6, P99: 101, GoalP99: 100}, "p99 at most 100: missed"},
		{timing{P50: 4, P99: 900, GoalP50: 5}, "p50 at most 5: met"},
	} {
		if got := tc.goalText(); got != tc.want {
			t.Errorf("%+v: %q", tc.timing, got)
		}
	}
}

// scaleArguments are those of a short run at scale.
func scaleArguments() []string {
	n := "20000"
	if testing.Short() {
		n = "2000"
	}
	return []string{"-scale-devices", n, "-scale-storm", "60", "-scale-requests", "8", "-scale-idle", "300ms", "-scale-settle", "50ms"}
}

// checkScale checks the figures at scale on one database.
func checkScale(t *testing.T, r report, database string) {
	t.Helper()
	checkFigure(t, r, "scale-"+database, figureEmpty, 10, 500)
	checkFigure(t, r, "scale-"+database, figureImport, 10, 1e6)
	checkFigure(t, r, "scale-"+database, figureEditRefused, 0, 0)
	checkFigure(t, r, "scale-"+database, figureReadyz, 0.001, 60)
	checkFigure(t, r, "scale-"+database, figureReadyz0, 0.001, 60)
	checkFigure(t, r, "scale-storm-"+database, figureStormCPU, 0.01, 60)
	for _, m := range r.Measurements {
		if m.Name != "scale-lists-"+database {
			continue
		}
		rows := map[string]float64{}
		for _, request := range m.Requests {
			rows[request.Name] = request.Rows
		}
		for name, want := range map[string][2]float64{"all": {100, 100}, "all, middle": {100, 100}, "state=offline, middle": {100, 100}, "env=…": {100, 100}, "reason=…,state=offline": {100, 100},
			"site=…": {1, 100}, "board=…": {50, 100}, "firmware=…": {10, 100}, "node=…": {60, 60}, "transport=…, middle": {10, 59}, "sort=last_seen": {100, 100},
			"sort=offline_since, middle": {100, 100}, "sort=name, middle": {100, 100}, "chip=none: finds nothing": {0, 0}, "q=… rare": {0.01, 1}, "q=nothing: finds nothing": {0, 0}} {
			if got, there := rows[name]; !there || got < want[0] || got > want[1] {
				t.Errorf("%s has pages of %v rows, want %v; listed: %v", name, got, want, there)
			}
		}
		return
	}
	t.Errorf("the report has no lists of %s", database)
}

// TestScaleOnPostgres is the part of TestRun that needs Postgres.
func TestScaleOnPostgres(t *testing.T) {
	if testing.Short() {
		t.Skip("IN VERIFY: takes a minute")
	}
	if os.Getenv("FLEETD_TEST_POSTGRES") == "" {
		t.Skip("NOT RUN: no FLEETD_TEST_POSTGRES")
	}
	dir := t.TempDir()
	program, jsonFile := filepath.Join(dir, "fleetd"), filepath.Join(dir, "report.json")
	if output, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "fleetd/cmd/fleetd").CombinedOutput(); err != nil {
		t.Fatalf("build fleetd: %v\n%s", err, output)
	}
	t.Setenv("TMPDIR", dir)
	var stdout, stderr strings.Builder
	if err := run(t.Context(), append(scaleArguments(), "-only", "scale", "-scale-on", "postgres", "-fleetd", program, "-runs", "1", "-json", jsonFile), &stdout, &stderr); err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	r := readReport(t, jsonFile)
	checkScale(t, r, "postgres")
	for _, figure := range []string{figureIdleRows, figureIdleRead, figureIdleCommits} {
		checkFigure(t, r, "scale-postgres", figure, 0, 1e6)
	}
	if want := fmt.Sprintf("| %s |", figureImport); !strings.Contains(stdout.String(), want) || !strings.Contains(stdout.String(), "| state=offline | ") {
		t.Errorf("printed %q", &stdout)
	}
}
