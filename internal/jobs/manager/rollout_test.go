package manager

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/jobs"
	"fleetd/internal/preflight"
)

// firmwareStore has images, each for some devices.
type firmwareStore struct {
	images  []preflight.Ref
	devices map[string][]devices.ID // that get the image, by id
	already map[devices.ID]bool
}

func named(letter string) preflight.Ref {
	return preflight.Ref{ID: strings.Repeat(letter, 64), ELF: "elf " + letter}
}

// Resolve implements Firmware.
func (f *firmwareStore) Resolve(_ context.Context, id string) (preflight.Ref, error) {
	for _, image := range f.images {
		if strings.HasPrefix(image.ID, id) {
			return image, nil
		}
	}
	return preflight.Ref{}, devices.ErrNotFound
}

// Release implements Firmware.
func (f *firmwareStore) Release(_ context.Context, name string) ([]preflight.Ref, error) {
	if name != "2.5.0" {
		return nil, devices.Errorf(devices.CodeNotFound, "no firmware image of the release %s is stored", name)
	}
	return f.images[:2], nil
}

// ByELF implements Firmware.
func (f *firmwareStore) ByELF(_ context.Context, elf string) (preflight.Ref, error) {
	for _, image := range f.images {
		if image.ELF == elf {
			return image, nil
		}
	}
	return preflight.Ref{}, devices.ErrNotFound
}

// Judge implements Firmware.
func (f *firmwareStore) Judge(_ context.Context, image string, _ []string, views []devices.View) (list []preflight.Judgment, _ error) {
	for i := range views {
		j := preflight.Judgment{Verdict: preflight.Fit, NoWayBack: true}
		switch id := views[i].Device.ID; {
		case f.already[id]:
			j = preflight.Judgment{Verdict: preflight.Already}
		case !slices.Contains(f.devices[image], id):
			j = preflight.Judgment{Verdict: preflight.Blocked, Code: "layout", Text: "another layout", OtherBoard: true}
		}
		list = append(list, j)
	}
	return list, nil
}

// newRollouts returns a manager with an image for each of its two devices, and one that they may have had before.
func newRollouts(t *testing.T) (*testManager, *firmwareStore) {
	m := newManager(t)
	f := &firmwareStore{images: []preflight.Ref{named("a"), named("b"), named("c")}, already: map[devices.ID]bool{}}
	f.devices = map[string][]devices.ID{f.images[0].ID: {lamp}, f.images[1].ID: {robot}, f.images[2].ID: {lamp, robot}}
	m.Firmware = f
	m.Owner = func(string) (access.Principal, bool) { return devicetest.Admin, true }
	return m, f
}

// turns does the periodic work until the jobs have their tasks.
func (m *testManager) turns(t *testing.T) {
	t.Helper()
	pass := newTurn(m.Manager)
	for range 3 {
		if err := pass.once(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func (m *testManager) tasksOf(t *testing.T, job string) map[devices.ID]jobs.Task {
	t.Helper()
	list, _, err := m.Store.Tasks(t.Context(), jobs.TaskFilter{Job: job, Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	tasks := map[devices.ID]jobs.Task{}
	for _, task := range list {
		tasks[task.Device] = task
	}
	return tasks
}

// install has a device run the image of a job.
func (m *testManager) install(t *testing.T, job string, id devices.ID, before, target string) {
	t.Helper()
	check := &jobs.DeviceCheck{ELF: before, Board: "b", From: "192.0.2.7"}
	for _, do := range []func(*jobs.Step){
		func(s *jobs.Step) {
			s.Device(check, target, false, false)
			s.Offer("token", check.From, 100)
		},
		func(s *jobs.Step) {
			s.Fetch(check.From, false)
			s.Loaded(100)
		},
		func(s *jobs.Step) { s.See(&jobs.DeviceCheck{ELF: target, Board: "b"}) },
	} {
		if _, err := m.Store.Step(t.Context(), job, id, func(s *jobs.Step, _ bool) error {
			do(s)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

func roll() api.FirmwareRoll {
	return api.FirmwareRoll{Release: "2.5.0", Select: "device=*", Firmware: api.FirmwareOptions{Gates: []string{"boot"}}}
}

// A release is one job for each image, which has only the devices of its board; the same key and body return the same jobs.
func TestRoll(t *testing.T) {
	m, _ := newRollouts(t)
	plan, err := m.PlanRoll(t.Context(), devicetest.Admin, roll())
	if err != nil || len(plan.Items) != 2 || plan.Items[0].Devices != 1 || plan.Items[0].NoWayBack != 1 || plan.Items[0].AtRisk != 1 || len(plan.Items[0].Refusals) != 0 {
		t.Fatalf("%+v, %v", plan, err)
	}
	group, again, err := m.Roll(t.Context(), devicetest.Admin, roll(), CreateOptions{Key: "once"})
	if err != nil || again || len(group.Items) != 2 || group.Group != group.Items[0].ID {
		t.Fatalf("%+v, %t, %v", group, again, err)
	}
	repeated, again, err := m.Roll(t.Context(), devicetest.Admin, roll(), CreateOptions{Key: "once"})
	if err != nil || !again || repeated.Group != group.Group || len(repeated.Items) != 2 {
		t.Errorf("repeated: %+v, %t, %v", repeated, again, err)
	}
	other := roll()
	other.Note = "another body"
	if _, _, err := m.Roll(t.Context(), devicetest.Admin, other, CreateOptions{Key: "once"}); devices.AsError(err).Code != devices.CodeConflict {
		t.Errorf("another body: %v", err)
	}
	m.turns(t)
	for _, j := range group.Items {
		tasks := m.tasksOf(t, j.ID)
		want := lamp
		if strings.HasPrefix(j.Spec.Action.Firmware.Image, "b") {
			want = robot
		}
		if task := tasks[want]; len(tasks) != 1 || task.State != jobs.TaskWaiting {
			t.Errorf("%s: %+v", j.Spec.Action.Firmware.Image[:1], tasks)
		}
	}
}

// What a device was given last is known after its task has ended, to those who may see its job.
func TestFirmwareTask(t *testing.T) {
	m, _ := newRollouts(t)
	other := m.key(t, "jobs firmware", "room=lab")
	last := func(p access.Principal) *api.Task {
		t.Helper()
		task, err := m.FirmwareTask(t.Context(), p, lamp)
		if err != nil {
			t.Fatal(err)
		}
		return task
	}
	if task := last(devicetest.Admin); task != nil {
		t.Errorf("before any: %+v", task)
	}
	group, _, err := m.Roll(t.Context(), devicetest.Admin, roll(), CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m.turns(t)
	if task := last(devicetest.Admin); task == nil || task.State != "waiting" || task.Reason == "" {
		t.Errorf("before it begins: %+v", task)
	}
	of := slices.IndexFunc(group.Items, func(j api.Job) bool { return strings.HasPrefix(j.Spec.Action.Firmware.Image, "a") })
	m.install(t, group.Items[of].ID, lamp, "elf old", "elf a")
	if task := last(devicetest.Admin); task == nil || task.Outcome != "ok" || task.Firmware == nil || task.Firmware.Flashes != 1 {
		t.Errorf("after its end: %+v", task)
	}
	if task := last(other); task != nil {
		t.Errorf("another key sees %+v", task)
	}
}

// A job of one image has every device of its selection; those that may not get it are refused, and one that no device may get is not made.
func TestFirmwareJob(t *testing.T) {
	m, f := newRollouts(t)
	spec := api.JobSpec{Select: "device=*", Action: api.JobAction{Firmware: &api.JobFirmware{Image: strings.Repeat("a", 12)}}}
	j, _, err := m.Create(t.Context(), devicetest.Admin, spec, CreateOptions{})
	if err != nil || j.Spec.Action.Firmware.Image != f.images[0].ID {
		t.Fatalf("%+v, %v", j, err)
	}
	m.turns(t)
	if tasks := m.tasksOf(t, j.ID); tasks[lamp].State != jobs.TaskWaiting || tasks[robot].Outcome != jobs.Refused || tasks[robot].Code != "layout" {
		t.Errorf("%+v", tasks)
	}
	// A newer one takes the place of what waits.
	spec.Action.Firmware = &api.JobFirmware{Image: strings.Repeat("c", 12)}
	newer, _, err := m.Create(t.Context(), devicetest.Admin, spec, CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m.turns(t)
	if got := m.tasksOf(t, j.ID)[lamp].Outcome; got != jobs.Superseded {
		t.Errorf("the older task is %q", got)
	}
	if tasks := m.tasksOf(t, newer.ID); tasks[lamp].State != jobs.TaskWaiting || tasks[robot].State != jobs.TaskWaiting {
		t.Errorf("%+v", tasks)
	}
	f.already[lamp], f.already[robot] = true, true
	if _, _, err := m.Create(t.Context(), devicetest.Admin, spec, CreateOptions{}); devices.AsError(err).Code != devices.CodeNotEligible || !strings.Contains(err.Error(), "2 run it already") {
		t.Errorf("all have it: %v", err)
	}
	spec.Action.Firmware = &api.JobFirmware{Image: strings.Repeat("c", 12), RollbackOf: j.ID}
	if _, _, err := m.Create(t.Context(), devicetest.Admin, spec, CreateOptions{}); devices.AsError(err).Code != devices.CodeBadRequest {
		t.Errorf("rollback_of by hand: %v", err)
	}
	spec.Action.Firmware = &api.JobFirmware{Image: strings.Repeat("d", 12)}
	if _, _, err := m.Create(t.Context(), devicetest.Admin, spec, CreateOptions{}); devices.AsError(err).Code != devices.CodeNotFound {
		t.Errorf("an unknown image: %v", err)
	}
}

func TestWhoMayRoll(t *testing.T) {
	m, _ := newRollouts(t)
	spec := func() api.JobSpec {
		return api.JobSpec{Select: "device=*", Action: api.JobAction{Firmware: &api.JobFirmware{Image: strings.Repeat("c", 12)}}}
	}
	if _, _, err := m.Create(t.Context(), m.key(t, "jobs firmware:read", ""), spec(), CreateOptions{}); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("without the scope: %v", err)
	}
	lab := m.key(t, "jobs firmware", "room=lab")
	j, _, err := m.Create(t.Context(), lab, spec(), CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m.turns(t)
	// security: K45
	if tasks := m.tasksOf(t, j.ID); len(tasks) != 1 || tasks[lamp].Device != lamp {
		t.Errorf("a key of the lab rolls to %+v", tasks)
	}
	if err := m.Unbar(t.Context(), lab, robot); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("it lifts the bar of another room's device: %v", err)
	}
	if err := m.Unbar(t.Context(), lab, lamp); err != nil {
		t.Error(err)
	}
}

// A rollback has the devices that the job has changed, whatever they match now, with the image that each had.
func TestRollback(t *testing.T) {
	m, f := newRollouts(t)
	group, _, err := m.Roll(t.Context(), devicetest.Admin, roll(), CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m.turns(t)
	job := group.Items[0]
	if job.Spec.Action.Firmware.Image != f.images[0].ID {
		job = group.Items[1]
	}
	if _, err := m.Rollback(t.Context(), devicetest.Admin, job.ID, CreateOptions{}); devices.AsError(err).Code != devices.CodeNotEligible {
		t.Errorf("before anything was done: %v", err)
	}
	m.install(t, job.ID, lamp, "elf c", "elf a")
	back, err := m.Rollback(t.Context(), devicetest.Admin, job.ID, CreateOptions{Key: "k"})
	if err != nil || len(back.Items) != 1 {
		t.Fatalf("%+v, %v", back, err)
	}
	spec := back.Items[0].Spec
	if fw := spec.Action.Firmware; fw.Image != f.images[2].ID || fw.RollbackOf != job.ID || len(spec.Stages) != 0 || fw.OnHalt != "stop" {
		t.Errorf("%+v", spec)
	}
	m.turns(t)
	if tasks := m.tasksOf(t, back.Items[0].ID); len(tasks) != 1 || tasks[lamp].State != jobs.TaskWaiting {
		t.Errorf("%+v", tasks)
	}
	if _, err := m.Rollback(t.Context(), devicetest.Admin, back.Items[0].ID, CreateOptions{}); devices.AsError(err).Code != devices.CodeConflict {
		t.Errorf("the rollback of a rollback: %v", err)
	}
	m.install(t, back.Items[0].ID, lamp, "elf a", "elf c")
	f.images = f.images[:2] // the image that they have now was deleted
	again, err := m.Rollback(t.Context(), devicetest.Admin, job.ID, CreateOptions{Key: "k"})
	if err != nil || again.Group != back.Group {
		t.Errorf("repeated, when the image is not stored any more: %+v, %v", again, err)
	}
	call, _, err := m.Create(t.Context(), devicetest.Admin, callSpec("self.get", lamp), CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Rollback(t.Context(), devicetest.Admin, call.ID, CreateOptions{}); devices.AsError(err).Code != devices.CodeConflict {
		t.Errorf("the rollback of a call: %v", err)
	}
}

// A job that asks for it is taken back when its gates halt it, and not for other failures.
func TestRollbackOnHalt(t *testing.T) {
	for _, gate := range []bool{true, false} {
		m, _ := newRollouts(t)
		r := roll()
		r.Firmware = api.FirmwareOptions{OnHalt: "rollback"}
		group, _, err := m.Roll(t.Context(), devicetest.Admin, r, CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		m.turns(t)
		for _, j := range group.Items {
			if m.tasksOf(t, j.ID)[lamp].Device != lamp {
				continue
			}
			m.install(t, j.ID, lamp, "elf c", "elf a")
			if _, err := m.Store.Step(t.Context(), j.ID, lamp, func(s *jobs.Step, _ bool) error {
				if gate {
					s.FailGate(jobs.GateConnect, "it did not")
				} else {
					s.See(&jobs.DeviceCheck{ELF: "elf c", Board: "b"})
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		m.turns(t)
		m.turns(t)
		made := 0
		all, _, err := m.Store.Jobs(t.Context(), jobs.Filter{Limit: 100})
		for _, j := range all {
			if j.Spec.Action.Firmware.RollbackOf != "" {
				made++
			}
		}
		if want := map[bool]int{true: 1, false: 0}[gate]; err != nil || made != want {
			t.Errorf("gate %t: %d rollbacks, want %d, %v", gate, made, want, err)
		}
	}
}

// jobOf is the job of a group that has a task of the device.
func (m *testManager) jobOf(t *testing.T, group api.JobGroup, id devices.ID) string {
	t.Helper()
	return group.Items[slices.IndexFunc(group.Items, func(j api.Job) bool { return m.tasksOf(t, j.ID)[id].Device == id })].ID
}

// broken is a store that cannot create groups for a time, or not end a job.
type broken struct {
	jobs.Store
	create, edit int
}

func (f *broken) CreateGroup(ctx context.Context, list []jobs.Job) ([]jobs.Job, bool, error) {
	if f.create--; f.create >= 0 {
		return nil, false, errors.New("the database is away")
	}
	return f.Store.CreateGroup(ctx, list)
}

func (f *broken) Edit(ctx context.Context, id string, edit func(*jobs.Job) error) (jobs.Job, error) {
	if f.edit--; f.edit >= 0 {
		return jobs.Job{}, errors.New("the database is away")
	}
	return f.Store.Edit(ctx, id, edit)
}

// A rollback that follows a halt is made once, though the node or the database fails in the middle.
func TestRollbackOnHaltGoesOn(t *testing.T) {
	for name, fault := range map[string]broken{"before its jobs": {create: 1}, "after its jobs": {edit: 1}} {
		m, _ := newRollouts(t)
		r := roll()
		r.Firmware = api.FirmwareOptions{OnHalt: "rollback"}
		group, _, err := m.Roll(t.Context(), devicetest.Admin, r, CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		m.turns(t)
		job := m.jobOf(t, group, lamp)
		m.install(t, job, lamp, "elf c", "elf a")
		if _, err := m.Store.Step(t.Context(), job, lamp, func(s *jobs.Step, _ bool) error {
			s.FailGate(jobs.GateConnect, "it did not")
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		fault.Store = m.Store
		m.Store = &fault
		pass := newTurn(m.Manager)
		for range 4 {
			_ = pass.once(t.Context()) // one of them meets the fault
		}
		all, _, err := m.Store.Jobs(t.Context(), jobs.Filter{Limit: 100})
		made := 0
		for _, j := range all {
			if j.Spec.Action.Firmware.RollbackOf != "" {
				made++
			} else if j.ID == job && j.State != jobs.Cancelled {
				t.Errorf("%s: the job is %s", name, j.State)
			}
		}
		if err != nil || made != 1 || fault.create > 0 || fault.edit > 0 {
			t.Errorf("%s: %d rollbacks, want 1, %v", name, made, err)
		}
	}
}

// running is a fleet whose devices run other images than their rows say.
type running struct {
	Fleet
	elf map[devices.ID]string
}

func (r *running) Views(ctx context.Context, ids []devices.ID) ([]devices.View, error) {
	views, err := r.Fleet.Views(ctx, ids)
	for i := range views {
		if elf := r.elf[views[i].Device.ID]; elf != "" {
			views[i].Device.ELF = elf
		}
	}
	return views, err
}

// A rollback has the devices that run the image of its job, or may come to run it, and no device that somebody has given another one since.
func TestRollbackLeavesOtherImages(t *testing.T) {
	for runs, want := range map[string]int{"elf a": 1, "elf c": 1, "": 1, "elf b": 0, "unknown": 0} {
		m, _ := newRollouts(t)
		group, _, err := m.Roll(t.Context(), devicetest.Admin, roll(), CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		m.turns(t)
		job := m.jobOf(t, group, lamp)
		m.install(t, job, lamp, "elf c", "elf a")
		m.Fleet = &running{m.Fleet, map[devices.ID]string{lamp: runs}}
		back, err := m.Rollback(t.Context(), devicetest.Admin, job, CreateOptions{})
		if err != nil || len(back.Items) != 1 {
			t.Fatalf("%+v, %v", back, err)
		}
		m.turns(t)
		if tasks := m.tasksOf(t, back.Items[0].ID); len(tasks) != want {
			t.Errorf("the device runs %q: %d tasks, want %d", runs, len(tasks), want)
		} else if want == 1 && tasks[lamp].Rollout.Replaces != "elf a" {
			t.Errorf("the device runs %q: the rollback takes %q away", runs, tasks[lamp].Rollout.Replaces)
		}
	}
}
