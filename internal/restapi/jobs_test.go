package restapi

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs/manager"
)

// fakeJobs answers with what it was asked.
type fakeJobs struct {
	mu    sync.Mutex
	asked []string
	again bool
	fails error
	tasks []api.Task
}

const fakeJobID = "06q0000000abcdefghjk"

func (f *fakeJobs) ask(format string, args ...any) (api.Job, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, fmt.Sprintf(format, args...))
	return api.Job{ID: fakeJobID, State: "running"}, f.fails
}

func (f *fakeJobs) last() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.asked) == 0 {
		return ""
	}
	return f.asked[len(f.asked)-1]
}

func (f *fakeJobs) Create(_ context.Context, by access.Principal, spec api.JobSpec, o manager.CreateOptions) (api.Job, bool, error) {
	j, err := f.ask("create %s %s key=%s confirmation=%s", by.Key(), spec.Select, o.Key, o.Confirmation)
	return j, f.again, err
}

func (f *fakeJobs) Plan(_ context.Context, _ access.Principal, spec api.JobSpec) (api.JobPlan, error) {
	_, err := f.ask("plan %s", spec.Select)
	return api.JobPlan{Spec: spec, Devices: 7, Refusals: []api.JobRefusal{}, Confirm: []string{}}, err
}

func (f *fakeJobs) Later(_ context.Context, _ access.Principal, c devices.ToolCall, timeout, later time.Duration, key string) (api.Job, bool, error) {
	j, err := f.ask("later %s %s %s %s key=%s", c.Device, c.Tool, timeout, later, key)
	return j, false, err
}

func (f *fakeJobs) Queued(_ context.Context, _ access.Principal, c devices.ToolCall, timeout, later time.Duration, key string) (api.Job, bool, error) {
	return api.Job{ID: fakeJobID}, key != "" && f.last() == fmt.Sprintf("later %s %s %s %s key=%s", c.Device, c.Tool, timeout, later, key), nil
}

func (f *fakeJobs) List(_ context.Context, _ access.Principal, q manager.Query) (api.List[api.Job], error) {
	j, err := f.ask("list %+v", q)
	return api.List[api.Job]{Items: []api.Job{j}, NextCursor: "place"}, err
}

func (f *fakeJobs) Get(_ context.Context, _ access.Principal, id string) (api.Job, error) {
	return f.ask("get %s", id)
}

func (f *fakeJobs) Edit(_ context.Context, _ access.Principal, id string, e api.JobEdit) (api.Job, error) {
	return f.ask("edit %s %s", id, *e.Note)
}

func (f *fakeJobs) Do(_ context.Context, _ access.Principal, id, verb string, o manager.VerbOptions) (api.Job, error) {
	return f.ask("%s %s %s %v", verb, id, o.Reason, o.Outcomes)
}

func (f *fakeJobs) Tasks(_ context.Context, _ access.Principal, q manager.TaskQuery) (api.List[api.Task], error) {
	_, err := f.ask("tasks %+v", q)
	return api.List[api.Task]{Items: f.tasks}, err
}

func (f *fakeJobs) EachTask(_ context.Context, _ access.Principal, id string, each func([]api.Task) error) error {
	if _, err := f.ask("each %s", id); err != nil {
		return err
	}
	return each(f.tasks)
}

func (f *fakeJobs) Queue(_ context.Context, _ access.Principal, id devices.ID) ([]api.Task, error) {
	_, err := f.ask("queue %s", id)
	return f.tasks, err
}

func (f *fakeJobs) Erase(_ context.Context, id devices.ID) error {
	_, err := f.ask("erase %s", id)
	return err
}

func (f *fakeJobs) CancelTask(_ context.Context, _ access.Principal, id devices.ID, job string) error {
	_, err := f.ask("cancel %s of %s", job, id)
	return err
}

func (f *fakeJobs) Roll(_ context.Context, _ access.Principal, r api.FirmwareRoll, o manager.CreateOptions) (api.JobGroup, bool, error) {
	j, err := f.ask("roll %s to %s, key %q", r.Release, r.Select, o.Key)
	return api.JobGroup{Group: j.ID, Items: []api.Job{j}}, f.again, err
}

func (f *fakeJobs) PlanRoll(_ context.Context, _ access.Principal, r api.FirmwareRoll) (api.FirmwareRollPlan, error) {
	_, err := f.ask("plan to roll %s", r.Release)
	return api.FirmwareRollPlan{Items: []api.JobPlan{}}, err
}

func (f *fakeJobs) Rollback(_ context.Context, _ access.Principal, id string, _ manager.CreateOptions) (api.JobGroup, error) {
	j, err := f.ask("rollback %s", id)
	return api.JobGroup{Group: j.ID, Items: []api.Job{j}}, err
}

func (f *fakeJobs) Unbar(_ context.Context, _ access.Principal, id devices.ID) error {
	_, err := f.ask("unbar %s", id)
	return err
}

func (f *fakeJobs) FirmwareTask(context.Context, access.Principal, devices.ID) (*api.Task, error) {
	return nil, nil
}

func TestJobRoutes(t *testing.T) {
	f := newFleet(t)
	const body = `{"action":{"restart":{}},"select":"room=lab"}`
	for _, c := range []struct {
		method, path, body string
		status             int
		asked              string
	}{
		{"POST", "/v1/jobs", body, 201, "create admin room=lab key= confirmation="},
		{"POST", "/v1/jobs", strings.TrimSuffix(body, "}") + `,"confirmation":"yes"}`, 201, "create admin room=lab key= confirmation=yes"},
		{"POST", "/v1/jobs?dry_run=true", body, 200, "plan room=lab"},
		{"POST", "/v1/jobs", `{"select":"room=lab"}`, 400, ""},
		{"POST", "/v1/jobs", strings.TrimSuffix(body, "}") + `,"stages":[{"ok":"5%"},{"ok":3}]}`, 201, "create admin room=lab key= confirmation="},
		{"POST", "/v1/jobs", strings.TrimSuffix(body, "}") + `,"stages":[{"ok":true}]}`, 400, ""},
		{"POST", "/v1/jobs", strings.TrimSuffix(body, "}") + `,"nonsense":1}`, 400, ""},
		{"GET", "/v1/jobs?state=paused&device=x&limit=5", "", 200, "list {State:paused Action: Device:x Group: Cursor: Open:false Own:false Limit:5}"},
		{"GET", "/v1/jobs?state=lost", "", 400, ""},
		{"GET", "/v1/jobs/" + fakeJobID, "", 200, "get " + fakeJobID},
		{"PATCH", "/v1/jobs/" + fakeJobID, `{"note":"x"}`, 200, "edit " + fakeJobID + " x"},
		{"POST", "/v1/jobs/" + fakeJobID + "/pause", `{"reason":"lunch"}`, 200, "pause " + fakeJobID + " lunch []"},
		{"POST", "/v1/jobs/" + fakeJobID + "/resume", "", 200, "resume " + fakeJobID + "  []"},
		{"POST", "/v1/jobs/" + fakeJobID + "/resume", `{"reason":"x"}`, 400, ""},
		{"POST", "/v1/jobs/" + fakeJobID + "/retry", `{"outcome":["failed","unknown"]}`, 200, "retry " + fakeJobID + "  [failed unknown]"},
		{"POST", "/v1/jobs/" + fakeJobID + "/retry", `{"outcome":["lost"]}`, 400, ""},
		{"GET", "/v1/jobs/" + fakeJobID + "/tasks?outcome=failed", "", 200, "tasks {Job:" + fakeJobID + " Outcome:failed Reason: Cursor: Running:false Limit:100}"},
		{"GET", "/v1/jobs/" + fakeJobID + "/tasks?state=running", "", 200, "tasks {Job:" + fakeJobID + " Outcome: Reason: Cursor: Running:true Limit:100}"},
		{"POST", "/v1/jobs/" + fakeJobID + "/rollback", "", 201, "rollback " + fakeJobID},
		{"POST", "/v1/firmware/roll", `{"release":"2.5.0","select":"room=lab"}`, 201, `roll 2.5.0 to room=lab, key ""`},
		{"POST", "/v1/firmware/roll?dry_run=true", `{"release":"2.5.0","select":"room=lab"}`, 200, "plan to roll 2.5.0"},
		{"POST", "/v1/firmware/roll", `{"release":"2.5.0","version":"x"}`, 400, ""},
		{"DELETE", "/v1/devices/x/firmware/bar", "", 204, "unbar x"},
		{"GET", "/v1/devices/x/tasks", "", 200, "queue x"},
		{"POST", "/v1/devices/x/tasks/" + fakeJobID + "/cancel", "", 204, "cancel " + fakeJobID + " of x"},
		{"GET", "/v1/jobs/nonsense/report", "", 404, ""},
		{"GET", "/v1/jobs/" + fakeJobID + "/report?format=xml", "", 400, ""},
	} {
		f.jobs.mu.Lock()
		f.jobs.asked = nil
		f.jobs.mu.Unlock()
		answer := f.do(t, c.method, c.path, c.body)
		if got := f.jobs.last(); answer.status != c.status || got != c.asked {
			t.Errorf("%s %s %s: %d %s, asked %q, want %d and %q", c.method, c.path, c.body, answer.status, answer.body, got, c.status, c.asked)
		}
	}
	f.jobs.again = true
	if status := f.do(t, "POST", "/v1/jobs", body, "Idempotency-Key", "k").status; status != 200 || f.jobs.last() != "create admin room=lab key=k confirmation=" {
		t.Errorf("repeated: %d, %s", status, f.jobs.last())
	}
	if status := f.do(t, "POST", "/v1/jobs", body, "Idempotency-Key", "\u00e4").status; status != 400 {
		t.Errorf("a key that is not printable ASCII: %d", status)
	}
}

// A report is safe for spreadsheets.
func TestJobReport(t *testing.T) {
	f := newFleet(t)
	f.jobs.tasks = []api.Task{{Job: fakeJobID, Device: "x", State: "ended", Outcome: "failed", Result: "=cmd|' /C calc'!A0", Detail: "a,\"b\"\nc", Attempt: 1}}
	answer := f.do(t, "GET", "/v1/jobs/"+fakeJobID+"/report", "")
	want := strings.Join(taskColumns, ",") + "\nx,0,ended,,failed,,1,,,0,,,\"a,\"\"b\"\"\nc\",'=cmd|' /C calc'!A0\n"
	if answer.status != 200 || string(answer.body) != want {
		t.Errorf("%d\n%s\nwant\n%s", answer.status, answer.body, want)
	}
	answer = f.do(t, "GET", "/v1/jobs/"+fakeJobID+"/report?format=ndjson", "")
	if body := string(answer.body); answer.status != 200 || !strings.HasPrefix(body, `{"job":"`+fakeJobID) || !strings.HasSuffix(body, "}\n") {
		t.Errorf("%d %s", answer.status, body)
	}
}

// later queues a call of a device that is not connected.
func TestCallLater(t *testing.T) {
	f := newFleet(t)
	f.connect(t, "x", silence()).session.Close(devices.CloseGone)
	const path = "/v1/devices/x/tools/self.reboot/call"
	answer := f.do(t, "POST", path, `{"later":"24h"}`, "Idempotency-Key", "k")
	if answer.status != 202 || string(answer.body) != `{"job":"`+fakeJobID+`"}`+"\n" || f.jobs.last() != "later x self.reboot 30s 24h0m0s key=k" {
		t.Errorf("%d %s %s", answer.status, answer.body, f.jobs.last())
	}
	device := f.connect(t, "x", silence())
	if again := f.do(t, "POST", path, `{"later":"24h"}`, "Idempotency-Key", "k"); again.status != 202 || string(again.body) != string(answer.body) {
		t.Errorf("again, with the device connected: %d %s", again.status, again.body)
	}
	device.session.Close(devices.CloseGone)
	if status := f.do(t, "POST", path, `{}`).status; status != 409 {
		t.Errorf("without later: %d", status)
	}
	f.do(t, "POST", path, `{}`, "Idempotency-Key", "k").problem(t, 400, devices.CodeBadRequest)
	for _, body := range []string{`{"later":"soon"}`, `{"later":"31d"}`, `{"later":"1h","later":"1h"}`} {
		f.do(t, "POST", path, body).problem(t, 400, devices.CodeBadRequest)
	}
}

// The queue of a device comes in pages; one whose place is gone begins anew, and so loses nothing.
func TestQueueIsPaged(t *testing.T) {
	f := newFleet(t)
	f.jobs.tasks = []api.Task{{Job: "a", State: "waiting"}, {Job: "b", State: "waiting"}, {Job: "c", State: "waiting"}}
	page := func(query string) (found, cursor string) {
		var p api.List[api.Task]
		f.do(t, "GET", "/v1/devices/"+string(robot)+"/tasks?"+query, "").json(t, &p)
		for _, task := range p.Items {
			found += task.Job
		}
		return found, p.NextCursor
	}
	first, cursor := page("limit=2")
	rest, end := page("limit=2&cursor=" + cursor)
	if first != "ab" || rest != "c" || end != "" {
		t.Errorf("%s, %s, then %q", first, rest, end)
	}
	f.jobs.tasks = f.jobs.tasks[2:]
	if left, _ := page("cursor=" + cursor); left != "c" {
		t.Errorf("after two have ended: %s", left)
	}
}
