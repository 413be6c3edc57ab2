package main

import (
	"encoding/csv"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"fleetd/internal/devices"
	"fleetd/internal/gobuild"

	"fleetd/bench/load"
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

// testScale is how many known devices the short runs at scale have; their sites are 500.
const testScale = 5000

// scaleArguments are those of a short run at scale.
func scaleArguments() []string {
	return []string{"-scale-devices", strconv.Itoa(testScale), "-scale-storm", "60", "-scale-idle", "300ms", "-scale-settle", "50ms", "-scale-firings", "0"}
}

// checkScale checks the figures at scale on one database.
func checkScale(t *testing.T, r report, database string) {
	t.Helper()
	checkFigure(t, r, "scale-"+database, figureEmpty, 10, 500)
	checkFigure(t, r, "scale-"+database, figureImport, 10, 1e6)
	checkFigure(t, r, "scale-"+database, figureEditRefused, 0, 1e6) // beside other programs a database may be too slow for some
	checkFigure(t, r, "scale-"+database, figureReadyz, 0.001, 60)
	checkFigure(t, r, "scale-"+database, figureReadyz0, 0.001, 60)
	checkFigure(t, r, "scale-storm-"+database, figureStormCPU, 0.01, 60)
}

// checkLargeJobs checks the figures of large jobs on one database.
func checkLargeJobs(t *testing.T, r report, database string) {
	t.Helper()
	table := "scale-jobs-" + database
	for _, figure := range []string{figureCancelRows, figureFollowRows} {
		checkFigure(t, r, table, figure, testScale*220/500, testScale*220/500) // 220 sites
	}
	checkFigure(t, r, table, figureFiringsLost, 0, 0)
	checkFigure(t, r, table, figureCancelRequest, 0.001, 30)
	checkFigure(t, r, table, figureCancelTime, 0.001, 60)
	for _, figure := range []string{figureLargeTail, figureHeapInUse, figureRoutines} {
		checkRatio(t, r, table, figure)
	}
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
	if err := gobuild.Build(t.Context(), ".", program, []string{"./cmd/fleetd"}); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", dir)
	var stdout, stderr strings.Builder
	if err := run(t.Context(), append(scaleArguments(), "-only", "scale,scale-jobs", "-scale-on", "postgres", "-fleetd", program, "-runs", "1", "-d", "200ms", "-idle-rate", "100", "-json", jsonFile), &stdout, &stderr); err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	r := readReport(t, jsonFile)
	checkScale(t, r, "postgres")
	checkLargeJobs(t, r, "postgres")
	for _, figure := range []string{figureIdleRows, figureIdleRead, figureIdleCommits} {
		checkFigure(t, r, "scale-postgres", figure, 0, 1e6)
	}
	if want := fmt.Sprintf("| %s |", figureImport); !strings.Contains(stdout.String(), want) {
		t.Errorf("printed %q", &stdout)
	}
}
