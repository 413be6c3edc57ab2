package restapi

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/bulk"
	"fleetd/internal/cleantext"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/jobs/manager"
	"fleetd/internal/timespan"
)

// Jobs creates, shows and changes jobs, and records the changes in the audit.
type Jobs interface {
	Create(ctx context.Context, by access.Principal, spec api.JobSpec, o manager.CreateOptions) (j api.Job, again bool, err error)
	Plan(ctx context.Context, by access.Principal, spec api.JobSpec) (api.JobPlan, error)
	Later(ctx context.Context, by access.Principal, call devices.ToolCall, timeout, later time.Duration, key string) (j api.Job, again bool, err error)
	Queued(ctx context.Context, by access.Principal, call devices.ToolCall, timeout, later time.Duration, key string) (j api.Job, found bool, err error)
	List(ctx context.Context, by access.Principal, q manager.Query) (api.List[api.Job], error)
	Get(ctx context.Context, by access.Principal, id string) (api.Job, error)
	Edit(ctx context.Context, by access.Principal, id string, e api.JobEdit) (api.Job, error)
	Do(ctx context.Context, by access.Principal, id, verb string, o manager.VerbOptions) (api.Job, error)
	Tasks(ctx context.Context, by access.Principal, q manager.TaskQuery) (api.List[api.Task], error)
	EachTask(ctx context.Context, by access.Principal, id string, f func([]api.Task) error) error
	Queue(ctx context.Context, by access.Principal, device devices.ID) ([]api.Task, error)
	CancelTask(ctx context.Context, by access.Principal, device devices.ID, job string) error
	Roll(ctx context.Context, by access.Principal, r api.FirmwareRoll, o manager.CreateOptions) (g api.JobGroup, again bool, err error)
	PlanRoll(ctx context.Context, by access.Principal, r api.FirmwareRoll) (api.FirmwareRollPlan, error)
	Rollback(ctx context.Context, by access.Principal, id string, o manager.CreateOptions) (api.JobGroup, error)
	Unbar(ctx context.Context, by access.Principal, device devices.ID) error
	FirmwareTask(ctx context.Context, by access.Principal, device devices.ID) (*api.Task, error)
	// Erase deletes what a forgotten device answered.
	Erase(ctx context.Context, device devices.ID) error
}

// headerKey names a request, so that its repetition creates nothing.
const headerKey = "Idempotency-Key"

const pathReport = "/v1/jobs/{job}/report"

type createJobInput struct {
	DryRun bool   `query:"dry_run" doc:"With true nothing is created: the answer is 200 with what the job would do."`
	Key    string `header:"Idempotency-Key" maxLength:"128" doc:"The caller chooses printable characters. For 7 days, the same key and body answer 200 with the same job."`
	Body   api.NewJob
}

// createdJob is the answer to a new job; its status depends on what was asked.
type createdJob struct {
	Status int
	Body   any
}

// JobPath names a job.
type JobPath struct {
	Job string `path:"job" doc:"This is the id of a job."`
}

type listJobsInput struct {
	Page
	State  string `query:"state" enum:"scheduled,preparing,running,paused,halted,done,cancelled"`
	Action string `query:"action" enum:"call,message,restart,firmware"`
	Group  string `query:"group" doc:"The list has only jobs of this group."`
	Device string `query:"device" doc:"The list has only jobs with a task for this device."`
}

type editJobInput struct {
	JobPath
	Match
	Body api.JobEdit
}

type jobVerbInput struct {
	JobPath
	Body *struct {
		Reason  string   `json:"reason,omitempty" maxLength:"200" doc:"With pause it says why, for people."`
		Outcome []string `json:"outcome,omitempty" doc:"With retry, tasks with these outcomes are repeated. The default is failed; unknown tasks are repeated only if it is named."`
	} `required:"false"`
}

type listTasksInput struct {
	Page
	JobPath
	Outcome string `query:"outcome" enum:"ok,failed,unknown,refused,expired,cancelled,already,superseded,gone"`
	State   string `query:"state" enum:"running" doc:"The list has only tasks in this state."`
	Reason  string `query:"reason" doc:"The list has only tasks that wait for this reason." enum:"offline,asleep,later,window,stage,pace,paused,halted,order,busy,retry,database,node"`
}

type deviceTaskPath struct {
	DevicePath
	Job string `path:"job" doc:"This is the id of a job."`
}

type reportJobInput struct {
	JobPath
	FileFormat
}

// jobVerbs are what people do with a job.
var jobVerbs = []struct {
	name, summary, text, answer string
	codes                       []devices.Code
}{
	{"pause", "Pause a job", "Tasks that run end by themselves; none begins.", "The paused job.", []devices.Code{devices.CodeConflict}},
	{"resume", "Resume a job", "Continues a paused or halted job. The key needs what the action of the job needs. A job that halted because its key has ended becomes that of the caller.", "The job.", []devices.Code{devices.CodeConflict, devices.CodeToolDenied, devices.CodeLimitReached}},
	{"cancel", "Cancel a job", "Waiting tasks end as cancelled; those that run end by themselves.", "The cancelled job.", []devices.Code{devices.CodeConflict}},
	{"retry", "Repeat tasks of a job", "Ended tasks with the given outcomes wait again. A task whose outcome is unknown may have acted: it is repeated only if the body names unknown. The key needs what the action of the job needs.", "The job.", []devices.Code{devices.CodeConflict, devices.CodeToolDenied, devices.CodeLimitReached, devices.CodeQueueFull}},
	{"advance", "Open the next stage of a job", "Whether the current stage has passed or not. The key needs what the action of the job needs.", "The job.", []devices.Code{devices.CodeConflict, devices.CodeToolDenied}},
}

func (s *Server) jobRoutes() {
	away := []devices.Code{devices.CodeUnavailable}
	known := append(away, devices.CodeNotFound)
	create := s.operation(http.MethodPost, "/v1/jobs", about{id: "createJob", scope: access.ScopeJobs, tag: tagJobs, summary: "Create a job",
		text: "An action for a selection of devices, at a time, at a pace, with an end. The key also needs the scope of the action. A job that is answered with 201 is committed: " +
			"it survives the end of any node. A tool is called at most once per attempt; an outcome that is not known is never repeated by itself. " +
			"Calls that a rule of the policy wants confirmed are confirmed once, for the whole job: repeat the same body with the `confirmation` of the 428 answer within 10 minutes.",
		status: http.StatusCreated, answer: "The job.", codes: append(away, devices.CodeTooLarge, devices.CodeInvalidArguments, devices.CodeConflict, devices.CodeLimitReached, devices.CodeQueueFull,
			devices.CodeConfirmation, devices.CodeDeviceUnknown, devices.CodeToolDenied)})
	create.Responses["200"] = &huma.Response{Description: "The job that the same key and body created before; with dry_run, what the job would do.",
		Content: map[string]*huma.MediaType{valueJSON[0]: {Schema: &huma.Schema{OneOf: []*huma.Schema{schemaOf[api.Job](s), schemaOf[api.JobPlan](s)}}}}}
	create = withAnswer(create, valueJSON[0], schemaOf[api.Job](s))
	register(s, create, s.createJob)
	register(s, s.operation(http.MethodGet, "/v1/jobs", about{id: "listJobs", scope: access.ScopeJobsRead, tag: tagJobs, summary: "List jobs",
		text: "A key that is limited to some devices or tools sees the jobs that it created.", answer: "A page, newest first.", codes: away}), s.listJobs)
	register(s, s.operation(http.MethodGet, "/v1/jobs/{job}", about{id: "getJob", scope: access.ScopeJobsRead, tag: tagJobs, summary: "Show a job",
		answer: "The job with its counts.", codes: known}), s.getJob)
	register(s, s.operation(http.MethodPatch, "/v1/jobs/{job}", about{id: "editJob", scope: access.ScopeJobs, tag: tagJobs, summary: "Change a job",
		text: "Pace, deadline, note and stop rule of a job that has not ended. The key needs what the action of the job needs.", answer: "The job.", codes: append(known, devices.CodeInvalidArguments, devices.CodeConflict, devices.CodeStale, devices.CodeToolDenied)}), s.editJob)
	for _, verb := range jobVerbs {
		register(s, s.operation(http.MethodPost, "/v1/jobs/{job}/"+verb.name, about{id: verb.name + "Job", scope: access.ScopeJobs, tag: tagJobs, summary: verb.summary,
			text: verb.text, answer: verb.answer, codes: append(known, verb.codes...)}), s.jobVerb(verb.name))
	}
	register(s, s.operation(http.MethodGet, "/v1/jobs/{job}/tasks", about{id: "listTasks", scope: access.ScopeJobsRead, tag: tagJobs, summary: "List the tasks of a job",
		answer: "A page in order of device. A page may have fewer tasks than its limit.", codes: known}), s.listTasks)
	report := s.operation(http.MethodGet, pathReport, about{id: "reportJob", scope: access.ScopeJobsRead, tag: tagJobs, summary: "Export the tasks of a job",
		text: "In CSV a cell that a spreadsheet would take for a formula begins with an apostrophe.", answer: "The tasks in order of device. An answer that breaks off is not complete.", codes: known})
	file := &huma.Schema{Type: huma.TypeString}
	report.Responses["200"].Content = map[string]*huma.MediaType{typeCSV: {Schema: file}, typeNDJSON: {Schema: file}}
	plain(s, report, s.reportJob)
	register(s, s.operation(http.MethodGet, "/v1/devices/{device}/tasks", about{id: "deviceTasks", scope: access.ScopeJobsRead, tag: tagJobs, summary: "Show the queue of a device",
		answer: "The open tasks in their order, each waiting one with its reason. A page begins anew if the last task of the page before has ended.", codes: append(away, devices.CodeDeviceUnknown)}), s.deviceTasks)
	register(s, s.operation(http.MethodPost, "/v1/devices/{device}/tasks/{job}/cancel", about{id: "cancelTask", scope: access.ScopeJobs, tag: tagJobs,
		summary: "Cancel a device's task", text: "One that waits; the rest of the job goes on.", status: http.StatusNoContent, answer: "It is cancelled.",
		codes: append(known, devices.CodeConflict, devices.CodeDeviceUnknown)}), s.cancelTask)
}

func (s *Server) createJob(ctx context.Context, in *createJobInput) (*createdJob, error) {
	if in.Key != "" && !jobs.IsKey(in.Key) {
		return nil, badRequest(headerKey + " must have 1 to 128 printable ASCII characters")
	}
	by := caller(ctx)
	if in.DryRun {
		plan, err := s.opt.Jobs.Plan(ctx, by, in.Body.JobSpec)
		return &createdJob{http.StatusOK, plan}, err
	}
	if err := s.draining(); err != nil {
		return nil, err
	}
	j, again, err := s.opt.Jobs.Create(ctx, by, in.Body.JobSpec, manager.CreateOptions{Key: in.Key, Confirmation: in.Body.Confirmation})
	if err != nil {
		return nil, err
	}
	status := http.StatusCreated
	if again {
		status = http.StatusOK
	}
	return &createdJob{status, j}, nil
}

func (s *Server) listJobs(ctx context.Context, in *listJobsInput) (*answer[api.List[api.Job]], error) {
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	list, err := fillPage(p, jobPiece, func(after string, n int) ([]api.Job, string, error) {
		page, err := s.opt.Jobs.List(ctx, caller(ctx), manager.Query{State: in.State, Action: in.Action, Device: in.Device, Group: in.Group, Cursor: after, Limit: n})
		return page.Items, page.NextCursor, err
	})
	return answerOf(list, err)
}

// jobPiece is how many jobs are read at once: each has up to BodyLimit.
const jobPiece = 16

// jobAnswer answers with a job, or with why there is none.
func jobAnswer(j api.Job, err error) (*tagged[api.Job], error) {
	return quoted(j.Revision(), j), err
}

func (s *Server) getJob(ctx context.Context, in *JobPath) (*tagged[api.Job], error) {
	j, err := s.opt.Jobs.Get(ctx, caller(ctx), in.Job)
	return jobAnswer(j, err)
}

func (s *Server) editJob(ctx context.Context, in *editJobInput) (*tagged[api.Job], error) {
	in.Body.IfMatch = in.revision()
	j, err := s.opt.Jobs.Edit(ctx, caller(ctx), in.Job, in.Body)
	return jobAnswer(j, err)
}

func (s *Server) jobVerb(verb string) func(context.Context, *jobVerbInput) (*tagged[api.Job], error) {
	return func(ctx context.Context, in *jobVerbInput) (*tagged[api.Job], error) {
		var o manager.VerbOptions
		if in.Body != nil {
			o.Reason, o.Outcomes = in.Body.Reason, in.Body.Outcome
		}
		switch {
		case o.Reason != "" && verb != "pause":
			return nil, badRequest("only pause takes a reason")
		case len(o.Outcomes) > 0 && verb != "retry":
			return nil, badRequest("only retry takes outcome")
		case slices.ContainsFunc(o.Outcomes, func(text string) bool { return !jobs.IsOutcome(text) }):
			return nil, badRequest("outcome must name outcomes of tasks, such as failed")
		}
		j, err := s.opt.Jobs.Do(ctx, caller(ctx), in.Job, verb, o)
		return jobAnswer(j, err)
	}
}

func (s *Server) listTasks(ctx context.Context, in *listTasksInput) (*answer[api.List[api.Task]], error) {
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	list, err := fillPage(p, pieceLimit, func(after string, n int) ([]api.Task, string, error) {
		page, err := s.opt.Jobs.Tasks(ctx, caller(ctx), manager.TaskQuery{Job: in.Job, Outcome: in.Outcome, Reason: in.Reason, Running: in.State != "", Cursor: after, Limit: n})
		return page.Items, page.NextCursor, err
	})
	return answerOf(list, err)
}

// deviceTasksInput are the parameters of the queue of a device.
type deviceTasksInput struct {
	DevicePath
	Page
}

func (s *Server) deviceTasks(ctx context.Context, in *deviceTasksInput) (*answer[api.List[api.Task]], error) {
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	queue, err := s.opt.Jobs.Queue(ctx, caller(ctx), deviceOf(ctx))
	if err != nil {
		return nil, err
	}
	list, err := fillPage(p, pieceLimit, func(job string, n int) ([]api.Task, string, error) {
		rest := queue[slices.IndexFunc(queue, func(t api.Task) bool { return t.Job == job })+1:] // all if that task has ended meanwhile
		if len(rest) <= n {
			return rest, "", nil
		}
		return rest[:n], rest[n-1].Job, nil
	})
	return answerOf(list, err)
}

func (s *Server) cancelTask(ctx context.Context, in *deviceTaskPath) (*struct{}, error) {
	return nil, s.opt.Jobs.CancelTask(ctx, caller(ctx), deviceOf(ctx), in.Job)
}

// taskColumns are those of a report in CSV.
var taskColumns = []string{"device", "round", "state", "reason", "outcome", "code", "attempt", "begun_at", "ended_at", "duration_ms", "node", "call", "detail", "result"}

// taskRow returns the cells of a task. What the device said is cleaned, since people look at a report in terminals and
// spreadsheets.
func taskRow(t *api.Task) []string {
	return []string{t.Device, strconv.FormatInt(t.Round, 10), t.State, t.Reason, t.Outcome, t.Code, strconv.Itoa(t.Attempt), csvTime(t.BegunAt), csvTime(t.EndedAt),
		strconv.FormatInt(t.DurationMS, 10), t.Node, t.Call, cleantext.Lines(t.Detail), cleantext.Lines(t.Result)}
}

func csvTime(t api.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02T15:04:05.000Z")
}

// reportJob streams the tasks of a job.
func (s *Server) reportJob(w http.ResponseWriter, r *http.Request, in *reportJobInput) {
	if !jobs.IsID(in.Job) {
		s.fail(w, r, &devices.Error{Code: devices.CodeNotFound, Detail: "there is no job with this id"})
		return
	}
	s.download(w, r, in.mediaType(), fmt.Sprintf("job-%s.%s", in.Job, in.Format), func(out io.Writer) error { return s.writeReport(r, out, in.Job, in.Format) })
}

func (s *Server) writeReport(r *http.Request, out io.Writer, id string, format bulk.Format) error {
	rows := csv.NewWriter(out)
	head := false
	return s.opt.Jobs.EachTask(r.Context(), s.by(r, access.ViaREST), id, func(page []api.Task) error {
		if err := s.draining(); err != nil {
			return err
		}
		if format == bulk.CSV && !head {
			head = true
			if err := rows.Write(taskColumns); err != nil {
				return err
			}
		}
		for i := range page {
			if format == bulk.NDJSON {
				line, err := json.Marshal(&page[i])
				if err != nil {
					return err
				}
				if _, err := out.Write(append(line, '\n')); err != nil {
					return err
				}
				continue
			}
			row := taskRow(&page[i])
			for k, value := range row {
				if value != "" { // an empty cell is not a formula
					row[k] = bulk.Cell(value)
				}
			}
			if err := rows.Write(row); err != nil {
				return err
			}
		}
		rows.Flush()
		return rows.Error()
	})
}

// queuedBefore returns the job that an earlier request with the same Idempotency-Key and call made: what was queued is not
// called at once, too.
func (s *Server) queuedBefore(r *http.Request, c devices.ToolCall, timeout time.Duration, later string) (j api.Job, queued bool, err error) {
	key := r.Header.Get(headerKey)
	if key == "" {
		return j, false, nil
	}
	until, _ := timespan.Parse(later) // checkLater has parsed it
	return s.opt.Jobs.Queued(r.Context(), c.Principal, c, timeout, until, key)
}

// callLater queues a call for a device that is not connected; queued is false if the error of
// the direct call is the answer.
func (s *Server) callLater(r *http.Request, c devices.ToolCall, timeout time.Duration, later string, failed error) (j api.Job, queued bool, err error) {
	if e := devices.AsError(failed); e.Code != devices.CodeDeviceOffline {
		return j, false, failed
	}
	until, _ := timespan.Parse(later) // checkLater has parsed it
	if err := s.permitDevice(r.Context(), c.Principal, access.ScopeJobs, "createJob", c.Device); err != nil {
		return j, false, err
	}
	j, _, err = s.opt.Jobs.Later(r.Context(), c.Principal, c, timeout, until, r.Header.Get(headerKey))
	return j, err == nil, err
}

// checkLater checks the member later of a call, and the header that goes with it.
func (s *Server) checkLater(r *http.Request, later string) error {
	key := r.Header.Get(headerKey)
	switch {
	case later == "" && key != "":
		return badRequest(headerKey + " needs the member later: a call that is made at once is never made again")
	case later == "":
		return nil
	case key != "" && !jobs.IsKey(key):
		return badRequest(headerKey + " must have 1 to 128 printable ASCII characters")
	}
	if d, err := timespan.Parse(later); err != nil || d < time.Second || d > jobs.MaxUntil {
		return badRequest(`later must be a duration from 1s to 30d, such as "24h"`)
	}
	return nil
}
