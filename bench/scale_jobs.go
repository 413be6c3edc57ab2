package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"time"

	"fleetd/bench/load"
	"fleetd/internal/api"
)

const (
	scaleConnected = 50 // devices that are connected and called
	scaleRate      = 4  // calls per second to each of them, at most
	// The selections of the large jobs: 440,000 of a million devices each, because a fleet may have a million open tasks. The
	// connected devices are in the first one.
	followSites = "site in (site-0*,site-1*,site-20*,site-21*)"
	cancelSites = "site in (site-3*,site-4*,site-28*,site-29*)"
	everyMinute = "* * * * *"
	// settleAfter is how many rests of -scale-settle there are before the last reading: a minute.
	settleAfter = 12
)

// Figures of large jobs.
const (
	figureLargeHalf     = "direct calls, p50, µs"
	figureLargeTail     = "direct calls, p99, µs"
	figureFirings       = "firings of the job of each minute"
	figureFiringLate    = "the latest task of a firing begins, s after its minute"
	figureFiringsLost   = "firings that were missed, or whose task did not begin"
	figureFollowRows    = "tasks of the job with follow"
	figureFollowTime    = "from POST to all of them, s"
	figureCancelRows    = "waiting tasks of the job that is cancelled"
	figureCancelRequest = "the cancel request is answered, s"
	figureCancelTime    = "from the request until all of its tasks are ended, s"
	figureHeapInUse     = "heap in use, MB; baseline: before all jobs"
	figureRoutines      = "goroutines; baseline: before all jobs"
)

var scaleJobsLines = []line{
	{name: figureFirings}, {name: figureFiringLate, precision: 2, goal: &goal{atMost, 5}}, {name: figureFiringsLost, goal: &goal{atMost, 0}},
	{name: figureLargeHalf}, {name: figureLargeTail, goal: &goal{ratioAtMost, 1.5}}, {name: figureCancelRows}, {name: figureCancelRequest, precision: 2, goal: &goal{atMost, 1}},
	{name: figureCancelTime, precision: 1}, {name: figureFollowRows}, {name: figureFollowTime, precision: 1}, {name: figureHeapInUse, precision: 1, goal: &goal{ratioAtMost, 1.1}},
	{name: figureRoutines, goal: &goal{ratioAtMost, 1.1}},
}

// measureScaleJobs measures what small jobs and direct calls notice of large jobs on a node with many known devices.
func (b *bench) measureScaleJobs(ctx context.Context) error { return b.atScale(ctx, b.scaleJobsOn) }

// scaleJobsOn measures on one database.
func (b *bench) scaleJobsOn(ctx context.Context, postgres bool, storm, rest string) (err error) {
	name, title := databaseNames(postgres)
	k, err := b.newKnown(ctx, "scale-jobs-"+name, postgres)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, k.remove()) }()
	if err := k.run(ctx, func(d *daemon) error {
		for _, file := range []string{storm, rest} {
			if _, err := k.load(ctx, d, file); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return fmt.Errorf("%s: fill in: %w", k.name, err)
	}
	if err := k.describe(ctx); err != nil {
		return err
	}
	during, before := samples{}, samples{}
	for run := range b.opt.runs {
		both := samples{}
		if err := k.run(ctx, func(d *daemon) error { return k.largeJobs(ctx, d, run, both) }); err != nil {
			return fmt.Errorf("%s, run %d: %w", k.name, run+1, err)
		}
		during.merge(before, both)
		b.progress(k.name, run, during, before, figureLargeTail)
	}
	m := measurement{Name: k.name, Title: fmt.Sprintf("Large jobs beside small ones on a node with %d known devices, %s, NATS embedded", b.opt.scale, title), Baseline: "the same node before"}
	m.tabulate(during, before, scaleJobsLines)
	b.add(m)
	return nil
}

// largeJobs measures calls and a job of each minute while one large job is prepared and another one is cancelled.
func (k *known) largeJobs(ctx context.Context, d *daemon, run int, into samples) (err error) {
	n := min(scaleConnected, k.b.opt.scaleStorm)
	rate := min(scaleRate*n, k.b.opt.idleRate)
	lists, err := load.ToolLists(true)
	if err != nil {
		return err
	}
	f, err := newFleet(ctx, d, overWebSocket, n, lists)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	if err := f.bring(ctx, d, 0, n); err != nil {
		return err
	}
	defer k.b.beFirst(ctx, k.name, &err)()
	if _, err := k.b.paced(ctx, d.target(), n, rate); err != nil { // warms up
		return err
	}
	// What jobs need once in a process is there before: prepared statements, types of JSON, parsed words of schedules.
	first, err := d.createJobs(ctx, 1, api.JobSpec{Devices: []string{load.DeviceID(0)}, When: &api.JobWhen{Cron: everyMinute}})
	if err != nil {
		return err
	}
	if err := errors.Join(d.cancel(ctx, first[0]), d.awaitJobs(ctx, first, hasEnded)); err != nil {
		return err
	}
	if err := k.footprint(ctx, d, run, k.b.opt.scaleSettle, baselineMark, into); err != nil {
		return err
	}

	waiting, err := d.createJobs(ctx, 1, api.JobSpec{Select: cancelSites, Pace: &api.JobPace{Rate: neverRate}})
	if err != nil {
		return err
	}
	if err := d.awaitJobs(ctx, waiting, func(j *api.Job) bool {
		into[figureCancelRows] = []float64{float64(j.Counts.Waiting)}
		return j.State == "running"
	}); err != nil {
		return err
	}
	k.progress("the job that is to be cancelled has %.0f waiting tasks", into[figureCancelRows][0])
	calls, err := k.b.paced(ctx, d.target(), n, rate)
	if err != nil {
		return err
	}
	into.add(baselineMark+figureLargeHalf, load.Quantile(calls.sent, 0.5).Seconds()*1e6)
	into.add(baselineMark+figureLargeTail, load.Quantile(calls.sent, 0.99).Seconds()*1e6)

	saved := d.profile(ctx, k.b.profileFile(k.name, run), max(1, int(k.b.opt.duration.Seconds())))
	meter, err := startMeter("", d.pid())
	if err != nil {
		return err
	}
	calling, stop := context.WithCancel(ctx)
	defer stop()
	called := make(chan error, 1)
	var beside []time.Duration
	go func() {
		var err error
		for err == nil && (len(beside) == 0 || calling.Err() == nil) {
			var more latencies
			more, err = k.b.paced(ctx, d.target(), n, rate)
			beside = append(beside, more.sent...)
		}
		called <- err
	}()
	open, err := k.jobsAtOnce(ctx, d, waiting, into)
	stop()
	if err := errors.Join(err, <-called, saved()); err != nil {
		return err
	}
	s, err := meter.stop(runtime.NumCPU())
	if err != nil {
		return err
	}
	into.add(figureOthers, s.others*100)
	slices.Sort(beside)
	into.add(figureLargeHalf, load.Quantile(beside, 0.5).Seconds()*1e6)
	into.add(figureLargeTail, load.Quantile(beside, 0.99).Seconds()*1e6)

	for _, id := range open {
		if err := d.cancel(ctx, id); err != nil {
			return err
		}
	}
	if err := d.awaitJobs(ctx, open, hasEnded); err != nil {
		return err
	}
	return k.footprint(ctx, d, run, settleAfter*k.b.opt.scaleSettle, "", into)
}

// jobsAtOnce creates a job of each minute and a large job with follow, and cancels another one. It returns those that are open when
// all of that is done.
func (k *known) jobsAtOnce(ctx context.Context, d *daemon, cancelled []string, into samples) (open []string, err error) {
	minutely, err := d.createJobs(ctx, 1, api.JobSpec{Devices: []string{load.DeviceID(0)}, When: &api.JobWhen{Cron: everyMinute}})
	if err != nil {
		return nil, err
	}
	begun := time.Now()
	follow, err := d.createJobs(ctx, 1, api.JobSpec{Select: followSites, Follow: true})
	if err != nil {
		return nil, err
	}
	request := time.Now()
	if err := d.cancel(ctx, cancelled[0]); err != nil {
		return nil, err
	}
	into.add(figureCancelRequest, time.Since(request).Seconds())
	var rows int64
	if err := d.awaitJobs(ctx, follow, func(j *api.Job) bool { rows = j.Counts.Total; return j.State == "running" }); err != nil {
		return nil, err
	}
	into.add(figureFollowRows, float64(rows))
	into.add(figureFollowTime, time.Since(begun).Seconds())
	k.progress("the job with follow has %d tasks after %v", rows, time.Since(begun).Round(time.Second))
	var ended time.Time
	if err := d.awaitJobs(ctx, cancelled, func(j *api.Job) bool { ended = j.EndedAt.Time; return hasEnded(j) }); err != nil {
		return nil, err
	}
	into.add(figureCancelTime, ended.Sub(request).Seconds())
	k.progress("the cancelled job has ended after %v", ended.Sub(request).Round(time.Second))
	return append(minutely, follow...), k.firings(ctx, d, minutely, into)
}

// firings waits for the firings of a job of each minute, and measures how late its tasks have begun.
func (k *known) firings(ctx context.Context, d *daemon, minutely []string, into samples) error {
	var last api.Job
	err := d.awaitJobs(ctx, minutely, func(j *api.Job) bool {
		last = *j
		return j.Round >= int64(k.b.opt.scaleFirings) && j.Counts.Waiting+j.Counts.Running == 0 && !j.NextAt.IsZero()
	})
	if err != nil {
		return err
	}
	content, err := d.get(ctx, "/v1/jobs/"+last.ID+"/tasks")
	if err != nil {
		return err
	}
	var tasks api.List[api.Task]
	if err := json.Unmarshal(content, &tasks); err != nil {
		return err
	}
	lost, latest := float64(last.Missed), time.Duration(0)
	for _, task := range tasks.Items {
		if task.BegunAt.IsZero() {
			lost++
			continue
		}
		due := last.NextAt.Add(-time.Duration(last.Round+1-task.Round) * time.Minute)
		latest = max(latest, task.BegunAt.Sub(due))
	}
	into.add(figureFirings, float64(last.Round))
	into.add(figureFiringsLost, lost)
	if len(tasks.Items) > 0 {
		into.add(figureFiringLate, latest.Seconds())
	}
	return nil
}

func hasEnded(j *api.Job) bool { return !j.EndedAt.IsZero() }

// cancel cancels a job.
func (d *daemon) cancel(ctx context.Context, id string) error {
	return d.send(ctx, http.MethodPost, "/v1/jobs/"+id+"/cancel", struct{}{}, nil)
}

// footprint measures heap and goroutines after a rest.
func (k *known) footprint(ctx context.Context, d *daemon, run int, pause time.Duration, mark string, into samples) error {
	if err := errors.Join(d.awaitQuiet(ctx, startLimit), rest(ctx, pause), d.collect(ctx)); err != nil {
		return err
	}
	m, err := d.metrics(ctx)
	into.add(mark+figureHeapInUse, m[seriesHeapInUse]/megabyte)
	into.add(mark+figureRoutines, m[seriesGoroutines])
	when := "-heap-before"
	if mark == "" {
		when = "-heap-after"
	}
	if file := k.b.profileFile(k.name+when, run); err == nil && file != "" {
		err = d.save(ctx, "/debug/pprof/heap?gc=1", file)
	}
	return err
}
