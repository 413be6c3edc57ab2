package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"time"

	"fleetd/bench/load"
	"fleetd/internal/api"
)

const (
	benchJobs  = 10   // at once, each for all devices
	idleJobs   = 1000 // the most that may be open
	jobsPause  = 50 * time.Millisecond
	jobsLimit  = 30 * time.Minute
	neverRate  = "1/h"
	everything = "device=*"
)

// Figures of jobs. The baseline of tasks are calls over REST, that of calls beside the writing of rows the same calls before.
const (
	figureTasks     = "tasks begun/s at unlimited pace; baseline: calls/s"
	figureTaskCPU   = "server CPU per task, µs; baseline: per call"
	figurePrepared  = "from POST to all rows, s"
	figureBesideJob = "p99 of calls while rows are written, µs"
	figureBesideRun = "p99 of calls while tasks run, µs"
	figureJobMemory = "memory more at its peak, MB"
	figureIdleJobs  = "CPU of one core with 1,000 open jobs, %; baseline: without"
)

var jobsVariants = []variant{
	{name: "jobs-sqlite", title: "SQLite", goal: 0.2},
	{name: "jobs-postgres", title: "Postgres", goal: 0.15, postgres: true},
}

// measureJobs measures ten jobs over all devices: how long their rows take, what calls notice of that, how fast tasks run
// when nothing limits them, and what open jobs cost that have nothing to do.
func (b *bench) measureJobs(ctx context.Context) error {
	for _, v := range jobsVariants {
		if v.postgres && b.postgres == nil {
			b.leaveOut(v.name + ": no Postgres")
			continue
		}
		m := measurement{Name: v.name, Title: fmt.Sprintf("%d jobs over %d devices on %s: %d tasks", benchJobs, b.opt.jobDevices, v.title, benchJobs*b.opt.jobDevices),
			Baseline: "the same node without jobs"}
		prepared := 15.0
		if v.postgres {
			prepared = 20
		}
		tasks, calls := samples{}, samples{}
		for run := range b.opt.runs {
			both := samples{}
			if err := b.quietly(v.name, both, func(into samples) error { return b.jobsRun(ctx, run, v, into) }); err != nil {
				return fmt.Errorf("%s, run %d: %w", v.name, run+1, err)
			}
			tasks.merge(calls, both)
			b.progress(v.name, run, tasks, calls, figureTasks)
		}
		m.tabulate(tasks, calls, []line{
			{name: figurePrepared, precision: 1, goal: &goal{atMost, prepared}}, {name: figureBesideJob, goal: &goal{ratioAtMost, 1.5}},
			{name: figureTasks, goal: &goal{ratioAtLeast, v.goal}}, {name: figureTaskCPU, precision: 1}, {name: figureBesideRun},
			{name: figureJobMemory, precision: 1}, {name: figureIdleJobs, precision: 2},
		})
		b.add(m)
	}
	return nil
}

func (b *bench) jobsRun(ctx context.Context, run int, v variant, into samples) (err error) {
	n := b.opt.jobDevices
	d, f, end, err := b.stage(ctx, v, overWebSocket, n, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	if err := f.bring(ctx, d, 0, n); err != nil {
		return err
	}
	called := min(b.opt.devices, n)
	defer b.beFirst(ctx, v.name, &err)()
	if err := b.callsBefore(ctx, d, called, into); err != nil {
		return err
	}
	if err := b.idleCPUOf(ctx, d, baselineMark, into); err != nil {
		return err
	}
	weight, err := ownMemory(d.cmd.Process.Pid)
	if err != nil {
		return err
	}

	// Rows are written while calls come evenly; a rate keeps the tasks from beginning.
	begun := time.Now()
	ids, err := d.createJobs(ctx, benchJobs, api.JobSpec{Select: everything, Pace: &api.JobPace{Rate: neverRate}})
	if err != nil {
		return err
	}
	prepared := make(chan error, 1)
	var took time.Duration
	go func() {
		err := d.awaitJobs(ctx, ids, func(j *api.Job) bool { return j.State == "running" && j.Counts.Total == int64(n) })
		took = time.Since(begun)
		prepared <- err
	}()
	beside, err := b.paced(ctx, d.target(), called, b.opt.idleRate)
	if err := errors.Join(err, <-prepared); err != nil {
		return err
	}
	into.add(figurePrepared, took.Seconds())
	into.add(figureBesideJob, load.Quantile(beside.sent, 0.99).Seconds()*1e6)

	// Then nothing limits them.
	saved := d.profile(ctx, b.profileFile(v.name, run), max(1, int(b.opt.duration.Seconds())))
	meter, err := startMeter("", d.pid())
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := d.send(ctx, http.MethodPatch, "/v1/jobs/"+id, api.JobEdit{Pace: &api.JobPace{Rate: "unlimited", Concurrency: 100_000}}, nil); err != nil {
			return err
		}
	}
	if err := d.awaitJobs(ctx, ids, func(j *api.Job) bool { return !j.EndedAt.IsZero() && j.Counts.OK == int64(n) }); err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err := errors.Join(err, saved()); err != nil {
		return err
	}
	tasks := float64(benchJobs * n)
	into.add(figureTasks, tasks/s.wall.Seconds())
	into.add(figureTaskCPU, s.daemon.Seconds()*1e6/tasks)
	into.add(figureOthers, s.others*100)
	peak, err := load.ProcessBytes(d.cmd.Process.Pid, "status", "VmHWM:")
	if err != nil {
		return err
	}
	into.add(figureJobMemory, float64(peak-weight)/1e6)

	// Once more, for what calls notice of it.
	if ids, err = d.createJobs(ctx, 1, api.JobSpec{Select: everything, Pace: &api.JobPace{Rate: "unlimited", Concurrency: 100_000}}); err != nil {
		return err
	}
	if beside, err = b.paced(ctx, d.target(), called, b.opt.idleRate); err != nil {
		return err
	}
	into.add(figureBesideRun, load.Quantile(beside.sent, 0.99).Seconds()*1e6)
	if err := d.awaitJobs(ctx, ids, func(j *api.Job) bool { return !j.EndedAt.IsZero() }); err != nil {
		return err
	}

	later := api.JobSpec{Devices: []string{load.DeviceID(0)}, When: &api.JobWhen{At: api.At(time.Now().Add(24 * time.Hour))}}
	if _, err := d.createJobs(ctx, idleJobs, later); err != nil {
		return err
	}
	return b.idleCPUOf(ctx, d, "", into)
}

// beFirst gives devices and callers a priority over the node until the function that it returns is called, if that is permitted.
func (b *bench) beFirst(ctx context.Context, name string, err *error) (end func()) {
	normal, missing := load.BeFirst(ctx)
	if missing != nil {
		b.leaveOut(name + ": a priority for devices and callers, which now wait while the node computes: " + missing.Error())
		return func() {}
	}
	return func() { *err = errors.Join(*err, normal()) }
}

// callsBefore measures calls of a node without jobs: as many as go, and evenly.
func (b *bench) callsBefore(ctx context.Context, d *daemon, called int, into samples) error {
	if _, err := load.CallLoad(ctx, d.target(), b.opt.callers, called, b.opt.duration); err != nil { // warms up
		return err
	}
	meter, err := startMeter("", d.pid())
	if err != nil {
		return err
	}
	latencies, err := load.CallLoad(ctx, d.target(), b.opt.callers, called, b.opt.duration)
	if err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err != nil {
		return err
	}
	into.add(baselineMark+figureTasks, float64(len(latencies))/s.wall.Seconds())
	into.add(baselineMark+figureTaskCPU, s.daemon.Seconds()*1e6/float64(len(latencies)))
	evenly, err := b.paced(ctx, d.target(), called, b.opt.idleRate)
	for _, figure := range []string{figureBesideJob, figureBesideRun} {
		into.add(baselineMark+figure, load.Quantile(evenly.sent, 0.99).Seconds()*1e6)
	}
	return err
}

// idleCPUOf measures what a node does while nobody calls.
func (b *bench) idleCPUOf(ctx context.Context, d *daemon, mark string, into samples) error {
	if err := errors.Join(d.awaitQuiet(ctx, startLimit), d.collect(ctx), rest(ctx, b.opt.settle)); err != nil {
		return err
	}
	meter, err := startMeter("", d.pid())
	if err != nil {
		return err
	}
	if err := rest(ctx, min(b.opt.idleTime, 20*time.Second)); err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	into.add(mark+figureIdleJobs, s.daemon.Seconds()/s.wall.Seconds()*100)
	return err
}

// createJobs creates jobs that call the tool of the other measurements.
func (d *daemon) createJobs(ctx context.Context, n int, spec api.JobSpec) (ids []string, err error) {
	spec.Action.Call = &api.JobCall{Tool: load.ToolSetVolume, Arguments: json.RawMessage(`{"volume":50}`)}
	for range n {
		var j api.Job
		if err := d.send(ctx, http.MethodPost, "/v1/jobs", api.NewJob{JobSpec: spec}, &j); err != nil {
			return nil, err
		}
		ids = append(ids, j.ID)
	}
	return ids, nil
}

// awaitJobs waits until every job has come so far.
func (d *daemon) awaitJobs(ctx context.Context, ids []string, done func(*api.Job) bool) error {
	ctx, cancel := context.WithTimeout(ctx, jobsLimit)
	defer cancel()
	left := slices.Clone(ids)
	var j api.Job
	err := d.poll(ctx, jobsPause, func() (bool, error) {
		for len(left) > 0 {
			j = api.Job{}
			if err := d.send(ctx, http.MethodGet, "/v1/jobs/"+left[0], nil, &j); err != nil || !done(&j) {
				return false, err
			}
			left = left[1:]
		}
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("job %s is %s, %+v: %w", j.ID, j.State, j.Counts, err)
	}
	return nil
}

// send sends a request to the API, and decodes the answer into a value, if there is one.
func (d *daemon) send(ctx context.Context, method, path string, body, into any) error {
	content, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return d.sendContent(ctx, method, path, "application/json", content, into)
}

// sendContent is send with a body that need not be JSON.
func (d *daemon) sendContent(ctx context.Context, method, path, mediaType string, content []byte, into any) error {
	request, err := http.NewRequestWithContext(ctx, method, d.api+path, bytes.NewReader(content))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+d.token)
	request.Header.Set("Content-Type", mediaType)
	response, err := d.client.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }() // read to its end below
	answer, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode/100 != 2:
		return errors.New(method + " " + path + ": " + strconv.Itoa(response.StatusCode) + ": " + string(answer[:min(len(answer), 300)]))
	case into == nil:
		return nil
	}
	return json.Unmarshal(answer, into)
}
