package runner

import (
	"strconv"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
)

// newShared returns a pump with running jobs that have no limits of their own, and this many candidates each, the jobs in order of age.
func newShared(t *testing.T, from jobs.Store, candidates ...int) *pump {
	t.Helper()
	p := newPump(&Runner{Options: Options{Store: from, Devices: hub{}, MayBegin: func() bool { return true }}, wake: make(chan struct{}, 1),
		arrived: map[devices.ID]struct{}{}, later: map[devices.ID]time.Time{}, running: map[devices.ID]string{}})
	p.r.ends = &ender{r: p.r}
	for i, n := range candidates {
		j := jobs.Job{ID: string(rune('a' + i)), Action: "call", State: jobs.Running, Until: time.Unix(2000, 0), Opened: 1 << 40, RoundN: 1 << 20, Counts: jobs.Counts{Waiting: 1 << 20}}
		j.Spec.Action.Restart = &api.JobRestart{}
		j.Spec.When, j.Spec.Pace = &api.JobWhen{}, &api.JobPace{Rate: jobs.RateUnlimited, Concurrency: 1 << 20}
		p.update(j)
		for k := range n {
			p.insert(p.jobs[j.ID], jobs.Candidate{Job: j.ID, Device: devices.ID(j.ID + strconv.Itoa(k)), Seq: int64(i), Spread: int64(k)}, maxCandidates)
		}
	}
	return p
}

// chosen counts what was chosen, by job, and counts it as running.
func chosen(p *pump) map[string]int {
	n := map[string]int{}
	for _, w := range p.choose() {
		n[w.Job]++
		p.r.setRunning(w.Device, w.Job)
	}
	return n
}

// Jobs get the places of a node in turn, whichever is older, and one job alone leaves some to others that come.
func TestJobsTakeTurns(t *testing.T) {
	p := newShared(t, store{}, 5000, 3, 400)
	if n := chosen(p); n["b"] != 3 || n["c"] < jobs.BeginBatch/3 || n["a"]+n["b"]+n["c"] != jobs.BeginBatch {
		t.Errorf("the first group has %v", n)
	}
	p = newShared(t, store{}, 5000)
	for len(chosen(p)) > 0 {
	}
	if n := len(p.r.running); n < maxRunning/2 || n >= maxRunning {
		t.Errorf("one job has %d of %d places", n, maxRunning)
	}
	j := p.jobs["a"].job
	j.ID = "b"
	p.update(j)
	p.insert(p.jobs["b"], jobs.Candidate{Job: "b", Device: "idle", Seq: 9}, maxOfJob)
	if n := chosen(p); n["b"] != 1 || n["a"] != 0 {
		t.Errorf("beside a job with many devices, the group has %v", n)
	}
	// Where the database begins one task at a time, too.
	p = newShared(t, store{}, 10, 10, 10)
	p.batch = 1
	n := map[string]int{}
	for range 9 {
		for job := range chosen(p) {
			n[job]++
		}
	}
	if n["a"] != 3 || n["b"] != 3 || n["c"] != 3 {
		t.Errorf("of nine, each in a group of its own, %v", n)
	}
}

// A candidate of a job with few finds room though another job has filled the memory, and what had to leave is found by a scan.
func TestMemoryIsShared(t *testing.T) {
	p := newShared(t, store{}, maxCandidates, 0)
	a := p.jobs["a"]
	a.scannedAt, a.size = time.Now(), a.job.RoundN
	if !p.insert(p.jobs["b"], jobs.Candidate{Job: "b", Device: "idle", Seq: 9}, maxOfJob) || p.total != maxCandidates || len(p.jobs["a"].list) != maxCandidates-1 {
		t.Errorf("%d candidates, %d of them of the large job", p.total, len(p.jobs["a"].list))
	}
	if !a.more || a.cursor != maxCandidates-2 {
		t.Errorf("the scan goes on: %t, after %d", a.more, a.cursor)
	}
}

// To find the devices that are due, those that are not are not walked.
func TestDueWalksNoOthers(t *testing.T) {
	looks := func(others int) (took time.Duration) {
		r := &Runner{wake: make(chan struct{}, 1), arrived: map[devices.ID]struct{}{}, later: map[devices.ID]time.Time{}}
		for i := range others {
			r.lookAt(devices.ID(strconv.Itoa(i)), time.Hour)
		}
		begun := time.Now()
		for range 1000 {
			r.lookAt("soon", -time.Second)
			if r.due(time.Time{}); len(r.arrived) != 1 {
				t.Fatalf("%d devices are due", len(r.arrived))
			}
			clear(r.arrived)
		}
		return time.Since(begun)
	}
	few, many := time.Hour, time.Hour
	for range 5 {
		few, many = min(few, looks(100)), min(many, looks(200_000))
	}
	if many > 50*few { // of 2,000 times as many
		t.Errorf("1,000 looks took %v beside 100 devices, %v beside 200,000", few, many)
	}
}
