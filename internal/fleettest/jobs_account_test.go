package fleettest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// jobAccount creates jobs whose calls have a marker, and compares what the fleet has of their
// tasks with what the simulated devices executed.
type jobAccount struct {
	nodes   []*Node
	devices []string
	open    map[string]string // jobs that may be open: marker by id
	all     map[string]string
	tasks   int
	random  *rand.Rand
}

func newJobAccount(seed uint64, nodes []*Node, devices []string) *jobAccount {
	return &jobAccount{nodes: nodes, devices: devices, open: map[string]string{}, all: map[string]string{}, random: rand.New(rand.NewPCG(seed, 5))}
}

// markedJob is a call with a marker on devices.
func markedJob(marker string, devices ...string) api.NewJob {
	return api.NewJob{JobSpec: api.JobSpec{Devices: devices, Pace: &api.JobPace{Rate: "unlimited", Concurrency: 100_000},
		Action: api.JobAction{Call: &api.JobCall{Tool: volume, Arguments: json.RawMessage(`{"volume":9,"marker":"` + marker + `"}`), Timeout: "10s"}}}}
}

// next returns the next job, which try creates.
func (a *jobAccount) next(change func(j *api.NewJob)) api.NewJob {
	job := markedJob(fmt.Sprint("m", len(a.all)), a.devices...)
	if change != nil {
		change(&job)
	}
	return job
}

// try creates the next job through any node, with a key, so that it is created once however often
// that has to be tried.
func (a *jobAccount) try(ctx context.Context, job api.NewJob) (id string, err error) {
	marker := fmt.Sprint("m", len(a.all))
	j, err := a.nodes[a.random.IntN(len(a.nodes))].CreateJob(ctx, job, marker)
	if err == nil {
		a.open[j.ID], a.all[j.ID] = marker, marker
		a.tasks += len(job.Devices)
	}
	return j.ID, err
}

// create creates a job.
func (a *jobAccount) create(t testing.TB, change func(j *api.NewJob)) string {
	t.Helper()
	return a.insist(t, a.next(change))
}

func (a *jobAccount) insist(t testing.TB, job api.NewJob) string {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
		id, err := a.try(t.Context(), job)
		if err == nil {
			return id
		}
		if time.Now().After(deadline) {
			t.Fatalf("no job can be created: %v", err)
		}
	}
}

// resume continues what is paused, or has halted for want of successes, since unknown tasks are none,
// and cancels what its stop rule has halted. It returns how many jobs are open.
func (a *jobAccount) resume(ctx context.Context) int {
	for id := range a.open {
		switch j, err := a.job(ctx, id); {
		case err != nil: // asked again later
		case !j.EndedAt.IsZero():
			delete(a.open, id)
		case j.State == "halted" && j.Spec.Stop != nil:
			_, _ = a.nodes[0].DoJob(ctx, id, "cancel") // it is tried again
		case j.State == "halted" || j.State == "paused":
			_, _ = a.nodes[0].DoJob(ctx, id, "resume") // it is tried again
		}
	}
	return len(a.open)
}

// openJobs says what the jobs that are open wait for.
func (a *jobAccount) openJobs(t testing.TB) string {
	var text strings.Builder
	for id := range a.open {
		j, err := a.job(t.Context(), id)
		shown, _ := json.Marshal(j) // of a type of the API
		fmt.Fprintf(&text, "\n%s %v", shown, err)
		for _, row := range a.rows(t, id) {
			if row.State != "ended" {
				shown, _ := json.Marshal(row)
				fmt.Fprintf(&text, "\n  %s", shown)
			}
		}
	}
	return text.String()
}

// job reads a job through one node after the other.
func (a *jobAccount) job(ctx context.Context, id string) (j api.Job, err error) {
	for _, n := range a.nodes {
		if j, err = n.Job(ctx, id); err == nil {
			return j, nil
		}
	}
	return j, err
}

// rows are the tasks of a job, as its report has them.
func (a *jobAccount) rows(t testing.TB, id string) (rows []api.Task) {
	t.Helper()
	var report bytes.Buffer
	if _, err := a.nodes[0].Download(t.Context(), &report, apiclient.Query{"format": "ndjson"}, "jobs", id, "report"); err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewScanner(&report); lines.Scan(); {
		var row api.Task
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			t.Fatal(err)
		}
		rows = append(rows, row)
	}
	return rows
}

// check compares every job with its tasks, and these with what devices executed, when all have
// ended. It returns the outcomes of all tasks, and what is wrong.
func (a *jobAccount) check(t testing.TB, reports ...Report) (outcomes map[string]int64, wrong []string) {
	t.Helper()
	type execution struct{ marker, device string }
	executed := map[execution]int{}
	for i := range reports {
		for _, d := range reports[i].Devices {
			for marker, n := range d.Markers {
				executed[execution{marker, d.ID}] = int(n)
			}
		}
	}
	outcomes = map[string]int64{}
	for id, marker := range a.all {
		j, err := a.job(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		found := map[string]int64{}
		for _, row := range a.rows(t, id) {
			found[row.Outcome]++
			e := execution{marker, row.Device}
			if fault := faultOf(&j.Spec, &row, executed[e]); fault != "" {
				wrong = append(wrong, fmt.Sprintf("job %s (%s), %s, attempt %d, %s %s: %s", id, marker, row.Device, row.Attempt, row.Outcome, row.Code, fault))
			}
			delete(executed, e)
		}
		c := j.Counts
		counted := map[string]int64{"": c.Waiting + c.Running, "ok": c.OK, "failed": c.Failed, "unknown": c.Unknown, "refused": c.Refused, "expired": c.Expired,
			"cancelled": c.Cancelled, "already": c.Already, "superseded": c.Superseded, "gone": c.Gone}
		var total int64
		for outcome, n := range counted {
			if found[outcome] != n {
				wrong = append(wrong, fmt.Sprintf("job %s counts %d as %q, and has %d of these tasks", id, n, outcome, found[outcome]))
			}
			total += n
			outcomes[outcome] += n
		}
		if stop := j.Spec.Stop; stop != nil && c.Failed+c.Unknown > int64(stop.Failed+j.Spec.Pace.Concurrency) {
			wrong = append(wrong, fmt.Sprintf("job %s was to stop after %d, of which %d run at once: %+v", id, stop.Failed, j.Spec.Pace.Concurrency, c))
		}
		if total != c.Total || j.EndedAt.IsZero() {
			wrong = append(wrong, fmt.Sprintf("job %s is %s, with %d tasks of %d", id, j.State, total, c.Total))
		}
	}
	for e, n := range executed {
		wrong = append(wrong, fmt.Sprintf("%s executed %s %d times, which has no task for it", e.device, e.marker, n))
	}
	return outcomes, wrong
}

// judge fails the test with what check finds wrong.
func (a *jobAccount) judge(t testing.TB, reports ...Report) (outcomes map[string]int64) {
	t.Helper()
	outcomes, wrong := a.check(t, reports...)
	for _, fault := range wrong[:min(len(wrong), 20)] {
		t.Error(fault)
	}
	if len(wrong) > 20 {
		t.Errorf("and %d others", len(wrong)-20)
	}
	return outcomes
}

// faultOf returns what is wrong with a task that was executed so often. An attempt is executed at
// most once, and one that a device answered is executed.
func faultOf(spec *api.JobSpec, row *api.Task, executed int) string {
	retried := 0
	if spec.Retry != nil {
		retried = spec.Retry.Failed
	}
	switch {
	case row.State != "ended":
		return "it is " + row.State
	case executed > row.Attempt:
		return fmt.Sprintf("executed %d times", executed)
	case row.Outcome == "ok" && executed == 0:
		return "it was not executed"
	case row.Attempt > 1+retried:
		return "it was repeated by itself"
	case executed > 0 && retried == 0 && !slices.Contains([]string{"ok", "failed", "unknown"}, row.Outcome):
		return "it was executed, and counts as not sent"
	}
	return ""
}

// killNodes kills a random node so many times, each after pause on average, while at least so many
// tasks run. Tasks of a killed node hold their devices for the length of its lease, so that new
// ones come when the newest job is half done.
func (a *jobAccount) killNodes(t *testing.T, kills int, pause time.Duration, tasks int) {
	t.Helper()
	newest, next := "", time.Now().Add(pause)
	for kills > 0 || a.tasks < tasks {
		if j, err := a.job(t.Context(), newest); newest == "" || err == nil && j.Counts.Waiting < j.Counts.Total/2 {
			for range 3 {
				newest = a.create(t, a.variety())
			}
		}
		time.Sleep(200 * time.Millisecond)
		a.resume(t.Context())
		if kills > 0 && time.Now().After(next) {
			kills--
			n := a.nodes[a.random.IntN(len(a.nodes))]
			n.Kill(t)
			n.Run(t)
			next = time.Now().Add(pause/2 + time.Duration(a.random.Int64N(int64(pause))))
		}
	}
}

// variety returns what is special about the next job.
func (a *jobAccount) variety() func(j *api.NewJob) {
	switch len(a.all) % 5 {
	case 1:
		return func(j *api.NewJob) { j.Pace.Concurrency = 20 }
	case 2:
		return func(j *api.NewJob) { j.Pace.Rate = "150/s" }
	case 3:
		return func(j *api.NewJob) { j.Repeatable, j.Retry = true, &api.JobRetry{Failed: 3, After: "1s"} }
	case 4:
		return func(j *api.NewJob) {
			j.Stages = []api.JobStage{{OK: api.Amount{Number: 10}}, {OK: api.Amount{Percent: 50}, Soak: "500ms"}, {OK: api.Amount{Percent: 80}}}
		}
	}
	return nil
}

// settle waits until every job has ended.
func (a *jobAccount) settle(t testing.TB, limit time.Duration) {
	t.Helper()
	a.nodes[0].Await(t, "every job has ended", limit, func() bool { return a.resume(t.Context()) == 0 })
}
