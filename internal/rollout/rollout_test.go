package rollout

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devicetest"
	"fleetd/internal/jobs"
	"fleetd/internal/preflight"
	"fleetd/internal/store"
	"fleetd/internal/store/jobstore"
	"fleetd/internal/store/storetest"
)

const (
	lamp  = devices.ID("02:00:00:00:00:01")
	other = devices.ID("02:00:00:00:00:02")
	image = "abababababababababababababababababababababababababababababababab"
)

var home = netip.MustParseAddr("192.0.2.7")

// fleet is a Service with a database, one image, and devices as the test says.
type fleet struct {
	*Service
	store *jobstore.Store
	job   jobs.Job

	offer     preflight.Offer
	seenELF   string
	seen      bool // an earlier check showed what the device runs
	contested bool
	missing   bool // this node does not have the image
	view      devices.View
	before    *catalog.Catalog
	after     *catalog.Catalog
	calls     []devices.ToolCall
	answer    devices.ToolResult
	fault     error
	started   time.Time // of the only node
	judged    int       // how often
	recorded  string    // what the last check that was recorded said of the hardware
	active    bool
	may       bool
	no        *devices.Error
	events    []devices.Event
}

// JudgeCheck implements Images.
func (f *fleet) JudgeCheck(_ context.Context, _ string, _ []string, _ *devices.View, _ string, seen func(devices.DeviceImage) bool) (preflight.Offer, error) {
	f.judged++
	o := f.offer
	at := f.Store.Now().Add(-time.Hour)
	if !f.seen {
		at = f.Store.Now() // this check wrote it
	}
	if !seen(devices.DeviceImage{ELF: f.seenELF, At: at}) && o.Verdict == preflight.Fit {
		o.Verdict = preflight.Waiting
	}
	return o, nil
}

// File implements Images.
func (f *fleet) File(context.Context, string) (*os.File, error) {
	if f.missing {
		return nil, &devices.Error{Code: devices.CodeUnavailable, Detail: "it is not here"}
	}
	return os.Open(filepath.Join("testdata", "image"))
}

// Views implements Fleet.
func (f *fleet) Views(context.Context, []devices.ID) ([]devices.View, error) {
	return []devices.View{f.view}, nil
}

// newest returns the last image that was recorded of the device.
func (f *fleet) newest(context.Context, []devices.ID) (map[devices.ID]devices.DeviceImage, error) {
	d := &f.view.Device
	return map[devices.ID]devices.DeviceImage{d.ID: {ELF: d.ELF, Details: f.recorded}}, nil
}

// IsContested implements Fleet.
func (f *fleet) IsContested(devices.ID, time.Time) bool { return f.contested }

// Catalog implements Fleet.
func (f *fleet) Catalog(_ context.Context, h devices.Hash) (*catalog.Catalog, error) {
	for _, c := range []*catalog.Catalog{f.before, f.after} {
		if c != nil && devices.Hash(c.Hash) == h {
			return c, nil
		}
	}
	return nil, devices.ErrNotFound
}

// CallTool implements Fleet.
func (f *fleet) CallTool(_ context.Context, c devices.ToolCall) (devices.ToolResult, error) {
	f.calls = append(f.calls, c)
	return f.answer, f.fault
}

func newFleet(t *testing.T, ids ...devices.ID) *fleet {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	db, err := store.Open(t.Context(), "sqlite", t.TempDir(), log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close(context.Background()) })
	f := &fleet{store: jobstore.New(db, log), active: true, may: true, seen: true, seenELF: "old",
		offer: preflight.Offer{Judgment: preflight.Judgment{Verdict: preflight.Fit}, Ref: preflight.Ref{ID: image, ELF: "new"}, Version: "2.5.0", Size: 100, Details: `{"flash_size":1}`},
		view:  devices.View{Device: devices.Device{ID: lamp, Facts: devices.Facts{ELF: "old", Board: "bread", Chip: "esp32s3"}}}}
	f.Service = New(Options{Store: f.store, Fleet: f, Images: f, Active: func() bool { return f.active }, MayBegin: func() bool { return f.may },
		MayAct: func(context.Context, string, devices.ID) *devices.Error { return f.no }, Nodes: func() []devices.Node { return []devices.Node{{Started: f.started}} }, Newest: f.newest, Downloads: 2, Log: log,
		Publish: func(e devices.Event) { f.events = append(f.events, e) }})
	t.Cleanup(f.Close)
	storetest.AddImage(t, db, image)
	f.job = f.create(t, nil, ids...)
	return f
}

// create creates a firmware job for devices.
func (f *fleet) create(t *testing.T, change func(*api.JobSpec), ids ...devices.ID) jobs.Job {
	t.Helper()
	now := f.store.Now()
	spec := api.JobSpec{Select: "device=*", Action: api.JobAction{Firmware: &api.JobFirmware{Image: image}}, Stop: &api.JobStop{Failed: 100}, Stages: []api.JobStage{{OK: api.Amount{Percent: 100}}}}
	if change != nil {
		change(&spec)
	}
	if err := jobs.Check(&spec, time.UTC, now); err != nil {
		t.Fatal(err)
	}
	j := jobs.New(spec, "k", "k", "device=*", now)
	if !j.Fire(now) {
		t.Fatal("the job does not fire")
	}
	var rows []jobs.Task
	for _, id := range ids {
		rows = append(rows, jobs.Task{Device: id, Seq: j.CreatedAt.UnixMicro(), Spread: jobs.Spread(j.ID, id)})
	}
	j, _, err := f.store.Create(t.Context(), j, rows)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func (f *fleet) check(id devices.ID, elf string, from netip.Addr) *Offer {
	return f.Check(context.Background(), &Check{Device: id, Facts: devices.Facts{ELF: elf, Board: "bread", Chip: "esp32s3", Firmware: "2.4.2"}, Details: `{"flash_size":1}`, Address: from, Begun: clock.Now()})
}

func (f *fleet) task(t *testing.T, id devices.ID) jobs.Task {
	t.Helper()
	list, _, err := f.store.Tasks(t.Context(), jobs.TaskFilter{Job: f.job.ID, Limit: 10})
	for _, task := range list {
		if task.Device == id {
			return task
		}
	}
	t.Fatalf("device %s has no task: %v", id, err)
	return jobs.Task{}
}

// download opens a download and closes it as complete, or with an error.
func (f *fleet) download(t *testing.T, o *Offer, from netip.Addr, failure error, stopping bool) {
	t.Helper()
	d, err := f.Open(t.Context(), o.Token, from)
	if err != nil {
		t.Fatal(err)
	}
	d.Close(failure, stopping)
}

func TestFromCheckToProof(t *testing.T) {
	f := newFleet(t, lamp)
	o := f.check(lamp, "old", home)
	if o == nil || o.Version != "2.5.0" || o.Force || len(o.Token) > 100 {
		t.Fatalf("%+v", o)
	}
	if again := f.check(lamp, "old", home); again == nil || again.Token != o.Token || f.task(t, lamp).Rollout.Offers != 1 {
		t.Errorf("the repeated check: %+v", again)
	}
	f.download(t, o, home, nil, false)
	if task := f.task(t, lamp); task.Phase != jobs.PhaseBooting || task.Rollout.Flashes != 1 {
		t.Fatalf("%+v", task)
	}
	if no := f.Busy(t.Context(), lamp, false); no == nil || no.Code != devices.CodeDeviceBusy || !strings.Contains(no.Detail, f.job.ID) {
		t.Errorf("a call meanwhile: %v", no)
	}
	if no := f.MayRestart(t.Context(), lamp); no == nil || no.Code != jobs.CodeUnconfirmed {
		t.Errorf("a restart meanwhile: %v", no)
	}
	if o := f.check(lamp, "new", home); o != nil {
		t.Errorf("an offer beside the new image: %+v", o)
	}
	f.view.Device.ELF, f.view.Device.CheckedAt = "new", f.store.Now()
	if no := f.MayRestart(t.Context(), lamp); no != nil {
		t.Errorf("a restart after the check: %v", no)
	}
	if no := f.Busy(t.Context(), lamp, false); no != nil {
		t.Errorf("a call while it is proved: %v", no)
	}
	f.after, _ = catalog.New([]byte(`[{"name":"self.get_device_status"}]`))
	f.view.Presence.Catalog = f.after.Hash
	if err := f.connected(t.Context(), lamp, true, true); err != nil {
		t.Fatal(err)
	}
	if task := f.task(t, lamp); task.Rollout.Gate != jobs.GateStay || len(f.calls) != 1 || f.calls[0].Tool != "self.get_device_status" || f.calls[0].Job != f.job.ID {
		t.Errorf("%+v, calls %+v", task.Rollout, f.calls)
	}
	if _, err := f.Open(t.Context(), o.Token, home); err != nil {
		t.Errorf("a late GET is served while the task runs: %v", err)
	}
}

// A device that boots the image and falls back at once shows what it showed before. Nobody else sees that it had another image.
func TestFallenBack(t *testing.T) {
	for _, c := range []struct {
		name, back string
		cancelled  bool
		failure    error
		want       string
	}{
		{name: "the former image after the flash", back: "old", want: `"from":{"version":"2.5.0","elf_sha256":"new"},"to":{"version":"2.4.2","elf_sha256":"old"},"board":"bread","cause":"rolled_back"`},
		{name: "of a cancelled job", back: "old", cancelled: true, want: `"from":{"version":"2.5.0","elf_sha256":"new"},"to":{"version":"2.4.2","elf_sha256":"old"},"board":"bread","cause":"rolled_back"`},
		{name: "the image", back: "new"},
		{name: "an image of nobody", back: "third"},
		{name: "a broken download", back: "old", failure: errors.New("broken")},
	} {
		f := newFleet(t, lamp)
		f.download(t, f.check(lamp, "old", home), home, c.failure, false)
		if c.cancelled {
			if _, err := f.store.Edit(t.Context(), f.job.ID, func(j *jobs.Job) error { return j.Cancel(f.store.Now()) }); err != nil {
				t.Fatal(err)
			}
		}
		f.check(lamp, c.back, home)
		f.check(lamp, c.back, home)
		var got string
		for _, e := range f.events {
			got += string(e.Fields)
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestGatesThatFail(t *testing.T) {
	for _, c := range []struct {
		name  string
		set   func(f *fleet)
		want  string
		keeps []string
		back  string
	}{
		{"a tool is gone", func(*fleet) {}, "gate_tools", nil, ""},
		{"a tool may go", func(*fleet) {}, "", []string{"self.lamp.on"}, ""},
		{"a tool goes with the image that brought it", func(*fleet) {}, "", nil, "j-taken-back"},
		{"a list that is not complete", func(f *fleet) { f.view.Presence.Partial = true }, "gate_tools", nil, ""},
		{"no complete list after a rollback", func(f *fleet) { f.view.Presence.Partial = true }, "gate_tools", nil, "j-taken-back"},
		{"the status is an error", func(f *fleet) { f.answer.IsError = true }, "gate_status", []string{"self.lamp.on"}, ""},
	} {
		f := newFleet(t)
		f.job = f.create(t, func(s *api.JobSpec) { s.Action.Firmware.MayLose, s.Action.Firmware.RollbackOf = c.keeps, c.back }, lamp)
		f.before, _ = catalog.New([]byte(`[{"name":"self.get_device_status"},{"name":"self.lamp.on"}]`))
		f.after, _ = catalog.New([]byte(`[{"name":"self.get_device_status"}]`))
		f.view.Presence.Catalog = f.before.Hash
		if again := f.Restart(t.Context(), &f.job, lamp, func(permit func() error) error { return permit() }); again != 0 {
			t.Fatalf("%s: no restart: %v", c.name, again)
		}
		f.download(t, f.check(lamp, "old", home), home, nil, false)
		f.check(lamp, "new", home)
		f.view.Presence.Catalog = f.after.Hash
		c.set(f)
		if err := f.connected(t.Context(), lamp, true, true); err != nil {
			t.Fatal(err)
		}
		if task := f.task(t, lamp); task.Code != c.want {
			t.Errorf("%s: %q %s, want %q", c.name, task.Code, task.Detail, c.want)
		}
	}
}

// Calls of people pass while a device is proved. If they have its slots, the gate waits, to the end of its time.
func TestStatusWaits(t *testing.T) {
	for code, fails := range map[devices.Code]bool{devices.CodeDeviceBusy: false, devices.CodeConnectionLost: false, devices.CodeUnavailable: false, devices.CodeDeviceError: true} {
		f := newFleet(t, lamp)
		f.download(t, f.check(lamp, "old", home), home, nil, false)
		f.check(lamp, "new", home)
		f.after, _ = catalog.New([]byte(`[{"name":"self.get_device_status"}]`))
		f.view.Presence.Catalog = f.after.Hash
		f.fault = &devices.Error{Code: code, Detail: "no"}
		err := f.connected(t.Context(), lamp, true, true)
		if task := f.task(t, lamp); (err == nil) != fails || (task.Code == "gate_status") != fails {
			t.Errorf("%s: %v, %q %q", code, err, task.State, task.Code)
		}
		f.fault = nil
		if err := f.connected(t.Context(), lamp, true, true); err != nil || !fails && f.task(t, lamp).Rollout.Gate != jobs.GateStay {
			t.Errorf("%s, and the next call: %v, %+v", code, err, f.task(t, lamp))
		}
	}
}

// aside is a store whose database has a clock of its own.
type aside struct {
	jobs.Store
	by time.Duration
}

func (s aside) Now() time.Time { return s.Store.Now().Add(s.by) }

// Rows have the time of the database, and a check that of its node: nothing is offered in the first check of an image however far they are apart.
func TestFirstCheckWithAnotherClock(t *testing.T) {
	for _, by := range []time.Duration{-time.Hour, -30 * time.Second, 0, 30 * time.Second, time.Hour} {
		f := newFleet(t, lamp)
		f.Store, f.seen = aside{f.store, by}, false
		if o := f.check(lamp, "old", home); o != nil {
			t.Errorf("%v: an offer in the first check", by)
		}
		if f.seen = true; by >= 0 && f.check(lamp, "old", home) == nil { // before, the job has not begun
			t.Errorf("%v: no offer in a later check", by)
		}
	}
}

// twice is a store whose transactions are repeated, as after a conflict: the second time an older task of the device is due.
type twice struct{ jobs.Store }

func (s twice) Step(ctx context.Context, id string, device devices.ID, f func(*jobs.Step, bool) error) (jobs.Task, error) {
	return s.Store.Step(ctx, id, device, func(step *jobs.Step, ahead bool) error {
		j, task := *step.Job, *step.Task
		_ = f(&jobs.Step{Job: &j, Task: &task, Now: step.Now}, ahead) // what it did is rolled back
		return f(step, true)
	})
}

func TestRepeatedTransaction(t *testing.T) {
	f := newFleet(t, lamp)
	f.Store = twice{f.store}
	if o := f.check(lamp, "old", home); o != nil {
		t.Errorf("%+v is offered, and the row does not know", o)
	}
	if task := f.task(t, lamp); task.State != jobs.TaskWaiting || len(f.places.list) != 0 {
		t.Errorf("%s, %d places are taken", task.State, len(f.places.list))
	}
}

// Whatever is missing, the device gets no offer, and what was not offered costs nothing.
func TestNoOffer(t *testing.T) {
	for name, change := range map[string]func(f *fleet, c *Check){
		"there are no firmware jobs":    func(f *fleet, _ *Check) { f.active = false },
		"the node stops":                func(f *fleet, _ *Check) { f.may = false },
		"it waits for approval":         func(_ *fleet, c *Check) { c.Activation = true },
		"the first check of an image":   func(f *fleet, _ *Check) { f.seen = false },
		"another client contests it":    func(f *fleet, _ *Check) { f.contested = true },
		"the image is not at hand":      func(f *fleet, _ *Check) { f.missing = true },
		"a device without a task":       func(_ *fleet, c *Check) { c.Device = other },
		"its owner is not known yet":    func(f *fleet, _ *Check) { f.no = &devices.Error{Code: devices.CodeUnavailable} },
		"all places are taken":          func(f *fleet, _ *Check) { f.places.limit = 0 },
		"its address has eight of them": func(f *fleet, c *Check) { fill(f, c.Address) },
	} {
		f := newFleet(t, lamp)
		c := &Check{Device: lamp, Facts: devices.Facts{ELF: "old", Board: "bread"}, Details: `{}`, Address: home, Begun: clock.Now()}
		change(f, c)
		// security: D27
		if o := f.Check(t.Context(), c); o != nil {
			t.Errorf("%s: %+v", name, o)
		}
		if task := f.task(t, lamp); task.State != jobs.TaskWaiting || task.Attempt != 0 {
			t.Errorf("%s: %+v", name, task)
		}
	}
}

// Devices behind a proxy that does not name them have no address to share.
func TestOffersBehindAProxy(t *testing.T) {
	f := newFleet(t, lamp)
	f.places.limit = 100
	for i := range perAddress {
		f.places.take(string(rune('a'+i)), "")
	}
	if o := f.check(lamp, "old", netip.Addr{}); o == nil {
		t.Error("it gets no offer")
	}
}

func fill(f *fleet, from netip.Addr) {
	f.places.limit = 100
	for i := range perAddress {
		f.places.take(string(rune('a'+i)), from.String())
	}
}

func TestTasksThatEndAtACheck(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(f *fleet)
		outcome jobs.Outcome
		code    string
		halted  string
	}{
		{"the device may not get it", func(f *fleet) {
			f.offer.Judgment = preflight.Judgment{Verdict: preflight.Blocked, Code: "slot", Text: "too small"}
		}, jobs.Refused, "slot", ""},
		{"the device has it", func(f *fleet) { f.offer.Verdict = preflight.Already }, jobs.Already, "", ""},
		{"the key may not", func(f *fleet) { f.no = &devices.Error{Code: devices.CodeForbidden, Detail: "no"} }, jobs.Refused, "forbidden", ""},
		{"the key has ended", func(f *fleet) { f.no = &devices.Error{Code: devices.CodeUnauthorized} }, "", "", jobs.ReasonKey},
	} {
		f := newFleet(t, lamp)
		c.change(f)
		if o := f.check(lamp, "old", home); o != nil {
			t.Errorf("%s: %+v", c.name, o)
		}
		task := f.task(t, lamp)
		j, err := f.store.Job(t.Context(), f.job.ID)
		// security: D27 K45
		if err != nil || task.Outcome != c.outcome || task.Code != c.code || c.halted != "" && j.Reason != c.halted {
			t.Errorf("%s: %+v, %s %s, %v", c.name, task, j.State, j.Reason, err)
		}
	}
}

// A token opens the image of its own task until that ends, twice at once, and moves it on only from where the check came.
func TestTokens(t *testing.T) {
	f := newFleet(t, lamp, other)
	o, second := f.check(lamp, "old", home), f.check(other, "old", home)
	token := o.Token
	for name, wrong := range map[string]string{"empty": "", "altered": token[:len(token)-1] + "_", "of another device": strings.Replace(token, lamp.Token(), other.Token(), 1),
		"of another job": strings.Replace(token, f.job.ID, "01m8fe8yckp9p1p4wn2q", 1), "a path": "../" + token, "no job": "x-y-z", "of an unknown device": strings.Replace(token, lamp.Token(), "020000000009", 1),
		"the secret of the other": strings.Replace(second.Token, other.Token(), lamp.Token(), 1)} {
		// security: D27 D29
		if d, err := f.Open(t.Context(), wrong, home); !errors.Is(err, ErrNoDownload) && !errors.Is(err, devices.ErrNotFound) {
			t.Errorf("%s: %+v, %v", name, d, err)
		}
	}
	stranger, err := f.Open(t.Context(), token, netip.MustParseAddr("198.51.100.1"))
	if err != nil || stranger.counts || f.task(t, lamp).Phase != jobs.PhaseOffered {
		t.Fatalf("from elsewhere: %+v, %v", stranger, err)
	}
	first, err := f.Open(t.Context(), token, home)
	if err != nil || !first.counts {
		t.Fatal(err)
	}
	if _, err := f.Open(t.Context(), token, home); !errors.Is(err, ErrBusy) {
		t.Errorf("a third one: %v", err)
	}
	stranger.Close(nil, false)
	if task := f.task(t, lamp); task.Phase != jobs.PhaseLoading || task.Rollout.Flashes != 0 {
		t.Errorf("another's last byte: %+v", task)
	}
	if again, err := f.Open(t.Context(), token, home); err != nil || again.counts {
		t.Errorf("once more: %v", err)
	} else {
		again.Close(nil, false)
	}
	first.Close(errors.New("it broke"), false)
	devicetest.Eventually(t, "the task waits", func() bool { return f.task(t, lamp).State == jobs.TaskWaiting })
	if _, err := f.Open(t.Context(), token, home); !errors.Is(err, ErrNoDownload) {
		t.Errorf("after its task has gone back: %v", err)
	}
	f.download(t, second, home, errors.New("cut"), true)
	devicetest.Eventually(t, "a download that the node cut is no offer", func() bool {
		task := f.task(t, other)
		return task.State == jobs.TaskWaiting && task.Rollout.Offers == 0
	})
	if n := f.places.loading(); n != 0 {
		t.Errorf("%d downloads are left", n)
	}
}

// An offer that was not fetched in time can be fetched until its task ends, and counts if its job goes on.
func TestLateDownload(t *testing.T) {
	for _, paused := range []bool{false, true} {
		f := newFleet(t, lamp)
		o := f.check(lamp, "old", home)
		if _, err := f.store.Step(t.Context(), f.job.ID, lamp, func(s *jobs.Step, _ bool) error {
			s.Task.LimitAt = s.Now
			s.Expire()
			if paused {
				return s.Job.Pause("")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		d, err := f.Open(t.Context(), o.Token, home)
		if err != nil {
			t.Fatalf("paused %t: %v", paused, err)
		}
		if task := f.task(t, lamp); d.counts == paused || (task.Phase == jobs.PhaseLoading) == paused {
			t.Errorf("paused %t: it counts %t, %+v", paused, d.counts, task)
		}
		d.Close(nil, false)
		if task := f.task(t, lamp); task.Rollout.Offers != 1 || (task.Phase == jobs.PhaseBooting) == paused {
			t.Errorf("paused %t: %+v %+v", paused, task, task.Rollout)
		}
	}
}

// A connected device that has to wait, since the places of the stage are for others, is not judged again and again.
func TestRestartWaitsForAPlace(t *testing.T) {
	f := newFleet(t, lamp, other)
	if _, err := f.store.Edit(t.Context(), f.job.ID, func(j *jobs.Job) error { j.Provable = 2; return nil }); err != nil {
		t.Fatal(err)
	}
	again := f.Restart(t.Context(), &f.job, lamp, func(permit func() error) error { return permit() })
	if task := f.task(t, lamp); task.State != jobs.TaskWaiting || f.judged != 0 || again < 10*time.Second {
		t.Errorf("it was judged %d times, again after %v: %+v", f.judged, again, task)
	}
}

func TestRestarts(t *testing.T) {
	send := func(permit func() error) error { return permit() }
	f := newFleet(t, lamp)
	f.may = false
	if again := f.Restart(t.Context(), &f.job, lamp, send); again == 0 || f.task(t, lamp).State != jobs.TaskWaiting {
		t.Error("a node that stops restarts a device")
	}
	f.may = true
	refused := errors.New("its session has ended")
	if again := f.Restart(t.Context(), &f.job, lamp, func(func() error) error { return refused }); again == 0 || f.task(t, lamp).State != jobs.TaskWaiting || f.task(t, lamp).Rollout.Restarts != 0 {
		t.Errorf("a restart that was not sent: %+v", f.task(t, lamp))
	}
	if _, err := f.store.Step(t.Context(), f.job.ID, lamp, func(s *jobs.Step, _ bool) error {
		s.Task.DueAt = time.Time{}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if again := f.Restart(t.Context(), &f.job, lamp, send); again != 0 || f.task(t, lamp).Phase != jobs.PhaseCalled || f.task(t, lamp).Rollout.Restarts != 1 {
		t.Fatalf("%v, %+v", again, f.task(t, lamp))
	}
	if no := f.Busy(t.Context(), lamp, true); no == nil || no.Code != devices.CodeDeviceBusy {
		t.Errorf("a call before it has gone: %v", no)
	}
	f.Gone(lamp, "", "")
	if no := f.Busy(t.Context(), other, true); no != nil {
		t.Errorf("a call of another device: %v", no)
	}
	if again := f.Restart(t.Context(), &f.job, lamp, send); again == 0 || f.task(t, lamp).Rollout.Restarts != 1 {
		t.Error("it restarts twice")
	}
	f.missing = true
	g := newFleet(t, lamp)
	g.missing = true
	if again := g.Restart(t.Context(), &g.job, lamp, send); again == 0 || g.task(t, lamp).State != jobs.TaskWaiting {
		t.Error("a device restarts for an image that is not at hand")
	}
}

// What a check said counts although no step could be made of it, and a device that comes back late is counted after all.
func TestCheckWithoutAStep(t *testing.T) {
	f := newFleet(t, lamp, other)
	past := func(id devices.ID) {
		t.Helper()
		if _, err := f.store.Step(t.Context(), f.job.ID, id, func(s *jobs.Step, _ bool) error {
			s.Task.LimitAt = s.Now.Add(-time.Second)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []devices.ID{lamp, other} {
		f.download(t, f.check(id, "old", home), home, nil, false)
		past(id)
	}
	f.view.Device.Facts = devices.Facts{ELF: "new", Board: "bread", Chip: "esp32s3", CheckedAt: f.store.Now().Add(time.Second)}
	if err := f.Expire(t.Context()); err != nil {
		t.Fatal(err)
	}
	if task := f.task(t, lamp); task.Phase != jobs.PhaseProving {
		t.Errorf("%+v", task)
	}
	g := newFleet(t, lamp)
	g.download(t, g.check(lamp, "old", home), home, nil, false)
	f.job, f.store = g.job, g.store
	past(lamp)
	if err := g.Expire(t.Context()); err != nil || g.task(t, lamp).Code != jobs.CodeLost {
		t.Fatalf("%+v, %v", g.task(t, lamp), err)
	}
	g.Changed(devices.ImageChange{Device: lamp, To: devices.DeviceImage{ELF: "new"}})
	devicetest.Eventually(t, "it is counted as ok", func() bool { return g.task(t, lamp).Outcome == jobs.OK })
	h := newFleet(t, lamp, other)
	h.download(t, h.check(lamp, "old", home), home, nil, false)
	f.job, f.store = h.job, h.store
	past(lamp)
	if err := h.Expire(t.Context()); err != nil || h.task(t, lamp).Code != jobs.CodeLost {
		t.Fatalf("%+v, %v", h.task(t, lamp), err)
	}
	h.Changed(devices.ImageChange{Device: lamp, To: devices.DeviceImage{ELF: "new", Board: "other"}})
	devicetest.Eventually(t, "another board halts the job", func() bool {
		j, err := h.store.Job(t.Context(), h.job.ID)
		return err == nil && j.State == jobs.Halted && j.Reason == jobs.ReasonBoard && h.task(t, lamp).Code == jobs.CodeBoardChanged
	})
}

// A check that no step could be made of shows another display than before.
func TestOtherDisplayWithoutAStep(t *testing.T) {
	f := newFleet(t, lamp)
	o := f.Check(t.Context(), &Check{Device: lamp, Facts: devices.Facts{ELF: "old", Board: "bread", Firmware: "2.4.2"}, Details: `{"display":{"width":320,"height":240}}`, Address: home, Begun: clock.Now()})
	f.download(t, o, home, nil, false)
	f.view.Device.Facts, f.recorded = devices.Facts{ELF: "new", Board: "bread"}, `{"display":{"width":128,"height":64}}`
	if err := f.connected(t.Context(), lamp, false, false); err != nil {
		t.Fatal(err)
	}
	if task := f.task(t, lamp); task.Code != jobs.CodeBoardChanged {
		t.Errorf("%+v", task)
	}
}

// A device that comes back with its former image has not failed if no node could answer the first check with the new one.
func TestOutage(t *testing.T) {
	f := newFleet(t, lamp, other)
	for _, id := range []devices.ID{lamp, other} {
		if f.started = time.Now().Add(-time.Hour); id == other {
			f.view.Device.ID = other
		}
		f.download(t, f.check(id, "old", home), home, nil, false)
		if id == other {
			f.started = time.Now().Add(time.Second)
		}
		f.check(id, "old", home)
	}
	if r := f.task(t, lamp).Rollout; !r.Harmed || r.Excused != 0 {
		t.Errorf("while a node answered: %+v", r)
	}
	task := f.task(t, other)
	if r := task.Rollout; r.Harmed || r.Excused != 1 || r.Flashes != 1 || task.Code != jobs.CodeRolledBack || task.State != jobs.TaskWaiting {
		t.Errorf("while none did: %+v %+v", task, r)
	}
}

// A rollback takes the image of its job away, and no other that somebody has flashed since the rollback was prepared.
func TestRollbackOfAnotherImage(t *testing.T) {
	for elf, want := range map[string]jobs.Outcome{"bad": "", "by hand": jobs.Refused} {
		f := newFleet(t, lamp)
		if _, err := f.store.Step(t.Context(), f.job.ID, lamp, func(s *jobs.Step, _ bool) error {
			s.Rollout().Replaces = "bad"
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		f.seenELF, f.view.Device.ELF = elf, elf
		sent := 0
		f.Restart(t.Context(), &f.job, lamp, func(permit func() error) error {
			sent++
			return permit()
		})
		o := f.check(lamp, elf, home)
		task := f.task(t, lamp)
		if is := want == ""; (o != nil) != is || (sent == 1) != is || task.Outcome != want {
			t.Errorf("%s: %d restarts, offer %v, %+v", elf, sent, o, task)
		}
		if want != "" && task.Code != jobs.CodeOtherImage {
			t.Errorf("%s: %s", elf, task.Code)
		}
	}
}

// A device whose task has ended well is counted as failed when it runs its former image again, and as well when it is back.
func TestBackAfterAll(t *testing.T) {
	f := newFleet(t, lamp)
	f.download(t, f.check(lamp, "old", home), home, nil, false)
	f.check(lamp, "new", home)
	if _, err := f.store.Step(t.Context(), f.job.ID, lamp, func(s *jobs.Step, _ bool) error {
		for _, gate := range jobs.Gates {
			s.Pass(gate)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	former, current := devices.DeviceImage{ELF: "old", Board: "bread"}, devices.DeviceImage{ELF: "new", Board: "bread"}
	for _, c := range []struct {
		cause    devices.ImageCause
		from, to devices.DeviceImage
		want     jobs.Outcome
	}{{devices.CauseForeign, current, former, jobs.Failed}, {devices.CauseForeign, former, current, jobs.OK}} {
		c.to.Cause = c.cause
		f.Changed(devices.ImageChange{Device: lamp, From: c.from, To: c.to})
		devicetest.Eventually(t, "it counts as "+string(c.want), func() bool { return f.task(t, lamp).Outcome == c.want })
	}
	former.Cause = devices.CauseJob // a rollback
	f.Changed(devices.ImageChange{Device: lamp, From: current, To: former})
	f.Close()
	if j, err := f.store.Job(t.Context(), f.job.ID); err != nil || j.Counts.Of(jobs.OK) != 1 || j.Counts.Of(jobs.Failed) != 0 || j.PassedOK != 1 || j.State == jobs.Halted {
		t.Errorf("%+v, %v", j, err)
	}
}

func TestConnectWithoutACheck(t *testing.T) {
	f := newFleet(t, lamp)
	f.download(t, f.check(lamp, "old", home), home, nil, false)
	if err := f.connected(t.Context(), lamp, false, true); err != nil {
		t.Fatal(err)
	}
	if task := f.task(t, lamp); task.State != jobs.TaskWaiting || task.Code != jobs.CodeImageRefused || !task.Rollout.Harmed {
		t.Errorf("%+v %+v", task, task.Rollout)
	}
	if no := f.MayRestart(t.Context(), lamp); no == nil {
		t.Error("a connection counts as a check")
	}
	f.check(lamp, "new", home)
	f.view.Device.ELF = "new"
	if task := f.task(t, lamp); task.Phase != jobs.PhaseProving {
		t.Errorf("%+v %+v", task, task.Rollout)
	}
	if no := f.MayRestart(t.Context(), lamp); no != nil {
		t.Errorf("after its check: %v", no)
	}
}
