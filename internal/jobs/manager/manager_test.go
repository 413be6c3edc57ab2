package manager

import (
	"context"
	"encoding/json"
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
	"fleetd/internal/store"
	"fleetd/internal/store/jobstore"
	"fleetd/internal/store/storetest"
)

const (
	lamp  = devices.ID("aa:bb:cc:dd:ee:01")
	robot = devices.ID("aa:bb:cc:dd:ee:02")
)

// testManager is a Manager over a real core and a real database, without the periodic work.
type testManager struct {
	*Manager
	ports *devicetest.Ports
	fleet *fleet.Service
}

func newManager(t *testing.T) *testManager {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	db, err := store.Open(t.Context(), "sqlite", t.TempDir(), log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = db.Close(ctx) // nothing of this test is needed again
	})
	for _, digit := range []string{"a", "b", "c"} {
		storetest.AddImage(t, db, strings.Repeat(digit, 64))
	}
	p := devicetest.New()
	for _, id := range []devices.ID{lamp, robot} {
		p.Put(devices.Member{ID: id, ClientID: "c", Labels: map[string]string{"room": map[devices.ID]string{lamp: "lab", robot: "hall"}[id]}})
	}
	s := p.Service(t, fleet.Config{})
	holder := func(key string) access.Holder { return s.Keys().Holder(key, time.Now()) }
	m := &Manager{Options: Options{Store: jobstore.New(db, log, jobstore.Holders(holder)), Fleet: s, Instance: "i", Zone: time.UTC, Log: log, Holder: holder, Expire: func(context.Context) error { return nil },
		Node: "n-test", Hold: func(devices.ID, bool) (jobs.Wait, bool) { return jobs.WaitNone, true }}, wake: make(chan struct{}, 1)}
	return &testManager{m, p, s}
}

// key returns a caller with a new key.
func (m *testManager) key(t *testing.T, scopes, selector string) access.Principal {
	t.Helper()
	s, d := devicetest.Rights(t, scopes, selector)
	k, _, err := m.fleet.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: fmt.Sprintf("key %d", len(m.fleet.Keys().Keys())), Scopes: s, Devices: d})
	if err != nil {
		t.Fatal(err)
	}
	who, ok := m.fleet.Keys().Caller(k.ID)
	if !ok {
		t.Fatal("the key is not known")
	}
	return access.Principal{Caller: who, Via: access.ViaREST}
}

func callSpec(tool string, ids ...devices.ID) api.JobSpec {
	spec := api.JobSpec{Action: api.JobAction{Call: &api.JobCall{Tool: tool, Arguments: json.RawMessage(`{}`)}}}
	for _, id := range ids {
		spec.Devices = append(spec.Devices, string(id))
	}
	return spec
}

func codeOf(err error) devices.Code {
	if err == nil {
		return ""
	}
	return devices.AsError(err).Code
}

// What a key may not do, no job of it is created for; what it may not see, it does not find.
func TestRightsAtCreation(t *testing.T) {
	m := newManager(t)
	all, lab := m.key(t, "jobs jobs:read tools:call", ""), m.key(t, "jobs jobs:read tools:call", "room=lab")
	for _, c := range []struct {
		name string
		by   access.Principal
		spec api.JobSpec
		want devices.Code
	}{
		{"all rights", all, callSpec("self.get", robot), ""},
		{"a device of its own", lab, callSpec("self.get", lamp), ""},
		{"another device", lab, callSpec("self.get", robot), devices.CodeForbidden},
		{"a device that does not exist", lab, callSpec("self.get", "aa:bb:cc:dd:ee:09"), devices.CodeForbidden},
		{"without jobs", m.key(t, "tools:call", ""), callSpec("self.get", lamp), devices.CodeForbidden},
		{"without tools:call", m.key(t, "jobs", ""), callSpec("self.get", lamp), devices.CodeForbidden},
		{"a tool for people", all, callSpec("self.reboot", lamp), devices.CodeToolDenied},
		{"restart without its scope", all, api.JobSpec{Action: api.JobAction{Restart: &api.JobRestart{}}, Devices: []string{string(lamp)}}, devices.CodeForbidden},
	} {
		j, _, err := m.Create(t.Context(), c.by, c.spec, CreateOptions{})
		// security: K20
		if got := codeOf(err); got != c.want || (c.want == "") != (j.ID != "") {
			t.Errorf("%s: %q (%v), want %q", c.name, got, err, c.want)
		}
	}
	// A selection is limited to the key's devices, whatever it selects.
	j, _, err := m.Create(t.Context(), lab, api.JobSpec{Action: callSpec("self.get").Action, Select: "device=*"}, CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	stored, err := m.Store.Job(t.Context(), j.ID)
	// security: K20
	if err != nil || !strings.Contains(stored.Devices, "room=lab") {
		t.Errorf("selects %q, %v", stored.Devices, err)
	}
	// The jobs of others do not exist for a limited key.
	other, _, err := m.Create(t.Context(), all, callSpec("self.get", lamp), CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, got := m.Get(t.Context(), lab, other.ID)
	_, paused := m.Do(t.Context(), lab, other.ID, "pause", VerbOptions{})
	cancelled := m.CancelTask(t.Context(), lab, lamp, other.ID)
	list, listed := m.List(t.Context(), lab, Query{Device: string(lamp)})
	queue, queued := m.Queue(t.Context(), lab, lamp)
	// security: K20
	if codeOf(got) != devices.CodeNotFound || codeOf(paused) != devices.CodeNotFound || codeOf(cancelled) != devices.CodeNotFound || listed != nil || queued != nil ||
		slices.ContainsFunc(list.Items, func(j api.Job) bool { return j.ID == other.ID }) || slices.ContainsFunc(queue, func(t api.Task) bool { return t.Job == other.ID }) {
		t.Errorf("%v, %v, %v, %v, %v", got, paused, cancelled, list, queue)
	}
}

// lateStore finds no job of a key, as if another node created it right after the lookup.
type lateStore struct{ jobs.Store }

func (lateStore) Repeated(context.Context, string, string, string) (jobs.Job, error) {
	return jobs.Job{}, devices.ErrNotFound
}

// Requests with the same key on two nodes at once are answered with the same job.
func TestSameKeyAtOnce(t *testing.T) {
	m := newManager(t)
	key := CreateOptions{Key: "once"}
	first, again, err := m.Create(t.Context(), devicetest.Admin, callSpec("self.get", lamp), key)
	if err != nil || again {
		t.Fatalf("%v, %t", err, again)
	}
	m.Store = lateStore{m.Store}
	if second, again, err := m.Create(t.Context(), devicetest.Admin, callSpec("self.get", lamp), key); err != nil || !again || second.ID != first.ID {
		t.Errorf("%s, %t, %v, want %s", second.ID, again, err, first.ID)
	}
	if _, _, err := m.Create(t.Context(), devicetest.Admin, callSpec("self.get", robot), key); codeOf(err) != devices.CodeConflict {
		t.Errorf("another body: %v", err)
	}
}

// A request that is repeated with its key is answered with its job, although its confirmation was used.
func TestRepeatedAfterConfirmation(t *testing.T) {
	m := newManager(t)
	if _, err := m.fleet.SetPolicy(t.Context(), devicetest.Admin, access.Policy{Rules: []access.Rule{{Name: "ask", Tools: []string{"self.lock.*"}, Action: access.Confirm}}}, 0); err != nil {
		t.Fatal(err)
	}
	spec, key := callSpec("self.lock.open", lamp), CreateOptions{Key: "once"}
	_, _, err := m.Create(t.Context(), devicetest.Admin, spec, key)
	var asked *devices.Error
	if !errors.As(err, &asked) || asked.Code != devices.CodeConfirmation || asked.Confirmation == "" {
		t.Fatalf("%v", err)
	}
	confirmed := key
	confirmed.Confirmation = asked.Confirmation
	j, again, err := m.Create(t.Context(), devicetest.Admin, spec, confirmed)
	if err != nil || again {
		t.Fatalf("%v, %t", err, again)
	}
	for _, o := range []CreateOptions{confirmed, key} {
		if repeated, again, err := m.Create(t.Context(), devicetest.Admin, spec, o); err != nil || !again || repeated.ID != j.ID {
			t.Errorf("%+v: %v, %t, %v", o, repeated.ID, again, err)
		}
	}
	if _, _, err := m.Create(t.Context(), devicetest.Admin, callSpec("self.lock.open", robot), key); codeOf(err) != devices.CodeConflict {
		t.Errorf("another body: %v", err)
	}
	// A confirmation that a person declined is good for nothing.
	_, _, err = m.Create(t.Context(), devicetest.Admin, spec, CreateOptions{})
	if !errors.As(err, &asked) {
		t.Fatal(err)
	}
	if err := m.Decline(t.Context(), devicetest.Admin, "create job", asked.Confirmation); codeOf(err) != devices.CodeConfirmation {
		t.Errorf("declined: %v", err)
	}
	// security: K20
	if _, _, err = m.Create(t.Context(), devicetest.Admin, spec, CreateOptions{Confirmation: asked.Confirmation}); codeOf(err) != devices.CodeConfirmation {
		t.Errorf("a declined confirmation: %v", err)
	}
}

// Whatever is done with a job is in the audit, with its caller; a repeated request is not.
func TestJobsAreAudited(t *testing.T) {
	m := newManager(t)
	by := m.key(t, "jobs jobs:read tools:call", "")
	j, _, err := m.Create(t.Context(), by, callSpec("self.get", lamp, robot), CreateOptions{Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	note := "x"
	_, _, repeated := m.Create(t.Context(), by, callSpec("self.get", lamp, robot), CreateOptions{Key: "k"})
	if _, err := m.Edit(t.Context(), devicetest.Admin, j.ID, api.JobEdit{Note: &note, IfMatch: "other"}); devices.AsError(err).Code != devices.CodeStale {
		t.Errorf("an edit of another revision: %v", err)
	}
	_, edited := m.Edit(t.Context(), by, j.ID, api.JobEdit{Note: &note})
	_, paused := m.Do(t.Context(), by, j.ID, "pause", VerbOptions{Reason: "lunch"})
	_, again := m.Do(t.Context(), by, j.ID, "pause", VerbOptions{})
	later, _, queued := m.Later(t.Context(), by, devices.ToolCall{Device: lamp, Tool: "self.get"}, 0, time.Hour, "")
	if err := errors.Join(repeated, edited, paused, m.CancelTask(t.Context(), by, lamp, j.ID), queued); err != nil || codeOf(again) != devices.CodeConflict {
		t.Fatal(err, again)
	}
	var seen []string
	for _, e := range m.ports.Recorded() {
		if e.Key == by.Key() {
			detail, _, _ := strings.Cut(e.Detail, ":") // an error follows
			seen = append(seen, fmt.Sprintf("%s %s %s %s", e.Action, e.Device, detail, e.Outcome))
		}
	}
	want := []string{"create job  job " + j.ID + " ok", "edit job  job " + j.ID + " ok", "pause job  job " + j.ID + " ok", "pause job  job " + j.ID + " conflict",
		"create job " + string(lamp) + " job " + later.ID + " calls self.get later ok", "cancel task " + string(lamp) + " job " + j.ID + " ok"}
	slices.Sort(seen)
	slices.Sort(want)
	if !slices.Equal(seen, want) {
		t.Errorf("%q, want %q", seen, want)
	}
}

// A queued call is found by its key, and the key cannot be used for another call.
func TestQueued(t *testing.T) {
	m := newManager(t)
	by := m.key(t, "jobs jobs:read tools:call", "")
	call := devices.ToolCall{Device: lamp, Tool: "self.get"}
	if _, found, err := m.Queued(t.Context(), by, call, time.Second, time.Hour, "k"); found || err != nil {
		t.Fatalf("before: %t %v", found, err)
	}
	j, _, err := m.Later(t.Context(), by, call, time.Second, time.Hour, "k")
	if err != nil {
		t.Fatal(err)
	}
	if again, found, err := m.Queued(t.Context(), by, call, time.Second, time.Hour, "k"); !found || again.ID != j.ID || err != nil {
		t.Errorf("%t %s %v", found, again.ID, err)
	}
	if _, _, err := m.Queued(t.Context(), by, devices.ToolCall{Device: robot, Tool: "self.get"}, time.Second, time.Hour, "k"); codeOf(err) != devices.CodeConflict {
		t.Errorf("of another call: %v", err)
	}
	if _, found, err := m.Queued(t.Context(), m.key(t, "jobs", ""), call, time.Second, time.Hour, "k"); found || err != nil {
		t.Errorf("of another key: %t %v", found, err)
	}
}

// Preparing a large job delays other jobs by no more than one pass may take for it, and both go on in turn.
func TestPreparingDelaysNoOtherJob(t *testing.T) {
	m := newManager(t)
	const many = 5 * pageSize / 2
	m.Put(t, many)
	large, _, err := m.Create(t.Context(), devicetest.Admin, api.JobSpec{Action: callSpec("self.get").Action, Select: "room=store"}, CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	small, _, err := m.Create(t.Context(), devicetest.Admin, api.JobSpec{Action: callSpec("self.get").Action, Devices: []string{string(lamp)},
		When: &api.JobWhen{At: api.At(time.Now().Add(50 * time.Millisecond))}}, CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	stored := func(id string) jobs.Job {
		j, err := m.Store.Job(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	devicetest.Eventually(t, "the small job is due", func() bool { return !m.Store.Now().Before(stored(small.ID).NextAt) })
	m.drainWake()
	pass := newTurn(m.Manager)
	pass.sliceTime = time.Nanosecond
	for n, want := range []int64{pageSize, pageSize, 2 * pageSize, many} { // the second pass is the small job's
		if err := pass.once(t.Context()); err != nil {
			t.Fatal(err)
		}
		j := stored(large.ID)
		if j.Counts.Total() != want || (j.State == jobs.Preparing) != (want < many) {
			t.Errorf("after pass %d the large job is %s with %d tasks, want %d", n+1, j.State, j.Counts.Total(), want)
		}
		if more := m.drainWake(); more != (j.State == jobs.Preparing) {
			t.Errorf("after pass %d the next one comes at once: %t", n+1, more)
		}
		if j := stored(small.ID); n > 0 && j.State != jobs.Running {
			t.Errorf("after pass %d the job that is due is %s", n+1, j.State)
		}
	}
}

// drainWake reports whether periodic work was asked for.
func (m *testManager) drainWake() bool {
	select {
	case <-m.wake:
		return true
	default:
		return false
	}
}

// failing is a store whose tasks fail as soon as they are repeated.
type failing struct {
	jobs.Store
	t    *testing.T
	runs map[devices.ID]int
}

func (s *failing) Retry(ctx context.Context, id string, round int64, outcomes []jobs.Outcome, after devices.ID, limit int) (int, devices.ID, jobs.Job, error) {
	n, next, j, err := s.Store.Retry(ctx, id, round, outcomes, after, limit)
	if err == nil && n > 0 {
		s.run(id)
	}
	return n, next, j, err
}

// run begins all waiting tasks of a job, which fail.
func (s *failing) run(id string) {
	s.t.Helper()
	for {
		list, err := s.Waiting(s.t.Context(), id, -1, jobs.BeginBatch)
		if err != nil {
			s.t.Fatal(err)
		}
		if len(list) == 0 {
			return
		}
		begun, _, err := s.Begin(s.t.Context(), "n-test", "i", list)
		if err != nil || len(begun) == 0 {
			s.t.Fatalf("%d tasks begin, %v", len(begun), err)
		}
		ends := make([]jobs.End, len(begun))
		for i, task := range begun {
			s.runs[task.Device]++
			ends[i] = jobs.End{Job: task.Job, Round: task.Round, Device: task.Device, Fence: task.Fence, Outcome: jobs.Failed}
		}
		if _, _, err := s.End(s.t.Context(), "i", ends); err != nil {
			s.t.Fatal(err)
		}
	}
}

// Put adds devices with room=store.
func (m *testManager) Put(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		m.ports.Put(devices.Member{ID: devices.ID(fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&255)), ClientID: "c", Labels: map[string]string{"room": "store"}})
	}
}

// create creates a job for a selection, repeated if cron is not empty, and returns its id.
func (m *testManager) create(t *testing.T, sel, cron string) string {
	t.Helper()
	j, _, err := m.Create(t.Context(), devicetest.Admin, api.JobSpec{Action: callSpec("self.get").Action, Select: sel, When: &api.JobWhen{Cron: cron}}, CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return j.ID
}

// fill returns a running job with so many tasks.
func (m *testManager) fill(t *testing.T, n int) jobs.Job {
	t.Helper()
	m.Put(t, n)
	spec := api.JobSpec{Action: callSpec("self.get").Action, Select: "room=store", Pace: &api.JobPace{Rate: jobs.RateUnlimited, Concurrency: 10_000}}
	created, _, err := m.Create(t.Context(), devicetest.Admin, spec, CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pass := newTurn(m.Manager)
	for m.stored(t, created.ID).State != jobs.Running {
		if err := pass.once(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return m.stored(t, created.ID)
}

// One request repeats a task once, though it fails again while others are still to be repeated.
func TestRetryRepeatsATaskOnce(t *testing.T) {
	m := newManager(t)
	s := &failing{m.Store, t, map[devices.ID]int{}}
	m.Store = s
	j := m.fill(t, endBatch+1)
	s.run(j.ID)
	if _, err := m.Do(t.Context(), devicetest.Admin, j.ID, "retry", VerbOptions{}); err != nil {
		t.Fatal(err)
	}
	most, total := 0, 0
	for _, n := range s.runs {
		most, total = max(most, n), total+n
	}
	if len(s.runs) != endBatch+1 || most != 2 || total != 2*len(s.runs) {
		t.Errorf("%d devices had %d calls for the job and one request to repeat them, one of them %d", len(s.runs), total, most)
	}
}

// A call for later that the device's tools do not take is refused at once, as a call now would be; one of a device whose tools are
// not known is not.
func TestLaterIsJudged(t *testing.T) {
	m := newManager(t)
	devicetest.Connect(t, m.fleet, lamp, &devicetest.Script{Tools: "[" + devicetest.Volume + "]"})
	for _, c := range []struct {
		device    devices.ID
		tool      string
		arguments string
		want      devices.Code
	}{
		{lamp, "self.audio_speaker.set_volume", `{"volume":40}`, ""},
		{lamp, "self.audio_speaker.set_volume", `{"volume":"loud"}`, devices.CodeInvalidArguments},
		{lamp, "self.no.such", `{}`, devices.CodeToolUnknown},
		{robot, "self.no.such", `{}`, ""},
	} {
		_, _, err := m.Later(t.Context(), devicetest.Admin, devices.ToolCall{Device: c.device, Tool: c.tool, Arguments: json.RawMessage(c.arguments)}, 0, time.Hour, "")
		if codeOf(err) != c.want {
			t.Errorf("%s of %s with %s: %v, want %q", c.tool, c.device, c.arguments, err, c.want)
		}
	}
}
