package runner

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/jobs"
)

// clockAlone is a Store of which only the clock is used.
type clockAlone struct{ jobs.Store }

func (clockAlone) Now() time.Time { return time.Date(2026, 3, 2, 7, 0, 0, 0, time.UTC) }

func running(permitted bool) *run {
	return &run{r: &Runner{Options: Options{Store: clockAlone{}}}, task: jobs.Task{Job: "j", Device: "d", Fence: 7}, permitted: permitted}
}

// What was not sent waits again, and stays due: another task of the device would overtake it. What may have been sent
// is never not sent.
func TestOutcomesOfErrors(t *testing.T) {
	sent := func(code devices.Code) error { return &devices.Error{Code: code, Sent: true} }
	for _, c := range []struct {
		name      string
		err       error
		permitted bool
		outcome   jobs.Outcome
		notSent   bool
		halt      string
	}{
		{"timeout after bytes", sent(devices.CodeDeviceTimeout), true, jobs.Unknown, false, ""},
		{"connection lost after bytes", sent(devices.CodeConnectionLost), true, jobs.Unknown, false, ""},
		{"takeover after bytes", sent(devices.CodeSuperseded), true, jobs.Unknown, false, ""},
		{"a bug after bytes", sent(devices.CodeInternal), true, jobs.Unknown, false, ""},
		{"device error", sent(devices.CodeDeviceError), true, jobs.Failed, false, ""},
		{"arguments refused by the device", sent(devices.CodeInvalidArguments), true, jobs.Failed, false, ""},
		{"tool unknown to the device", devices.Errorf(devices.CodeToolUnknown, "no"), true, jobs.Failed, false, ""},
		{"tool unknown here", devices.Errorf(devices.CodeToolUnknown, "no"), false, jobs.Refused, false, ""},
		{"arguments refused here", devices.Errorf(devices.CodeInvalidArguments, "no"), false, jobs.Refused, false, ""},
		{"forbidden", devices.Errorf(devices.CodeForbidden, "no"), false, jobs.Refused, false, ""},
		{"denied", devices.Errorf(devices.CodeToolDenied, "no"), false, jobs.Refused, false, ""},
		{"takeover before bytes", devices.Errorf(devices.CodeSuperseded, "no"), false, "", true, ""},
		{"offline", devices.Errorf(devices.CodeDeviceOffline, "no"), false, "", true, ""},
		{"busy", devices.Errorf(devices.CodeDeviceBusy, "no"), false, "", true, ""},
		{"labels cannot be read", devices.Errorf(devices.CodeUnavailable, "no"), false, "", true, ""},
		{"the commit is too long ago", errLate, false, "", true, ""},
		{"the key has ended", devices.Errorf(devices.CodeUnauthorized, "no"), false, "", true, jobs.ReasonKey},
		{"a new rule", devices.Errorf(devices.CodeConfirmation, "no"), false, "", true, jobs.ReasonConfirmation},
	} {
		end := running(c.permitted).failed(c.err)
		if end.Outcome != c.outcome || end.NotSent != c.notSent || end.Halt != c.halt || end.Fence != 7 || !end.Again.IsZero() {
			t.Errorf("%s: %+v", c.name, end)
		}
	}
}

// The report of a job names what is wrong with the arguments, as the answer to a direct call does.
func TestRefusedArgumentsAreNamed(t *testing.T) {
	err := &devices.Error{Code: devices.CodeInvalidArguments, Detail: "the arguments of self.lamp.set are not valid",
		Faults: []devices.Fault{{Pointer: "/level", Detail: "must be at most 100, not 400"}, {Pointer: "/color", Detail: "is required"}}}
	const want = "the arguments of self.lamp.set are not valid: /level must be at most 100, not 400; /color is required"
	for _, permitted := range []bool{false, true} {
		if end := running(permitted).failed(err); end.Detail != want {
			t.Errorf("permitted %v: the detail is %q, want %q", permitted, end.Detail, want)
		}
	}
}

// A process that did not run after the commit, or has lost its lease, sends nothing.
func TestOldBeginningsAreNotSent(t *testing.T) {
	x := running(false)
	x.r.MayBegin = func() bool { return true }
	if x.asked = time.Now().Add(-2 * sendTime); !errors.Is(x.permit(), errLate) || x.permitted {
		t.Error("a commit of two seconds ago was permitted")
	}
	x.asked = time.Now()
	x.r.MayBegin = func() bool { return false }
	if !errors.Is(x.permit(), errLate) || x.permitted {
		t.Error("a node without a lease was permitted")
	}
	x.r.MayBegin = func() bool { return true }
	if x.permit() != nil || !x.permitted {
		t.Error("a recent commit was not permitted")
	}
}

func TestResultsAreCut(t *testing.T) {
	x := running(true)
	content := json.RawMessage(`[{"type":"text","text":"a\u0000b"},{"type":"image"},{"type":"text","text":"` + strings.Repeat("ü", jobs.MaxResult) + `"}]`)
	end := x.answered(&devices.ToolResult{Content: content})
	if end.Outcome != jobs.OK || !strings.HasPrefix(end.Result, "a\x00b\nü") || len(end.Result) > jobs.MaxResult || !utf8.ValidString(end.Result) {
		t.Errorf("%d bytes: %.20q", len(end.Result), end.Result)
	}
	if end := x.answered(&devices.ToolResult{IsError: true}); end.Outcome != jobs.Failed || end.Code != jobs.CodeToolError {
		t.Errorf("a tool that failed: %+v", end)
	}
}

// Jobs are scanned when there can be tasks that are not in memory, and not at every change.
func TestScans(t *testing.T) {
	p := &pump{jobs: map[string]*jobState{}}
	job := jobs.Job{ID: "j", Action: "call", State: jobs.Running, RoundN: 10, Version: 1, Counts: jobs.Counts{Waiting: 10}}
	p.update(job)
	s, now := p.jobs["j"], time.Now()
	if !s.needsScan(now, true) {
		t.Fatal("a new job is not scanned")
	}
	s.scannedAt, s.size = now, 10
	job.Version, job.Counts.Waiting, job.Counts.Ended[0] = 2, 0, 10
	if p.update(job); s.needsScan(now, true) {
		t.Error("a job without waiting tasks is scanned")
	}
	job.Version, job.Counts.Waiting, job.Counts.Ended[0] = 3, 5, 5
	if p.update(job); !s.needsScan(now, true) {
		t.Error("tasks that are repeated are not found")
	}
	// A task that is given back is looked for on its device alone, and not among all of its job.
	s.scannedAt = now
	for _, waiting := range []int64{3, 4, 5} {
		job.Version, job.Counts.Waiting, job.Counts.Running = job.Version+1, waiting, 5-waiting
		p.update(job)
	}
	if s.needsScan(now.Add(time.Minute), true) {
		t.Error("a task that waits again has all of its job read")
	}
	// As many fail as are repeated.
	job.Version, job.Counts.Ended[0], job.Counts.Ended[1] = job.Version+1, 4, 1
	p.update(job)
	s.scannedAt = now
	job.Version, job.Counts.Ended[0], job.Counts.Ended[1] = job.Version+1, 5, 0
	if p.update(job); !s.needsScan(now, true) {
		t.Error("tasks that are repeated while others end are not found")
	}
	job.Version, job.State = job.Version+1, jobs.Done
	if p.update(job); p.jobs["j"] != nil {
		t.Error("an ended job is kept")
	}
}

// hub is the devices of a node on which every slot is free.
type hub struct{ Devices }

func (hub) Reserve(devices.ID, bool) (*dispatch.Reservation, error) {
	return &dispatch.Reservation{}, nil
}

type store struct{ jobs.Store }

func (store) Now() time.Time { return time.Unix(1000, 0) }

// Of a device that several jobs want, the oldest task is chosen: others would not begin, and their device
// would lose a second.
func TestTheOldestTaskIsChosen(t *testing.T) {
	for range 20 { // the order of a map differs
		p := newPump(&Runner{Options: Options{Store: store{}, Devices: hub{}}, running: map[devices.ID]string{}})
		for i, id := range []string{"a", "b", "c", "d", "e", "f"} {
			j := jobs.Job{ID: id, Action: "call", State: jobs.Running, Until: time.Unix(2000, 0), Opened: 10, Counts: jobs.Counts{Waiting: 1}}
			j.Spec.Action.Restart = &api.JobRestart{}
			j.Spec.When, j.Spec.Pace = &api.JobWhen{}, &api.JobPace{Rate: "unlimited", Concurrency: 10}
			p.update(j)
			p.insert(p.jobs[id], jobs.Candidate{Job: id, Device: "x", Seq: int64(10 - i/2*2)}, maxOfJob) // e and f have the same age
		}
		if w := p.choose(); len(w) != 1 || w[0].Job != "e" {
			t.Fatalf("chosen: %+v", w)
		}
	}
}

// In a full stage those tasks alone are chosen that are to be repeated; one that is not due takes no room from the others.
func TestChosenInAFullStage(t *testing.T) {
	p := newPump(&Runner{Options: Options{Store: store{}, Devices: hub{}}, running: map[devices.ID]string{}, later: map[devices.ID]time.Time{}})
	j := jobs.Job{ID: "j", Action: "call", State: jobs.Running, Until: time.Unix(2000, 0), Opened: 2, Started: 2, Held: 2, Counts: jobs.Counts{Waiting: 3}}
	j.Spec.Action.Restart = &api.JobRestart{}
	j.Spec.When, j.Spec.Pace = &api.JobWhen{}, &api.JobPace{Rate: "unlimited", Concurrency: 1}
	p.update(j)
	for _, c := range []jobs.Candidate{{Job: "j", Device: "fresh"}, {Job: "j", Device: "later", Began: true, DueAt: time.Unix(1060, 0)}, {Job: "j", Device: "due", Began: true}} {
		p.insert(p.jobs["j"], c, maxOfJob)
	}
	if w := p.choose(); len(w) != 1 || w[0].Device != "due" || len(p.jobs["j"].list) != 1 || p.total != 1 {
		t.Errorf("chosen: %+v, %d are left", w, p.total)
	}
	if at := p.r.later["later"]; time.Until(at) < 50*time.Second || time.Until(at) > time.Minute {
		t.Errorf("the task that is due in a minute is looked at in %v", time.Until(at))
	}
}

// A task that is to be repeated is found by a scan and chosen though its job has filled its memory with others, which the stage
// does not let begin; when it does, those that the scan left out are found. What is known of a candidate is renewed.
func TestRepeatedInAFullStage(t *testing.T) {
	from := &scanned{}
	p := newPump(&Runner{Options: Options{Store: from, Devices: hub{}}, running: map[devices.ID]string{}})
	j := jobs.Job{ID: "j", Action: "call", State: jobs.Running, Version: 1, Until: time.Unix(2000, 0), RoundN: 10_000, Opened: 10, Started: 5, Counts: jobs.Counts{Waiting: 9995}}
	j.Spec.Action.Restart = &api.JobRestart{}
	j.Spec.When, j.Spec.Pace = &api.JobWhen{}, &api.JobPace{Rate: "unlimited", Concurrency: 1000}
	p.update(j)
	s := p.jobs["j"]
	for i := range maxOfJob {
		p.insert(s, jobs.Candidate{Job: "j", Device: devices.ID(strconv.Itoa(i)), Spread: int64(i)}, maxOfJob)
	}
	j.Version, j.Started, j.Held = 2, 10, 2
	p.update(j)
	from.list = []jobs.Candidate{{Job: "j", Device: "7", Spread: 7, Began: true}, {Job: "j", Device: "fresh", Spread: 5000}, {Job: "j", Device: "held", Spread: 6000, Began: true}}
	if _, err := p.scan(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if w := p.choose(); len(w) != 2 || w[0].Device != "7" || w[1].Device != "held" {
		t.Fatalf("chosen: %+v", w)
	}
	if s.scannedAt = time.Now(); s.needsScan(time.Now(), true) {
		t.Error("a full stage is scanned again")
	}
	j.Version, j.Opened = 3, 10_000
	if p.update(j); !s.needsScan(time.Now(), true) {
		t.Error("the stage opens, and what the scan left out is not looked for")
	}
}

// scanned is a store with waiting tasks that notes where a scan began.
type scanned struct {
	store
	after int64
	list  []jobs.Candidate
}

func (s *scanned) Waiting(_ context.Context, _ string, after int64, _ int) ([]jobs.Candidate, error) {
	s.after = after
	return s.list, nil
}

// The next task of a device is taken though scans have filled the memory of its job; if all memory is
// full, the next scan begins before it.
func TestNoCandidateIsForgotten(t *testing.T) {
	from := &scanned{}
	p := newPump(&Runner{Options: Options{Store: from, Devices: hub{}}})
	p.update(jobs.Job{ID: "j", Action: "call", State: jobs.Running, RoundN: 10_000, Counts: jobs.Counts{Waiting: 10_000}})
	s := p.jobs["j"]
	s.scannedAt, s.round, s.size, s.cursor = time.Now(), 0, 10_000, 9000
	s.list, p.total = make([]*jobs.Candidate, maxOfJob), maxOfJob
	if err := p.add(t.Context(), jobs.Candidate{Job: "j", Device: "x", Spread: 500}); err != nil || len(s.list) != maxOfJob+1 {
		t.Fatalf("%d candidates, %v", len(s.list), err)
	}
	for _, spread := range []int64{700, 600, 800} {
		p.total = maxCandidates
		if err := p.add(t.Context(), jobs.Candidate{Job: "j", Device: devices.ID(rune(spread)), Spread: spread}); err != nil {
			t.Fatal(err)
		}
	}
	s.list, p.total = nil, 0
	if !s.needsScan(time.Now(), true) {
		t.Fatal("no scan is wanted")
	}
	if _, err := p.scan(t.Context(), s); err != nil || from.after != 599 {
		t.Errorf("scanned after %d, %v", from.after, err)
	}
}

// A device whose only task in memory ends with its job, as when it expires, is looked up again: it may have
// tasks of other jobs.
func TestDevicesOfEndedJobsAreReadAgain(t *testing.T) {
	p := newPump(&Runner{Options: Options{Store: store{}, Devices: hub{}}, wake: make(chan struct{}, 1), arrived: map[devices.ID]struct{}{}})
	job := jobs.Job{ID: "j", Action: "call", State: jobs.Running, Version: 1, Counts: jobs.Counts{Waiting: 1}}
	p.update(job)
	p.insert(p.jobs["j"], jobs.Candidate{Job: "j", Device: "x"}, maxOfJob)
	job.Version, job.State = 2, jobs.Done
	p.update(job)
	if arrived, _, _ := p.r.take(); len(arrived) != 1 || p.total != 0 {
		t.Errorf("%v is read again, %d candidates", arrived, p.total)
	}
}

// A database that is too slow for a full group begins smaller ones.
func TestGroupsAdapt(t *testing.T) {
	p := newPump(&Runner{})
	for range 10 {
		p.adapt(beginTime, context.DeadlineExceeded)
	}
	if p.batch != 1 {
		t.Errorf("groups of %d after failures", p.batch)
	}
	if p.adapt(beginTime*3/4, nil); p.batch != 1 {
		t.Errorf("groups of %d, with little time left", p.batch)
	}
	for range 10 {
		p.adapt(time.Millisecond, nil)
	}
	if p.batch != jobs.BeginBatch {
		t.Errorf("groups of %d after successes", p.batch)
	}
}

// slow is a database that takes this long to begin tasks.
type slow struct {
	store
	takes time.Duration
}

func (s slow) Begin(ctx context.Context, _, _ string, _ []jobs.Candidate) ([]jobs.Task, []jobs.Change, error) {
	select {
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	case <-time.After(s.takes):
		return nil, nil, nil
	}
}

// A database that takes longer than beginTime for any group begins tasks, after some attempts.
func TestSlowDatabaseBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPump(&Runner{Options: Options{Store: slow{takes: 2 * beginTime}}})
		for n := range 20 {
			if err := p.commit(t.Context(), nil); err == nil {
				t.Logf("after %d attempts", n)
				return
			}
		}
		t.Errorf("nothing begins in groups of %d", p.batch)
	})
}

// doubtful is a database that perhaps began the first group, and records nothing until release is closed.
type doubtful struct {
	store
	release chan struct{}
}

func (s *doubtful) Begin(context.Context, string, string, []jobs.Candidate) ([]jobs.Task, []jobs.Change, error) {
	return []jobs.Task{{Job: "j", Device: "x", Fence: 1}}, nil, devices.ErrUncertain
}

func (s *doubtful) End(_ context.Context, _ string, list []jobs.End) ([]jobs.Task, []jobs.Change, error) {
	<-s.release
	return nil, nil, nil
}

// What perhaps began is given back before anything else begins: the same task, begun once more, would be given back
// in its place, and then be sent twice.
func TestNothingBeginsBesideDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &doubtful{release: make(chan struct{})}
		r := &Runner{Options: Options{Store: s, Devices: hub{}, MayBegin: func() bool { return true }, Log: slog.New(slog.DiscardHandler)}, wake: make(chan struct{}, 1),
			arrived: map[devices.ID]struct{}{}, later: map[devices.ID]time.Time{}, running: map[devices.ID]string{}}
		r.ends = newEnder(r)
		p := newPump(r)
		if err := p.commit(t.Context(), nil); !errors.Is(err, devices.ErrUncertain) {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if !r.ends.isBlocked() {
			t.Error("others may begin while it is not known what did")
		}
		for len(r.wake) > 0 {
			<-r.wake
		}
		close(s.release)
		synctest.Wait()
		if r.ends.isBlocked() || len(r.wake) == 0 {
			t.Error("nothing begins after it was given back")
		}
		r.ends.close()
	})
}

// moved is a store in which the only task of a device runs, on the node from which the device came.
type moved struct{ store }

func (moved) WaitingOf(context.Context, []devices.ID, int, []string) ([]jobs.Candidate, []devices.ID, error) {
	return nil, []devices.ID{"x"}, nil
}

func (hub) IsHere(devices.ID) bool { return true }

// A device that came while its task ran elsewhere is read again until the task is over: the other node may give
// it back, and this one may have seen the job with as many waiting tasks before and after that.
func TestTaskThatRunsElsewhereIsWaitedFor(t *testing.T) {
	r := &Runner{Options: Options{Store: moved{}, Devices: hub{}}, wake: make(chan struct{}, 1), later: map[devices.ID]time.Time{}, running: map[devices.ID]string{}}
	p := newPump(r)
	if err := p.read(t.Context(), map[devices.ID]struct{}{"x": {}}); err != nil || len(r.later) != 1 {
		t.Errorf("%d devices are read again, %v", len(r.later), err)
	}
	r.setRunning("x", "j")
	clear(r.later)
	if err := p.read(t.Context(), map[devices.ID]struct{}{"x": {}}); err != nil || len(r.later) != 0 {
		t.Errorf("%d devices are read again whose task runs here, %v", len(r.later), err)
	}
}

// A device whose time comes during a pass is read in the next one, which begins at once.
func TestDueDuringAPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &Runner{wake: make(chan struct{}, 1), arrived: map[devices.ID]struct{}{}, later: map[devices.ID]time.Time{}}
		much := time.Now().Add(time.Hour)
		if next := r.due(much); !next.Equal(much) {
			t.Errorf("nothing is due: %v", time.Until(next))
		}
		r.lookAt("b", 2*time.Second)
		r.lookAt("a", time.Second)
		r.lookAt("a", 3*time.Second)
		if next := time.Until(r.due(much)); next != time.Second {
			t.Errorf("the first is due after %v", next)
		}
		time.Sleep(time.Second)
		if next := time.Until(r.due(much)); next != 0 || len(r.arrived) != 1 {
			t.Errorf("%d are due, and the next pass begins after %v", len(r.arrived), next)
		}
		if next := time.Until(r.due(much)); next != time.Second {
			t.Errorf("the second is due after %v", next)
		}
	})
}

// away is a database that cannot be reached.
type away struct {
	store
	reads atomic.Int64
}

func (a *away) Open(context.Context) ([]jobs.Job, error) {
	a.reads.Add(1)
	return nil, errors.New("the database is away")
}

func (a *away) WaitingOf(context.Context, []devices.ID, int, []string) ([]jobs.Candidate, []devices.ID, error) {
	a.reads.Add(1)
	return nil, nil, errors.New("the database is away")
}

// While the database is away the node looks for work once a second, whether devices connect or jobs are to be read.
func TestPausesWhileTheDatabaseIsAway(t *testing.T) {
	for _, connects := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			from := &away{}
			r := New(Options{Store: from, Devices: occupied{}, MayBegin: func() bool { return true }, Log: slog.New(slog.DiscardHandler)})
			defer r.Close()
			if connects {
				r.Ready("x", "")
			}
			time.Sleep(20 * againAfter)
			if n := from.reads.Load(); n < 15 || n > 25 {
				t.Errorf("a device connects %t: %d queries in %v", connects, n, 20*againAfter)
			}
			if why, _ := r.Hold("x", false); why != jobs.WaitDatabase {
				t.Errorf("its tasks wait for %q", why)
			}
		})
	}
}

// occupied are devices of this node, each with what holds up its tasks.
type occupied struct{ Devices }

func (occupied) IsHere(id devices.ID) bool { return id != "elsewhere" }

func (occupied) IsBusy(id devices.ID, idle bool) bool { return id == "busy" || idle && id == "talking" }

// What holds up a task beside its job, as other nodes learn it.
func TestHold(t *testing.T) {
	r := &Runner{Options: Options{Devices: occupied{}}, running: map[devices.ID]string{"running": "j"}}
	r.ends = &ender{r: r}
	for _, c := range []struct {
		id   devices.ID
		idle bool
		want jobs.Wait
		here bool
	}{
		{"elsewhere", false, jobs.WaitNone, false},
		{"free", true, jobs.WaitNone, true},
		{"busy", false, jobs.WaitBusy, true},
		{"talking", false, jobs.WaitNone, true},
		{"talking", true, jobs.WaitBusy, true},
		{"running", false, jobs.WaitOrder, true},
	} {
		if why, here := r.Hold(c.id, c.idle); why != c.want || here != c.here {
			t.Errorf("%s, idle %t: %q, here %t", c.id, c.idle, why, here)
		}
	}
	for name, fault := range map[string]func(on bool){"the last pass": r.failing.Store, "the last record": func(on bool) { r.ends.blocked = on }} {
		fault(true)
		if why, here := r.Hold("busy", false); why != jobs.WaitDatabase || !here {
			t.Errorf("%s failed: %q, here %t", name, why, here)
		}
		if _, here := r.Hold("elsewhere", false); here {
			t.Errorf("%s failed: a device of another node is here", name)
		}
		fault(false)
	}
}
