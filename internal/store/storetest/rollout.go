package storetest

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/store/firmwarestore"
)

// imageID is the image of the firmware jobs of these tests.
var imageID = strings.Repeat("ab", 32)

// rollout creates a firmware job for the devices 1 to n, without stages.
func (f *jobFleet) rollout(t testing.TB, n int, change func(s *api.JobSpec)) jobs.Job {
	t.Helper()
	AddImage(t, f.host, imageID)
	return f.create(t, n, rolling(change))
}

// rolling returns what makes a job a firmware job without stages.
func rolling(change func(s *api.JobSpec)) func(s *api.JobSpec) {
	return func(s *api.JobSpec) {
		s.Action = api.JobAction{Firmware: &api.JobFirmware{Image: imageID}}
		s.Stages = []api.JobStage{{OK: api.Amount{Percent: 100}}}
		s.Stop = &api.JobStop{Failed: 1000}
		if change != nil {
			change(s)
		}
	}
}

// testImageInUse: of a job for an image and the deletion of the image at the same time, one is refused.
func testImageInUse(t *testing.T, f *jobFleet) {
	images := firmwarestore.New(f.host)
	inUse := errors.New("a job gives devices the image")
	for range 40 {
		AddImage(t, f.host, imageID)
		j := f.prepared(t, rolling(nil))
		var wait sync.WaitGroup
		var created, deleted error
		wait.Go(func() { _, _, created = f.stores[0].Create(t.Context(), j, nil) })
		wait.Go(func() {
			deleted = images.Delete(t.Context(), imageID, func() error {
				open, err := f.stores[1].Open(t.Context())
				if err == nil && len(open) > 0 {
					err = inUse
				}
				return err
			})
		})
		wait.Wait()
		switch {
		case created == nil && errors.Is(deleted, inUse):
			if _, err := f.stores[0].Edit(t.Context(), j.ID, func(j *jobs.Job) error { j.Cancel(f.stores[0].Now()); return nil }); err != nil {
				t.Fatal(err)
			}
		case devices.CodeOf(created) != devices.CodeNotFound || deleted != nil:
			t.Fatalf("creating: %v; deleting: %v", created, deleted)
		}
	}
}

// step makes a step that must succeed.
func (f *jobFleet) step(t testing.TB, j *jobs.Job, n int, do func(*jobs.Step)) jobs.Task {
	t.Helper()
	task, err := f.stores[0].Step(t.Context(), j.ID, mac(n), func(s *jobs.Step, _ bool) error {
		do(s)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	f.check(t)
	return task
}

var formerCheck = &jobs.DeviceCheck{ELF: "old", Board: "b", Hardware: "h", From: "192.0.2.7"}

func offer(s *jobs.Step) {
	s.Device(formerCheck, "new", false, false)
	s.Offer("token", "192.0.2.7", 100)
}

func flash(s *jobs.Step) {
	s.Fetch("192.0.2.7", false)
	s.Loaded(100)
}

// testSteps: what a step says of a task and its job is in the rows, and no other work takes a firmware task for its own.
func testSteps(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	j := f.rollout(t, 3, nil)
	task := f.step(t, &j, 1, offer)
	if task.State != jobs.TaskRunning || task.Phase != jobs.PhaseOffered || task.Rollout.Offers != 1 || task.Target != "new" || task.Before != "old" || task.Attempt != 1 {
		t.Fatalf("%+v %+v", task, task.Rollout)
	}
	if got := f.job(t, j.ID); got.Counts.Running != 1 || got.Started != 1 {
		t.Errorf("%+v", got)
	}
	queue, err := s.Rolling(t.Context(), mac(1))
	if err != nil || len(queue) != 1 || queue[0].Task.Rollout.Token != "token" || queue[0].Job.ID != j.ID || !queue[0].Task.LimitAt.Equal(task.LimitAt) {
		t.Fatalf("%+v, %v", queue, err)
	}
	if ended, _, err := s.LoseRunning(t.Context(), "nobody", 10); err != nil || len(ended) != 0 {
		t.Errorf("a firmware task is lost with a process: %+v, %v", ended, err)
	}
	if begun := f.begin(t, "a", candidates(&j, mac(1))...); len(begun) != 0 {
		t.Error("a firmware task begins twice")
	}
	nothing := errors.New("no")
	if _, err := s.Step(t.Context(), j.ID, mac(1), func(step *jobs.Step, _ bool) error {
		step.Fetch("192.0.2.7", false)
		return nothing
	}); !errors.Is(err, nothing) {
		t.Errorf("the error of a step: %v", err)
	}
	if queue, _ := s.Rolling(t.Context(), mac(1)); queue[0].Task.Phase != jobs.PhaseOffered {
		t.Error("a step with an error is written")
	}
	for _, unknown := range []struct {
		job string
		n   int
	}{{j.ID, 99}, {"01m8fe8yckp9p1p4wn2q", 1}} {
		if _, err := s.Step(t.Context(), unknown.job, mac(unknown.n), func(*jobs.Step, bool) error { return nil }); !errors.Is(err, devices.ErrNotFound) {
			t.Errorf("%+v: %v", unknown, err)
		}
	}
	if marks, err := s.Marks(t.Context(), macs(1, 3)); err != nil || len(marks) != 0 {
		t.Errorf("%+v, %v", marks, err)
	}
	f.step(t, &j, 1, flash)
	if marks, err := s.Marks(t.Context(), macs(1, 3)); err != nil || marks[mac(1)].Unconfirmed.IsZero() || !marks[mac(1)].BarredUntil.IsZero() {
		t.Errorf("after a flash: %+v, %v", marks, err)
	}
	if list, err := s.Overdue(t.Context(), 10); err != nil || len(list) != 0 {
		t.Errorf("overdue: %+v, %v", list, err)
	}
	f.step(t, &j, 1, func(step *jobs.Step) { step.Task.LimitAt = step.Now.Add(-time.Second) })
	if list, err := s.Overdue(t.Context(), 10); err != nil || len(list) != 1 || list[0].Device != mac(1) {
		t.Errorf("overdue: %+v, %v", list, err)
	}
	lost := f.step(t, &j, 1, func(step *jobs.Step) { step.Expire() })
	if lost.Outcome != jobs.Failed || lost.Code != jobs.CodeLost || lost.Phase != jobs.PhaseNone {
		t.Errorf("%+v", lost)
	}
	found, err := s.Rolled(t.Context(), mac(1), "new")
	if err != nil || found.Job != j.ID {
		t.Fatalf("%+v, %v", found, err)
	}
	f.step(t, &j, 1, func(step *jobs.Step) { step.Correct(&jobs.DeviceCheck{ELF: "new"}) })
	if got := f.job(t, j.ID); got.Counts.Of(jobs.OK) != 1 || got.Counts.Of(jobs.Failed) != 0 {
		t.Errorf("corrected: %+v", got.Counts)
	}
	if _, err := s.Rolled(t.Context(), mac(1), "other"); !errors.Is(err, devices.ErrNotFound) {
		t.Errorf("another image: %v", err)
	}
	if found, err := s.Rolled(t.Context(), mac(1), ""); err != nil || found.Job != j.ID {
		t.Errorf("any image: %+v, %v", found, err)
	}
	// Two flashes without the image bar the device until somebody lifts that.
	for range 2 {
		f.step(t, &j, 2, func(step *jobs.Step) {
			if step.Task.Rollout != nil {
				step.Task.LimitAt = time.Time{}
			}
			offer(step)
		})
		f.step(t, &j, 2, flash)
		f.step(t, &j, 2, func(step *jobs.Step) { step.See(formerCheck) })
	}
	marks, err := s.Marks(t.Context(), macs(2, 2))
	if m := marks[mac(2)]; err != nil || !m.BarredUntil.After(s.Now()) || m.Reason == "" || !m.Unconfirmed.IsZero() {
		t.Errorf("%+v, %v", marks, err)
	}
	if err := s.Unbar(t.Context(), mac(2)); err != nil {
		t.Fatal(err)
	}
	if marks, _ := s.Marks(t.Context(), macs(2, 2)); !marks[mac(2)].BarredUntil.IsZero() {
		t.Errorf("after it was lifted: %+v", marks)
	}
	if err := s.ConfirmImage(t.Context(), mac(1)); err != nil {
		t.Fatal(err)
	}
	if marks, _ := s.Marks(t.Context(), macs(1, 1)); !marks[mac(1)].Unconfirmed.IsZero() {
		t.Errorf("after the check of a device whose task was lost: %+v", marks)
	}
	byBefore, err := s.Changed(t.Context(), j.ID)
	if err != nil || byBefore["old"] != 2 || len(byBefore) != 1 {
		t.Errorf("%+v, %v", byBefore, err)
	}
	of, err := s.ChangedOf(t.Context(), j.ID, macs(1, 3))
	if err != nil || len(of) != 2 || of[mac(1)] != "old" {
		t.Errorf("%+v, %v", of, err)
	}
	// A device may run the image of its offer before any check with it could be recorded.
	f.step(t, &j, 3, func(step *jobs.Step) {
		offer(step)
		step.Fetch("192.0.2.7", false)
		step.Break()
		step.Already()
	})
	if of, err = s.ChangedOf(t.Context(), j.ID, macs(1, 3)); err != nil || len(of) != 3 {
		t.Errorf("with one that has the image already: %+v, %v", of, err)
	}
}

// testOutlook: what most checks during a rollout ask for says the same as the tasks and their job.
func testOutlook(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	j := f.rollout(t, 3, func(s *api.JobSpec) { s.Pace = &api.JobPace{Rate: "unlimited", Concurrency: 1} })
	is := func(when string, n int, elf string, want jobs.Outlook) {
		t.Helper()
		if got, err := s.Outlook(t.Context(), mac(n), elf); err != nil || got != want {
			t.Errorf("%s: device %d with image %q: %+v, %v, want %+v", when, n, elf, got, err, want)
		}
	}
	is("before", 1, "old", jobs.Outlook{Open: 1, Ready: true})
	is("before", 1, "", jobs.Outlook{Open: 1, Ready: true})
	is("before", 99, "old", jobs.Outlook{})
	f.step(t, &j, 1, offer)
	is("offered", 1, "old", jobs.Outlook{Open: 1, Moves: true})
	is("while another device has an offer", 2, "old", jobs.Outlook{Open: 1})
	f.step(t, &j, 1, flash)
	is("flashed", 1, "new", jobs.Outlook{Open: 1, Moves: true, Unconfirmed: true})
	f.step(t, &j, 1, func(step *jobs.Step) { step.See(formerCheck) })
	is("with the former image again", 1, "old", jobs.Outlook{Open: 1, Ready: true})
	is("with the image at last", 1, "new", jobs.Outlook{Open: 1, Moves: true, Ready: true})
	f.step(t, &j, 1, func(step *jobs.Step) { step.Refuse("no", "no") })
	is("ended", 1, "new", jobs.Outlook{})
}

// testStepsInOrder: a firmware task begins after the older tasks of its device, and a newer firmware job replaces what waits.
func testStepsInOrder(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	call := f.create(t, 1, nil)
	j := f.rollout(t, 3, nil)
	ahead := func(n int) (is bool) {
		t.Helper()
		nothing := errors.New("no")
		if _, err := s.Step(t.Context(), j.ID, mac(n), func(_ *jobs.Step, before bool) error {
			is = before
			return nothing
		}); !errors.Is(err, nothing) {
			t.Fatal(err)
		}
		return is
	}
	if !ahead(1) || ahead(2) {
		t.Error("the older task of a device is not ahead, or one of another is")
	}
	task := f.begin(t, "a", candidates(&call, mac(1))...)[0]
	if !ahead(1) {
		t.Error("the task that runs is not ahead")
	}
	f.end(t, task, nil)
	if ahead(1) {
		t.Error("a task that has ended is ahead")
	}
	f.step(t, &j, 2, offer)
	f.step(t, &j, 3, func(step *jobs.Step) {
		offer(step)
		flash(step)
		step.See(formerCheck)
	})
	newer := f.rollout(t, 3, nil)
	if err := s.Supersede(t.Context(), newer.ID, macs(1, 3)); err != nil {
		t.Fatal(err)
	}
	f.check(t)
	got := f.job(t, j.ID)
	if c := got.Counts; c.Of(jobs.Superseded) != 1 || c.Of(jobs.Failed) != 1 || got.Harmed != 0 || c.Running != 1 {
		t.Errorf("%+v, harmed %d", c, got.Harmed)
	}
	if task := f.task(t, j.ID, mac(3)); task.Outcome != jobs.Failed || task.Code != jobs.CodeRolledBack || task.Detail == "" {
		t.Errorf("a device that came to harm counts no more: %+v", task)
	}
	if got := f.job(t, newer.ID).Counts; got.Waiting != 3 {
		t.Errorf("%+v", got)
	}
}

// testStepsTogether: three nodes that see checks of the same devices at once begin at most as many tasks as may run, each once.
func testStepsTogether(t *testing.T, f *jobFleet) {
	const n, together = 20, 5
	j := f.rollout(t, n, func(s *api.JobSpec) { s.Pace = &api.JobPace{Rate: jobs.RateUnlimited, Concurrency: together} })
	var wait sync.WaitGroup
	errWait := errors.New("wait")
	for _, s := range f.stores {
		wait.Go(func() {
			for i := 1; i <= n; i++ {
				_, err := s.Step(t.Context(), j.ID, mac(i), func(step *jobs.Step, ahead bool) error {
					if ahead || !step.MayBegin(true) {
						return errWait
					}
					offer(step)
					return nil
				})
				if err != nil && !errors.Is(err, errWait) {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
	f.check(t)
	if got := f.job(t, j.ID); got.Counts.Running != together {
		t.Errorf("%d run, want %d", got.Counts.Running, together)
	}
}

// testGroups: the jobs of a release are created together or not at all, and a repeated request returns them.
func testGroups(t *testing.T, f *jobFleet) {
	s := f.stores[0]
	list := []jobs.Job{f.prepared(t, nil), f.prepared(t, nil)}
	for i := range list {
		list[i].State, list[i].Group = jobs.Scheduled, list[0].ID
	}
	list[0].Key, list[0].Hash = "k", "h"
	stored, again, err := s.CreateGroup(t.Context(), list)
	if err != nil || again || len(stored) != 2 || stored[1].Group != list[0].ID {
		t.Fatalf("%+v, %t, %v", stored, again, err)
	}
	other := []jobs.Job{f.prepared(t, nil), f.prepared(t, nil)}
	for i := range other {
		other[i].State, other[i].Group = jobs.Scheduled, other[0].ID
	}
	other[0].Key, other[0].Hash = "k", "h"
	if _, err := s.Repeated(t.Context(), "owner", "k", "h"); err != nil {
		t.Error(err)
	}
	if _, again, err = s.CreateGroup(t.Context(), other); err != nil || !again {
		t.Errorf("repeated: %t, %v", again, err)
	}
	if found, _, err := s.Jobs(t.Context(), jobs.Filter{Group: list[0].ID, Limit: 10}); err != nil || len(found) != 2 {
		t.Errorf("%d jobs of the group, %v", len(found), err)
	}
	other[0].Hash = "another"
	if _, _, err := s.CreateGroup(t.Context(), other); !errors.Is(err, jobs.ErrConflict) {
		t.Errorf("another body: %v", err)
	}
}

// testImageCauses: what a firmware task has done is its doing while it is open; later somebody else has done it, unless the check corrects the task.
func testImageCauses(t *testing.T, f *jobFleet) {
	see := func(elf string) func(*jobs.Step) {
		return func(s *jobs.Step) { s.See(&jobs.DeviceCheck{ELF: elf, Board: "b", Hardware: "h", From: "192.0.2.7"}) }
	}
	steps := map[string]func(*jobs.Step){"offer": offer, "flash": flash, "fetch": func(s *jobs.Step) { s.Fetch("192.0.2.7", false) }, "see-new": see("new"), "see-old": see("old"),
		"connect": func(s *jobs.Step) { s.Connect() },
		"break":   func(s *jobs.Step) { s.Fetch("192.0.2.7", false); s.Break() },
		"call": func(s *jobs.Step) {
			s.Device(formerCheck, "new", false, false)
			s.Call()
		},
		"fail-gate":  func(s *jobs.Step) { s.FailGate(s.Task.Rollout.Gate, "no") },
		"refuse":     func(s *jobs.Step) { s.Refuse("forbidden", "no") },
		"limit":      func(s *jobs.Step) { s.Task.LimitAt = s.Now; s.Expire() },
		"pause-ends": func(s *jobs.Step) { s.Task.LimitAt = time.Time{} },
		"a-minute":   func(s *jobs.Step) { s.Task.EndedAt = s.Task.EndedAt.Add(-time.Minute) },
		"correct": func(s *jobs.Step) {
			if s.Correct(&jobs.DeviceCheck{ELF: "new", Board: "b"}); s.Task.Outcome != jobs.OK {
				t.Errorf("%+v is not corrected", s.Task)
			}
		},
	}
	for n, c := range []struct{ name, steps, want string }{ // a check is an image with a >
		{"while the task is open", "offer flash >new", "old>new job"},
		{"its step could not be made", "offer fetch >new >old", "old>new job, new>old rolled_back"},
		{"back while it is proved", "offer flash see-new >new see-old >old", "old>new job, new>old rolled_back"},
		{"an image of nobody", "offer flash >other", "old>other foreign"},
		{"no offer", ">new", "old>new foreign"},
		{"the check ends the task", "offer flash see-new fail-gate >new", "old>new job"},
		{"slots swapped by hand", "offer flash see-new >new limit limit limit limit a-minute >old >new", "old>new job, new>old foreign, old>new foreign"},
		{"after a failed gate", "offer flash see-new >new fail-gate a-minute >old >new", "old>new job, new>old foreign, old>new foreign"},
		{"after a refusal", "offer refuse a-minute >new", "old>new foreign"},
		{"lost and found", "offer flash limit a-minute >new correct >old >new", "old>new job, new>old foreign, old>new foreign"},
		{"after two crashes", "offer flash see-old pause-ends offer flash see-old a-minute >new correct", "old>new job"},
		{"refused twice", "offer flash connect pause-ends offer flash connect a-minute >new correct", "old>new job"},
		{"no check", "call limit call limit a-minute >new correct", "old>new job"},
		{"broken downloads", "offer break pause-ends offer break pause-ends offer break a-minute >new correct", "old>new job"},
		{"not fetched", "offer limit pause-ends offer limit pause-ends offer limit pause-ends offer limit pause-ends offer limit a-minute >new correct", "old>new job"},
	} {
		id := mac(n + 1)
		f.add(t, id)
		j := f.rollout(t, n+1, nil)
		for i, step := range strings.Fields(">old " + c.steps) {
			if elf, is := strings.CutPrefix(step, ">"); is {
				at := f.stores[0].Now().Add(time.Duration(i) * time.Millisecond)
				f.host.SaveFacts(devices.Check{Device: id, Facts: devices.Facts{Board: "b", Firmware: "1", ELF: elf, CheckedAt: at}, Details: "{}"})
				settle(t, f.host)
				continue
			}
			f.step(t, &j, n+1, steps[step])
		}
		if got := strings.Join(f.images.take(), ", "); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}
