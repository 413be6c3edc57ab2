package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"fleetd/bench/load"
)

// Figures of a node with many known devices.
const (
	figureEmpty       = "resident memory of an empty node, MB"
	figureImport      = "import, rows/s"
	figureEdit        = "single edits during the import, p50, ms"
	figureEditP99     = "single edits during the import, p99, ms"
	figureEdits       = "single edits made"
	figureEditRefused = "single edits refused"
	figureListening   = "start with its snapshot: API port listens, s"
	figureAnswers     = "start with its snapshot: API answers, s"
	figureReadyz      = "start with its snapshot: /readyz is 200, s"
	figureListening0  = "start without a snapshot: API port listens, s"
	figureAnswers0    = "start without a snapshot: API answers, s"
	figureReadyz0     = "start without a snapshot: /readyz is 200, s"
	figureKnown       = "resident memory above an empty node, MB"
	figureKnownKept   = "the same after garbage collection, MB"
	figureKnown0      = "resident memory above an empty node, started without a snapshot, MB"
	figureIdleRows    = "idle node: rows written, its lease excepted"
	figureIdleLease   = "idle node: rows written of its lease"
	figureIdleCommits = "idle node: transactions, this reading's one included"
	figureIdleRead    = "idle node: rows read"
	figureIdleFiles   = "idle node: files of the database written"
	figureIdleBytes   = "idle node: bytes written to files by its process"
)

var scaleLines = func(postgres bool) []line {
	rows := 4000.0
	if postgres {
		rows = 6000
	}
	most := func(n float64) *goal { return &goal{atMost, n} }
	return []line{
		{name: figureEmpty, precision: 1}, {name: figureImport, goal: &goal{atLeast, rows}}, {name: figureEdit, precision: 1}, {name: figureEditP99, precision: 1, goal: most(100)},
		{name: figureEdits}, {name: figureEditRefused, goal: most(0)},
		{name: figureListening, precision: 2, goal: most(2)}, {name: figureAnswers, precision: 2}, {name: figureReadyz, precision: 2, goal: most(5)},
		{name: figureListening0, precision: 2, goal: most(2)}, {name: figureAnswers0, precision: 2}, {name: figureReadyz0, precision: 2, goal: most(5)},
		{name: figureKnown, precision: 1, goal: most(100)}, {name: figureKnownKept, precision: 1}, {name: figureKnown0, precision: 1, goal: most(100)},
		{name: figureIdleRows, goal: most(0)}, {name: figureIdleLease}, {name: figureIdleCommits}, {name: figureIdleRead},
		{name: figureIdleFiles, goal: most(0)}, {name: figureIdleBytes},
	}
}

const (
	scaleStart = 5 * time.Minute // limit, so that a slow start is a figure and not the end
	editEvery  = 50 * time.Millisecond
	megabyte   = 1e6
)

// measureScale measures what many known devices cost a node that has few or no connections.
func (b *bench) measureScale(ctx context.Context) error { return b.atScale(ctx, b.scaleOn) }

// atScale makes a measurement with the files of many devices on each database.
func (b *bench) atScale(ctx context.Context, measure func(ctx context.Context, postgres bool, storm, rest string) error) error {
	var kinds []bool
	if b.opt.scaleOn != "postgres" {
		kinds = append(kinds, false)
	}
	if b.opt.scaleOn != "sqlite" && b.postgres != nil {
		kinds = append(kinds, true)
	}
	files := map[string]string{"storm": filepath.Join(b.dir, "storm.csv"), "rest": filepath.Join(b.dir, "rest.csv")}
	if err := errors.Join(writeDevices(files["storm"], 0, b.opt.scaleStorm, b.opt.scaleStorm), writeDevices(files["rest"], b.opt.scaleStorm, b.opt.scale, b.opt.scaleStorm)); err != nil {
		return err
	}
	for _, postgres := range kinds {
		if err := measure(ctx, postgres, files["storm"], files["rest"]); err != nil {
			return err
		}
	}
	return nil
}

// databaseNames returns the name of a database in names of measurements, and in titles.
func databaseNames(postgres bool) (name, title string) {
	if postgres {
		return "postgres", "Postgres"
	}
	return "sqlite", "SQLite"
}

// scaleOn measures on one database.
func (b *bench) scaleOn(ctx context.Context, postgres bool, storm, rest string) (err error) {
	name, title := databaseNames(postgres)
	begun := time.Now()
	many, err := b.newKnown(ctx, "scale-"+name, postgres)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, many.remove()) }()
	few, err := b.newKnown(ctx, "scale-"+name, postgres)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, few.remove()) }()

	into := samples{}
	if err := many.fillIn(ctx, storm, rest, into); err != nil {
		return fmt.Errorf("%s: fill in: %w", many.name, err)
	}
	if err := many.restarts(ctx, into); err != nil {
		return fmt.Errorf("%s: start: %w", many.name, err)
	}
	if err := few.run(ctx, func(d *daemon) error { _, err := few.load(ctx, d, storm); return err }); err != nil {
		return fmt.Errorf("%s: the smaller fleet: %w", few.name, err)
	}
	fleetd, baseline := samples{}, samples{}
	if err := b.storms(ctx, many, few, into, fleetd, baseline); err != nil {
		return fmt.Errorf("%s: storm: %w", many.name, err)
	}
	m := measurement{Name: "scale-" + name, Title: fmt.Sprintf("A node with %d known devices, %s, NATS embedded", b.opt.scale, title)}
	m.tabulate(into, nil, scaleLines(postgres))
	b.add(m)
	m = measurement{Name: "scale-storm-" + name, Title: fmt.Sprintf("%d devices boot and connect over MQTT, %s: to a node with %d known devices, beside one with only these",
		b.opt.scaleStorm, title, b.opt.scale)}
	m.tabulate(fleetd, baseline, scaleStormLines)
	b.add(m)
	fmt.Fprintf(b.out, "%s: %v in all\n", many.name, time.Since(begun).Round(time.Second))
	return nil
}

// known is a fleet of known devices, in a data directory and a database that remain between runs of its node.
type known struct {
	b        *bench
	name     string
	dir      string
	database string // URL of Postgres; empty: SQLite
	drop     func() error
	port     string // of the API
	settings []string
	starts   []bootTimes
}

func (b *bench) newKnown(ctx context.Context, name string, postgres bool) (k *known, err error) {
	k = &known{b: b, name: name, drop: func() error { return nil }}
	if k.port, err = freePort(); err != nil {
		return nil, err
	}
	if k.dir, err = os.MkdirTemp("", "fleetbench"); err != nil {
		return nil, err
	}
	k.settings = []string{"--node", "bench", "--api-listen", k.port, "--members-limit", strconv.Itoa(max(1_000_000, b.opt.scale))}
	if postgres {
		if k.database, k.drop, err = b.postgres.Create(ctx, "fleetd_bench_"); err != nil {
			return nil, errors.Join(err, os.RemoveAll(k.dir))
		}
		k.settings = append(k.settings, "--database", k.database)
	}
	return k, nil
}

func (k *known) remove() error { return errors.Join(k.drop(), os.RemoveAll(k.dir)) }

func (k *known) progress(format string, args ...any) {
	fmt.Fprintf(k.b.out, k.name+": "+format+"\n", args...)
}

// open opens the database beside the node.
func (k *known) open() (*sql.DB, error) {
	if k.database != "" {
		return sql.Open("pgx", k.database)
	}
	return sql.Open("sqlite", "file:"+filepath.Join(k.dir, "fleetd.db")+"?_pragma=busy_timeout(5000)")
}

// run starts a node, uses it, and ends it.
func (k *known) run(ctx context.Context, use func(d *daemon) error) error {
	d, times, err := k.start(ctx)
	if err != nil {
		return err
	}
	k.starts = append(k.starts, times)
	defer d.end()
	if err := use(d); err != nil {
		return fmt.Errorf("%w\n%s", err, d.log())
	}
	return nil
}

// memory is what the node occupies after a rest, in MB.
func (k *known) memory(ctx context.Context, d *daemon) (float64, error) {
	return k.memoryAfter(ctx, d, k.b.opt.scaleSettle)
}

func (k *known) memoryAfter(ctx context.Context, d *daemon, pause time.Duration) (float64, error) {
	if err := rest(ctx, pause); err != nil {
		return 0, err
	}
	n, err := ownMemory(d.cmd.Process.Pid)
	return float64(n) / megabyte, err
}

// memoryKept is memory after garbage collection.
func (k *known) memoryKept(ctx context.Context, d *daemon) (float64, error) {
	if err := d.collect(ctx); err != nil {
		return 0, err
	}
	return k.memoryAfter(ctx, d, k.b.opt.scaleSettle/5)
}

// imported is the line in which `fleetd devices import` reports what became of a file.
var imported = regexp.MustCompile(`(?m)^(\d+) rows: (\d+) created`)

// load imports a file, and returns how many rows of it were imported per second.
func (k *known) load(ctx context.Context, d *daemon, file string) (rate float64, err error) {
	begun := time.Now()
	cmd := exec.CommandContext(ctx, k.b.opt.program, "devices", "import", file, "--api", d.api, "--token", d.token)
	cmd.Env = withoutFleetd(os.Environ())
	output, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("fleetd devices import: %w\n%.2000s", err, output)
	}
	report := imported.FindSubmatch(output)
	if report == nil || string(report[1]) != string(report[2]) {
		return 0, fmt.Errorf("fleetd devices import did not create a device for each row: %.2000s", output)
	}
	rows, err := strconv.Atoi(string(report[1]))
	return float64(rows) / time.Since(begun).Seconds(), err
}

// fillIn makes the known devices, and measures the empty node, the import, and edits during it.
func (k *known) fillIn(ctx context.Context, storm, others string, into samples) error {
	err := k.run(ctx, func(d *daemon) error {
		empty, err := k.memory(ctx, d)
		if err != nil {
			return err
		}
		into.add(figureEmpty, empty)
		if _, err := k.load(ctx, d, storm); err != nil { // the devices that are edited during the rest
			return err
		}
		editing, stop := context.WithCancel(ctx)
		edited := make(chan editTimes, 1)
		go func() { edited <- editEvenly(editing, d, k.b.opt.scaleStorm) }()
		rate, err := k.load(ctx, d, others)
		stop()
		e := <-edited
		if err != nil {
			return err
		}
		if e.fault != nil {
			k.progress("%d edits failed, the first of them: %v", e.refused, e.fault)
		}
		slices.Sort(e.took)
		into.add(figureImport, rate)
		into.add(figureEdit, milliseconds(load.Quantile(e.took, 0.5)))
		into.add(figureEditP99, milliseconds(load.Quantile(e.took, 0.99)))
		into.add(figureEdits, float64(len(e.took)))
		into.add(figureEditRefused, float64(e.refused))
		k.progress("%.0f rows/s, p99 of %d edits %v", rate, len(e.took), load.Quantile(e.took, 0.99).Round(time.Millisecond))
		return nil
	})
	if err != nil {
		return err
	}
	return k.describe(ctx)
}

// describe writes what devices report of themselves, with the node stopped.
func (k *known) describe(ctx context.Context) error {
	begun := time.Now()
	db, err := k.open()
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }() // nothing is written any more
	if err := fill(ctx, db, k.database != "", begun.Unix()); err != nil {
		return err
	}
	devices, filled, err := countKnown(ctx, db)
	if err != nil {
		return err
	}
	if devices != k.b.opt.scale || filled != devices-k.b.opt.scaleStorm {
		return fmt.Errorf("the database has %d devices, %d of them filled in, want %d and %d", devices, filled, k.b.opt.scale, k.b.opt.scale-k.b.opt.scaleStorm)
	}
	k.progress("boards, firmware and presence of %d devices written in %v", filled, time.Since(begun).Round(time.Second))
	return nil
}

func milliseconds(d time.Duration) float64 { return d.Seconds() * 1e3 }

// editTimes are how long single edits took, failed ones included.
type editTimes struct {
	took    []time.Duration
	refused int
	fault   error
}

// editEvenly renames one of the first devices every 50 ms until ctx ends, without waiting for earlier edits.
func editEvenly(ctx context.Context, d *daemon, devices int) (e editTimes) {
	client := http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}, Timeout: time.Minute}
	defer client.CloseIdleConnections()
	var mu sync.Mutex
	var wg sync.WaitGroup
	defer wg.Wait()
	ticker := time.NewTicker(editEvery)
	defer ticker.Stop()
	for i := 0; ; i++ {
		due := time.Now()
		wg.Go(func() {
			err := d.edit(&client, load.DeviceID(i%devices), fmt.Sprintf(`{"name":"Edited %d"}`, i))
			took := time.Since(due)
			mu.Lock()
			defer mu.Unlock()
			e.took = append(e.took, took)
			if err != nil {
				if e.refused++; e.fault == nil {
					e.fault = err
				}
			}
		})
		select {
		case <-ctx.Done():
			return e
		case <-ticker.C:
		}
	}
}

// edit changes a device.
func (d *daemon) edit(client *http.Client, device, change string) error {
	request, err := http.NewRequest(http.MethodPatch, d.api+"/v1/devices/"+device, strings.NewReader(change))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+d.token)
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }() // read to its end below
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("PATCH %s: %s: %.300s", device, response.Status, body)
	}
	return err
}

// restarts measures the node with all devices: its start with and without a snapshot, its memory, what it does when
// idle.
func (k *known) restarts(ctx context.Context, into samples) error {
	err := k.run(ctx, func(d *daemon) error {
		resident, err := k.memory(ctx, d)
		if err != nil {
			return err
		}
		into.add(figureKnown, resident-into[figureEmpty][0])
		if err := k.idle(ctx, d, into); err != nil {
			return err
		}
		if resident, err = k.memoryKept(ctx, d); err != nil {
			return err
		}
		into.add(figureKnownKept, resident-into[figureEmpty][0])
		t := k.starts[len(k.starts)-1]
		k.progress("listens after %v, ready after %v; %.1f MB above an empty node, %.1f after garbage collection", t.listens.Round(time.Millisecond), t.ready.Round(time.Millisecond),
			into[figureKnown][0], into[figureKnownKept][0])
		return nil
	})
	if err != nil {
		return err
	}
	k.add(into)
	for _, file := range []string{"registry.snapshot", "registry.changes"} {
		if err := os.Remove(filepath.Join(k.dir, file)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return k.run(ctx, func(d *daemon) error {
		t := k.starts[len(k.starts)-1]
		into.add(figureListening0, t.listens.Seconds())
		into.add(figureAnswers0, t.answers.Seconds())
		into.add(figureReadyz0, t.ready.Seconds())
		resident, err := k.memory(ctx, d)
		if err == nil {
			into.add(figureKnown0, resident-into[figureEmpty][0])
			k.progress("without a snapshot: listens after %v, ready after %v, %.1f MB", t.listens.Round(time.Millisecond), t.ready.Round(time.Millisecond), into[figureKnown0][0])
		}
		return err
	})
}

// add adds the times of the last start, one with a snapshot.
func (k *known) add(into samples) {
	t := k.starts[len(k.starts)-1]
	into.add(figureListening, t.listens.Seconds())
	into.add(figureAnswers, t.answers.Seconds())
	into.add(figureReadyz, t.ready.Seconds())
}
