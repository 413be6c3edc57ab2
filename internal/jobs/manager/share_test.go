package manager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/jobs"
	"fleetd/internal/selector"
)

// child returns a new console key of a caller.
func (m *testManager) child(t *testing.T, parent access.Principal, scopes access.Scopes) access.Principal {
	t.Helper()
	k, err := m.fleet.Keys().ConsoleKey(parent.Caller, scopes, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return m.issue(t, k)
}

// grant returns a new grant of a caller.
func (m *testManager) grant(t *testing.T, parent access.Principal, scopes, selector string, tools ...string) access.Principal {
	t.Helper()
	s, d := devicetest.Rights(t, scopes, selector)
	k, err := m.fleet.Keys().GrantKey(parent.Caller, access.Grant{Host: "host.example", Client: "c", Resource: "/mcp"}, s, d, tools, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return m.issue(t, k)
}

// issue returns the caller of a new child.
func (m *testManager) issue(t *testing.T, k access.Key) access.Principal {
	t.Helper()
	k, _, err := m.fleet.Keys().Issue(k, time.Now())
	if err == nil {
		_, err = m.fleet.Keys().Put(k, time.Now())
	}
	if err != nil {
		t.Fatal(err)
	}
	who, _ := m.fleet.Keys().Caller(k.ID)
	return access.Principal{Caller: who, Via: access.ViaREST}
}

// revoke revokes the key of a caller.
func (m *testManager) revoke(t *testing.T, who access.Principal) {
	t.Helper()
	if _, _, err := m.fleet.RevokeKey(t.Context(), devicetest.Admin, who.Key()); err != nil {
		t.Fatal(err)
	}
}

// pass does the periodic work once.
func (m *testManager) pass(t *testing.T) {
	t.Helper()
	pass := newTurn(m.Manager)
	if err := pass.once(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (m *testManager) stored(t *testing.T, id string) jobs.Job {
	t.Helper()
	j, err := m.Store.Job(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// Five console keys of one key hold together what the key itself may.
func TestChildrenShareWithTheirParent(t *testing.T) {
	m := newManager(t)
	parent, other := m.key(t, "jobs jobs:read tools:call", ""), m.key(t, "jobs tools:call", "")
	var children []access.Principal
	for range 4 {
		children = append(children, m.child(t, parent, m.key(t, "jobs tools:call", "").Caller.Scopes))
	}
	children = append(children, m.child(t, parent, 0))
	later := func(by access.Principal) error {
		_, _, err := m.Later(t.Context(), by, devices.ToolCall{Device: lamp, Tool: "self.get"}, 0, time.Hour, "")
		return err
	}
	queued := 0
	for failed := 0; failed < len(children); queued++ {
		failed = 0
		for failed < len(children) && later(children[(queued+failed)%len(children)]) != nil {
			failed++
		}
		if failed == len(children) {
			break
		}
	}
	// security: K40
	if err := later(parent); queued != 37 || codeOf(err) != devices.CodeQueueFull {
		t.Errorf("the children have %d places of a device's queue, and their parent gets one more: %v", queued, err)
	}
	// security: K40
	if err := errors.Join(later(other), later(devicetest.Admin)); err != nil {
		t.Errorf("another key, and the administrator: %v", err)
	}
	// When the key has ended, what it held counts no longer, and its jobs halt.
	list, err := m.Store.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m.revoke(t, parent)
	// security: K40
	for range 36 {
		if err := later(other); err != nil {
			t.Fatal(err)
		}
	}
	m.pass(t)
	// security: K40
	if j := m.stored(t, list[0].ID); j.State != jobs.Halted || j.Reason != jobs.ReasonKey {
		t.Errorf("%+v", j)
	}
}

// A grant with limits of its own finds its own jobs alone; its key finds them, too.
func TestJobsOfAGrant(t *testing.T) {
	m := newManager(t)
	parent := m.key(t, "jobs jobs:read tools:call:user events:read", "room in (lab,hall)")
	const rights = "jobs jobs:read tools:call events:read"
	one, other, tool := m.grant(t, parent, rights, "room=lab"), m.grant(t, parent, rights, "room=lab"), m.grant(t, parent, rights, "", "self.get")
	console := m.child(t, parent, m.key(t, rights, "").Caller.Scopes)
	job := func(by access.Principal) string {
		t.Helper()
		j, _, err := m.Create(t.Context(), by, callSpec("self.get", lamp), CreateOptions{Key: "once"})
		if err != nil {
			t.Fatal(err)
		}
		return j.ID
	}
	of := map[string]string{"parent": job(parent), "one": job(one), "other": job(other)}
	for _, c := range []struct {
		name string
		by   access.Principal
		sees string
	}{{"the key", parent, "one other parent"}, {"a console key with fewer scopes", console, "one other parent"}, {"a grant", one, "one"}, {"another one", other, "other"}, {"a grant with other limits", tool, ""}} {
		list, err := m.List(t.Context(), c.by, Query{})
		queue, failed := m.Queue(t.Context(), c.by, lamp)
		if err := errors.Join(err, failed); err != nil {
			t.Fatal(err)
		}
		var got, listed, queued, heard []string
		for _, name := range []string{"one", "other", "parent"} {
			if _, err := m.Get(t.Context(), c.by, of[name]); err == nil {
				got = append(got, name)
			}
			if slices.ContainsFunc(list.Items, func(j api.Job) bool { return j.ID == of[name] }) {
				listed = append(listed, name)
			}
			if slices.ContainsFunc(queue, func(t api.Task) bool { return t.Job == of[name] }) {
				queued = append(queued, name)
			}
			if m.fleet.PermitEvent(t.Context(), c.by, &devices.StreamEvent{Kind: devices.JobEvent("done"), Owner: m.stored(t, of[name]).Owner}) == nil {
				heard = append(heard, name)
			}
		}
		// security: K20
		for _, seen := range [][]string{got, listed, queued, heard} {
			if strings.Join(seen, " ") != c.sees {
				t.Errorf("%s sees %v, %v, %v, %v, want %s", c.name, got, listed, queued, heard, c.sees)
			}
		}
		if strings.Contains(c.sees, "parent") {
			continue
		}
		// security: K20
		if _, err := m.Do(t.Context(), c.by, of["parent"], "cancel", VerbOptions{}); codeOf(err) != devices.CodeNotFound {
			t.Errorf("%s cancels a job of its key: %v", c.name, err)
		}
	}
}

// What a child with fewer rights has created acts with these, also after its end, until its key ends.
func TestActingAsAGrant(t *testing.T) {
	m := newManager(t)
	parent := m.key(t, "jobs tools:call:user", "")
	for _, by := range []access.Principal{m.grant(t, parent, "jobs tools:call", "room=lab"), m.child(t, parent, m.key(t, "jobs tools:call", "").Caller.Scopes)} {
		j, _, err := m.Create(t.Context(), by, callSpec("self.get", lamp), CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.fleet.RevokeKey(t.Context(), devicetest.Admin, by.Caller.Through); err != nil {
			t.Fatal(err)
		}
		who, err := m.fleet.Keys().Acting(m.stored(t, j.ID).Owner, false, time.Now())
		// security: K21
		if err != nil || who.Scopes != by.Caller.Scopes || who.Devices.String() != by.Caller.Devices.String() || who.Key != parent.Key() || (access.Principal{Caller: who}).Owner() != by.Owner() || m.fleet.Keys().Valid(who, time.Now()) != nil {
			t.Errorf("%+v, %v", who, err)
		}
	}
	j, _, err := m.Create(t.Context(), m.child(t, parent, 0), callSpec("self.get", lamp), CreateOptions{})
	if err != nil || m.stored(t, j.ID).Owner != parent.Key() {
		t.Errorf("a console key with all rights: %+v, %v", m.stored(t, j.ID), err)
	}
	m.revoke(t, parent)
	if _, err := m.fleet.Keys().Acting(parent.Key()+"/"+"x", false, time.Now()); err == nil {
		t.Error("it acts after the end of its key")
	}
}

// A job whose key has ended is continued by somebody with the rights, whose job it then is.
func TestTakeOver(t *testing.T) {
	m := newManager(t)
	by, another, lacking := m.key(t, "jobs tools:call", ""), m.key(t, "jobs tools:call", ""), m.key(t, "jobs", "")
	j, _, err := m.Create(t.Context(), by, api.JobSpec{Action: callSpec("self.get").Action, Select: "room=lab", When: &api.JobWhen{Cron: "0 7 * * *"}}, CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m.revoke(t, by)
	m.pass(t)
	if j := m.stored(t, j.ID); j.State != jobs.Halted || j.Reason != jobs.ReasonKey {
		t.Fatalf("%+v", j)
	}
	if shown, err := m.Get(t.Context(), another, j.ID); err != nil || !shown.NextAt.IsZero() {
		t.Errorf("a halted schedule shows a next time: %v, %v", shown.NextAt, err)
	}
	// security: K41
	if _, err := m.Do(t.Context(), lacking, j.ID, "resume", VerbOptions{}); codeOf(err) != devices.CodeForbidden {
		t.Errorf("without the right to the action: %v", err)
	}
	resumed, err := m.Do(t.Context(), another, j.ID, "resume", VerbOptions{})
	if err != nil || resumed.CreatedBy != another.Name() || resumed.State != string(jobs.Scheduled) || resumed.NextAt.IsZero() {
		t.Fatalf("%+v, %v", resumed, err)
	}
	m.pass(t)
	if j := m.stored(t, j.ID); j.State != jobs.Scheduled || j.Owner != another.Key() {
		t.Errorf("%+v", j)
	}
	audited := false
	for _, e := range m.ports.Recorded() {
		audited = audited || e.Key == another.Key() && e.Action == "resume job" && strings.Contains(e.Detail, by.Key()) && strings.Contains(e.Detail, j.ID)
	}
	// security: K41
	if !audited {
		t.Error("the audit does not say whose job it was")
	}
}

// Who may not create a job's action makes nothing more of it happen; to pause and to cancel need jobs alone.
func TestRightsOnJobsOfOthers(t *testing.T) {
	m := newManager(t)
	all := m.key(t, "jobs tools:call:user", "")
	rate, note := &api.JobPace{Rate: "unlimited", Concurrency: 1000}, "x"
	for _, c := range []struct {
		name   string
		by     access.Principal
		action api.JobAction
		may    bool
	}{
		{"all rights", m.key(t, "jobs tools:call:user", ""), callSpec("self.get").Action, true},
		{"without tools:call", m.key(t, "jobs", ""), callSpec("self.get").Action, false},
		{"a tool for people", m.key(t, "jobs tools:call", ""), callSpec("self.reboot").Action, false},
		{"a restart", m.key(t, "jobs tools:call", ""), api.JobAction{Restart: &api.JobRestart{}}, false},
		{"a message", m.key(t, "jobs", ""), api.JobAction{Message: []byte(`{"type":"alert","status":"s","message":"m","emotion":"happy"}`)}, false},
	} {
		want := devices.Code("")
		if !c.may {
			want = devices.CodeForbidden
		}
		j, _, err := m.Create(t.Context(), all, api.JobSpec{Action: c.action, Devices: []string{string(lamp)}, Stages: []api.JobStage{{OK: api.Amount{Number: 1}}, {OK: api.Amount{Percent: 100}}}}, CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range []api.JobEdit{{Pace: rate}, {Note: &note}} {
			_, err := m.Edit(t.Context(), c.by, j.ID, e)
			// security: K41
			if got := codeOf(err); got != want && (c.may || got != devices.CodeToolDenied) {
				t.Errorf("%s: edit: %q (%v), want %q", c.name, got, err, want)
			}
		}
		for _, verb := range []string{"advance", "pause", "resume", "retry", "cancel"} {
			_, err := m.Do(t.Context(), c.by, j.ID, verb, VerbOptions{})
			wanted := want
			if verb == "pause" || verb == "cancel" {
				wanted = ""
			}
			// security: K41
			if got := codeOf(err); got != wanted && (wanted == "" || got != devices.CodeToolDenied) {
				t.Errorf("%s: %s: %q (%v), want %q", c.name, verb, got, err, wanted)
			}
		}
	}
}

// A limit of a key and a selection that cannot be stored together are refused; one that is stored halts its job, says so, and
// delays no other.
func TestSelectionThatCannotBeRead(t *testing.T) {
	m := newManager(t)
	long := "room in (lab," + strings.Repeat("x", 2500) + ")"
	scopes, limit := devicetest.Rights(t, "jobs tools:call", long)
	k, _, err := m.fleet.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: "long", Scopes: scopes, Devices: limit})
	if err != nil {
		t.Fatal(err)
	}
	who, _ := m.fleet.Keys().Caller(k.ID)
	spec := api.JobSpec{Action: callSpec("self.get").Action, Select: "room!=" + strings.Repeat("y", 2500)}
	by := access.Principal{Caller: who, Via: access.ViaREST}
	_, planned := m.Plan(t.Context(), by, spec)
	if _, _, err := m.Create(t.Context(), by, spec, CreateOptions{}); codeOf(err) != devices.CodeBadRequest || codeOf(planned) != devices.CodeBadRequest || !strings.Contains(err.Error(), "4096 bytes") {
		t.Errorf("%v, planned %v", err, planned)
	}
	sel := selector.And(limit, mustParse(t, spec.Select))
	if err := jobs.Check(&spec, time.UTC, m.Store.Now()); err != nil {
		t.Fatal(err)
	}
	bad := jobs.New(spec, by.Key(), by.Name(), sel.String(), m.Store.Now())
	if _, _, err := m.Store.Create(t.Context(), bad, nil); err != nil {
		t.Fatal(err)
	}
	good, _, err := m.Create(t.Context(), devicetest.Admin, api.JobSpec{Action: callSpec("self.get").Action, Select: "room=lab"}, CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m.pass(t)
	if j := m.stored(t, bad.ID); j.State != jobs.Halted || j.Reason != jobs.ReasonSelect {
		t.Errorf("%+v", j)
	}
	if j := m.stored(t, good.ID); j.State != jobs.Running || j.Counts.Waiting != 1 {
		t.Errorf("%+v", j)
	}
}

func mustParse(t *testing.T, text string) selector.Selector {
	t.Helper()
	sel, err := selector.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return sel
}

// brokenStore fails to reserve the tasks of one job.
type brokenStore struct {
	jobs.Store
	job string
}

func (s *brokenStore) Reserve(ctx context.Context, id string, n int64) (jobs.Job, error) {
	if id == s.job {
		return jobs.Job{}, errors.New("broken")
	}
	return s.Store.Reserve(ctx, id, n)
}

// A job that cannot go on is logged once, with its id, and hides nothing of others.
func TestBrokenJobIsLogged(t *testing.T) {
	m := newManager(t)
	var log strings.Builder
	m.Log = slog.New(slog.NewTextHandler(&log, nil))
	var ids []string
	for range 2 {
		j, _, err := m.Create(t.Context(), devicetest.Admin, api.JobSpec{Action: callSpec("self.get").Action, Select: "room=lab"}, CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, j.ID)
	}
	m.Store = &brokenStore{m.Store, ids[0]}
	turn := newTurn(m.Manager)
	for range 3 {
		if err := turn.once(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(log.String(), ids[0]); n != 1 || m.stored(t, ids[1]).State != jobs.Running {
		t.Errorf("it was logged %d times, the other job is %s: %s", n, m.stored(t, ids[1]).State, log.String())
	}
}

// fewTasks is a store in which an owner may have few open tasks now.
type fewTasks struct {
	jobs.Store
	room int64
}

func (s *fewTasks) Room(context.Context, string) (int64, error) { return s.room, nil }

func (s *fewTasks) Reserve(ctx context.Context, id string, n int64) (jobs.Job, error) {
	return s.Edit(ctx, id, func(j *jobs.Job) error {
		j.Reserve(n, s.room, 1)
		return nil
	})
}

// A selection that does not fit waits without rows; one that never fits halts its job.
func TestSelectionBeyondTheShare(t *testing.T) {
	m := newManager(t)
	store := &fewTasks{Store: m.Store}
	m.Store = store
	one, both := m.create(t, "room=lab", ""), m.create(t, "room in (lab,hall)", "")
	m.pass(t)
	// security: K40
	if j := m.stored(t, one); j.State != jobs.Preparing || j.Reason != jobs.ReasonLimit || j.Counts.Total() != 0 {
		t.Errorf("%+v", j)
	}
	// security: K40
	if j := m.stored(t, both); j.State != jobs.Halted || j.Reason != jobs.ReasonLimit || j.Counts.Total() != 0 {
		t.Errorf("%+v", j)
	}
	store.room = 1
	m.pass(t)
	if j := m.stored(t, one); j.State != jobs.Running || j.Reason != "" || j.Counts.Waiting != 1 || j.Reserved != 0 {
		t.Errorf("%+v", j)
	}
}

// A selection that could not fit into an empty fleet is refused when the job is created, and in a dry run.
func TestSelectionBeyondTheLimit(t *testing.T) {
	m := newManager(t)
	by := m.key(t, "jobs tools:call", "")
	if most := access.Share(jobs.MaxOpenTasks, nil, by.Key(), m.Holder); most != 375_000 {
		t.Errorf("a key may have %d open tasks", most)
	}
	m.Fleet = &countedFleet{Fleet: m.Fleet, total: 2}
	sel := mustParse(t, "room=lab")
	// security: K40
	if err := m.checkSize(t.Context(), sel, 1); codeOf(err) != devices.CodeLimitReached || !strings.Contains(err.Error(), "2 devices") {
		t.Errorf("%v", err)
	}
	if err := m.checkSize(t.Context(), sel, 2); err != nil {
		t.Error(err)
	}
}

// countedFleet counts so many devices.
type countedFleet struct {
	Fleet
	total int64
}

func (f *countedFleet) Counts(context.Context, access.Principal, selector.Selector) (devices.Counts, error) {
	return devices.Counts{Total: f.total}, nil
}

// What a restore halted is halted once, and reported.
func TestHaltedByARestore(t *testing.T) {
	m := newManager(t)
	var log strings.Builder
	m.Log = slog.New(slog.NewTextHandler(&log, nil))
	for _, planned := range []bool{true, false} {
		schedule, once := m.create(t, "room=lab", "0 7 * * *"), m.create(t, "room=lab", "")
		restored := true
		m.TakeRestored = func() (bool, bool) {
			was := restored
			restored = false
			return planned, was
		}
		turn := newTurn(m.Manager)
		for range 2 {
			if err := turn.once(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		// security: K43
		if j := m.stored(t, once); j.State != jobs.Halted || j.Reason != jobs.ReasonRestored {
			t.Errorf("planned %t: %+v", planned, j)
		}
		if j := m.stored(t, schedule); (j.State == jobs.Halted) == planned {
			t.Errorf("planned %t: the schedule is %s", planned, j.State)
		}
		if want := fmt.Sprintf("schedules=%d", map[bool]int{true: 0, false: 2}[planned]); !strings.Contains(log.String(), want) {
			t.Errorf("planned %t: the log does not have %s: %s", planned, want, log.String())
		}
		if _, err := m.Do(t.Context(), devicetest.Admin, once, "resume", VerbOptions{}); err != nil {
			t.Fatal(err)
		}
		log.Reset()
	}
}
