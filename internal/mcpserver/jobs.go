package mcpserver

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/cleantext"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/jobs/manager"
	"fleetd/internal/jsonspan"
	"fleetd/internal/timespan"
)

// Limits of get_job.
const (
	maxJobTasks   = 20
	maxOpenJobs   = 20
	maxTaskResult = 400 // bytes of a task's result or detail
)

// Jobs creates and shows jobs, and records the changes in the audit.
type Jobs interface {
	Create(ctx context.Context, by access.Principal, spec api.JobSpec, o manager.CreateOptions) (j api.Job, again bool, err error)
	Plan(ctx context.Context, by access.Principal, spec api.JobSpec) (api.JobPlan, error)
	Later(ctx context.Context, by access.Principal, call devices.ToolCall, timeout, later time.Duration, key string) (j api.Job, again bool, err error)
	Decline(ctx context.Context, by access.Principal, action, confirmation string) error
	Get(ctx context.Context, by access.Principal, id string) (api.Job, error)
	List(ctx context.Context, by access.Principal, q manager.Query) (api.List[api.Job], error)
	Tasks(ctx context.Context, by access.Principal, q manager.TaskQuery) (api.List[api.Task], error)
	Do(ctx context.Context, by access.Principal, id, verb string, o manager.VerbOptions) (api.Job, error)
}

type runJobArgs struct {
	Select    string          `json:"select"`
	Tool      string          `json:"tool"`
	Arguments json.RawMessage `json:"arguments"`
	At        api.Time        `json:"at"`
	Cron      string          `json:"cron"`
	Timezone  string          `json:"timezone"`
	Until     api.Time        `json:"until"`
	Rate      string          `json:"rate"`
	StopAfter int             `json:"stop_after_failures"`
	DryRun    bool            `json:"dry_run"`
	Key       string          `json:"key"`
}

func (s *Server) runJob(ctx context.Context, req *mcp.CallToolRequest, args runJobArgs) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	sel, err := selectorOf(args.Select)
	if err != nil {
		return nil, err
	}
	spec := api.JobSpec{Select: sel.String(), Action: api.JobAction{Call: &api.JobCall{Tool: args.Tool, Arguments: args.Arguments}}}
	if args.At != (api.Time{}) || args.Until != (api.Time{}) || args.Cron != "" || args.Timezone != "" {
		spec.When = &api.JobWhen{At: args.At, Cron: args.Cron, Timezone: args.Timezone, Until: args.Until}
	}
	if args.Rate != "" {
		spec.Pace = &api.JobPace{Rate: args.Rate}
	}
	if args.StopAfter != 0 {
		spec.Stop = &api.JobStop{Failed: args.StopAfter}
	}
	if args.DryRun {
		plan, err := s.opt.Jobs.Plan(ctx, by, spec)
		if err != nil {
			return nil, err
		}
		return structured(newPlanInfo(&plan)), nil
	}
	if s.opt.Draining() {
		return nil, errStopping()
	}
	s.progress(req, 1)(ctx, 0, "the devices of the job are counted")
	var j api.Job
	question, err := s.confirmJob(ctx, req, "", args.Arguments, func(token string) (err error) {
		j, _, err = s.opt.Jobs.Create(ctx, by, spec, manager.CreateOptions{Key: args.Key, Confirmation: token})
		return err
	}, func(shown string) (string, error) {
		plan, err := s.opt.Jobs.Plan(ctx, by, spec)
		return fmt.Sprintf("Run %s%s on the devices %s (now %d)?", cleantext.Short(args.Tool, maxTitle), shown, cleantext.Short(spec.Select, maxTitle), plan.Devices), err
	})
	switch {
	case err != nil:
		return nil, err
	case question != nil:
		return question, nil
	}
	return structured(newJobInfo(&j, nil)), nil
}

// parseLater returns how long a call may wait for its device, 0 if it may not.
func parseLater(text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	later, err := timespan.Parse(text)
	if err != nil || later < time.Second || later > jobs.MaxUntil {
		return 0, badArguments(`later must be a duration from 1s to 30d, such as "24h"`)
	}
	return later, nil
}

// later queues a call of a device that is not connected.
func (s *Server) later(ctx context.Context, req *mcp.CallToolRequest, call devices.ToolCall, timeout, later time.Duration) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	var j api.Job
	question, err := s.confirmJob(ctx, req, string(call.Device), call.Arguments, func(token string) (err error) {
		call.Confirmation = token
		j, _, err = s.opt.Jobs.Later(ctx, by, call, timeout, later, "")
		return err
	}, func(shown string) (string, error) {
		return fmt.Sprintf("%s When the device is back, within %s.", s.question(ctx, call, strings.TrimPrefix(shown, " with ")), timespan.Format(later)), nil
	})
	if err != nil || question != nil {
		return question, err
	}
	return structured(newJobInfo(&j, nil)), nil
}

// confirmJob creates a job that a person may have to confirm. If question is not nil, the host must
// ask the person first; ask returns its text, given the arguments as they are shown. device is that of a call, which a person may have
// chosen.
func (s *Server) confirmJob(ctx context.Context, req *mcp.CallToolRequest, device string, arguments json.RawMessage, create func(token string) error, ask func(shown string) (string, error)) (*mcp.CallToolResult, error) {
	token := ""
	if answer, ok := req.Params.InputResponses[confirmKey]; ok {
		token = tokenOf(req)
		if yes, isAnswer := answer.(*mcp.ElicitResult); !isAnswer || yes.Action != "accept" {
			return nil, s.opt.Jobs.Decline(ctx, requestInfoOf(ctx).by(), "create job", token)
		}
	}
	err := create(token)
	e := devices.AsError(errOr(err))
	switch {
	case err == nil || e.Code != devices.CodeConfirmation:
		return nil, err
	case token != "":
		return nil, &devices.Error{Code: e.Code, Rule: e.Rule, Detail: "the confirmation has expired or belongs to another job; nothing was created"}
	case !canElicit(req.Session):
		return nil, &devices.Error{Code: e.Code, Rule: e.Rule, Detail: "a person must confirm this job, and this host cannot ask (it does not support elicitation); a person can run it with fleetd jobs run"}
	}
	shown, ok := displayArguments(arguments)
	if !ok {
		return nil, &devices.Error{Code: e.Code, Rule: e.Rule, Detail: fmt.Sprintf("a person must confirm this job, but its arguments cannot be shown "+
			"(the limit is %d bytes without invisible characters); a person can run it with fleetd jobs run", maxShownArgs)}
	}
	if shown == "{}" {
		shown = ""
	} else {
		shown = " with " + shown
	}
	text, err := ask(shown)
	if err != nil {
		return nil, err
	}
	return &mcp.CallToolResult{
		InputRequests: mcp.InputRequestMap{confirmKey: &mcp.ElicitParams{Mode: "form", Message: text, RequestedSchema: json.RawMessage(`{"type":"object","properties":{}}`)}},
		RequestState:  e.Confirmation + " " + device,
	}, nil
}

type getJobArgs struct {
	Job     string `json:"job"`
	Outcome string `json:"outcome"`
}

func (s *Server) getJob(ctx context.Context, _ *mcp.CallToolRequest, args getJobArgs) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	if args.Job == "" {
		return s.openJobs(ctx, by)
	}
	j, err := s.opt.Jobs.Get(ctx, by, args.Job)
	if err != nil {
		return nil, err
	}
	if args.Outcome == "" {
		return structured(newJobInfo(&j, nil)), nil
	}
	var list []api.Task
	for q := (manager.TaskQuery{Job: args.Job, Outcome: args.Outcome, Limit: maxJobTasks}); ; {
		page, err := s.opt.Jobs.Tasks(ctx, by, q)
		if err != nil {
			return nil, err
		}
		list = append(list, page.Items...)
		if q.Cursor, q.Limit = page.NextCursor, maxJobTasks-len(list); q.Cursor == "" || q.Limit == 0 { // a page may be short
			return structured(newJobInfo(&j, list)), nil
		}
	}
}

// openJobs lists the open jobs that the caller has created.
func (s *Server) openJobs(ctx context.Context, by access.Principal) (*mcp.CallToolResult, error) {
	answer := struct {
		Jobs []jobInfo `json:"jobs"`
		More bool      `json:"more,omitempty"`
	}{Jobs: []jobInfo{}}
	for q := (manager.Query{Open: true, Own: true, Limit: maxOpenJobs}); ; {
		page, err := s.opt.Jobs.List(ctx, by, q)
		if err != nil {
			return nil, err
		}
		for i := range page.Items {
			answer.Jobs = append(answer.Jobs, newJobInfo(&page.Items[i], nil))
		}
		q.Cursor, q.Limit = page.NextCursor, maxOpenJobs-len(answer.Jobs)
		if answer.More = q.Cursor != ""; !answer.More || q.Limit <= 0 {
			return structured(answer), nil
		}
	}
}

type cancelJobArgs struct {
	Job string `json:"job"`
}

func (s *Server) cancelJob(ctx context.Context, _ *mcp.CallToolRequest, args cancelJobArgs) (*mcp.CallToolResult, error) {
	j, err := s.opt.Jobs.Do(ctx, requestInfoOf(ctx).by(), args.Job, "cancel", manager.VerbOptions{})
	if err != nil {
		return nil, err
	}
	return structured(newJobInfo(&j, nil)), nil
}

// jobInfo is a job as models see it.
type jobInfo struct {
	Job    string           `json:"job"`
	State  string           `json:"state"`
	Reason string           `json:"reason,omitempty"`
	Select string           `json:"select,omitempty"`
	Tool   string           `json:"tool,omitempty"`
	Text   string           `json:"text,omitempty"` // of a message
	Counts map[string]int64 `json:"counts"`
	NextAt string           `json:"next_at,omitempty"`
	Cron   string           `json:"cron,omitempty"`
	Zone   string           `json:"timezone,omitempty"` // of Cron
	Until  string           `json:"until,omitempty"`
	Tasks  []taskInfo       `json:"tasks,omitempty"`
}

type taskInfo struct {
	Device  string `json:"device"`
	Outcome string `json:"outcome,omitempty"`
	Code    string `json:"code,omitempty"`
	Text    string `json:"said_by_device,omitempty"`
	Detail  string `json:"detail,omitempty"`
}

func newJobInfo(j *api.Job, tasks []api.Task) jobInfo {
	out := jobInfo{Job: j.ID, State: j.State, Reason: cleantext.Short(j.Reason, maxTitle), Select: cleantext.Short(j.Spec.Select, maxTitle), NextAt: timeText(j.NextAt), Until: timeText(j.Until), Counts: map[string]int64{}}
	if w := j.Spec.When; w != nil && w.Cron != "" {
		out.Cron, out.Zone = cleantext.Short(w.Cron, maxTitle), cleantext.Short(w.Timezone, maxTitle)
	}
	if c := j.Spec.Action.Call; c != nil {
		out.Tool = cleantext.Short(c.Tool, maxTitle)
	}
	if m := j.Spec.Action.Message; len(m) > 0 {
		text, _ := jsonspan.String(jsonspan.Member(m, "message"))
		out.Text = cleantext.Short(text, maxTitle)
	}
	c := &j.Counts
	for name, n := range map[string]int64{"total": c.Total, "waiting": c.Waiting, "running": c.Running, "ok": c.OK, "failed": c.Failed, "unknown": c.Unknown, "refused": c.Refused,
		"expired": c.Expired, "cancelled": c.Cancelled, "already": c.Already, "superseded": c.Superseded, "gone": c.Gone} {
		if n > 0 || name == "total" {
			out.Counts[name] = n
		}
	}
	for i := range tasks {
		t := &tasks[i]
		out.Tasks = append(out.Tasks, taskInfo{Device: t.Device, Outcome: t.Outcome, Code: t.Code, Text: cleantext.Short(t.Result, maxTaskResult), Detail: cleantext.Short(t.Detail, maxTaskResult)})
	}
	return out
}

func timeText(t api.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

// planInfo is a plan as models see it.
type planInfo struct {
	Devices  int64            `json:"devices"`
	Online   int64            `json:"online"`
	AtRisk   int64            `json:"at_risk"`
	NextAt   string           `json:"next_at,omitempty"`
	Zone     string           `json:"timezone,omitempty"` // of cron
	Confirm  bool             `json:"needs_confirmation,omitempty"`
	Refusals []map[string]any `json:"refusals,omitempty"`
}

func newPlanInfo(p *api.JobPlan) planInfo {
	out := planInfo{Devices: p.Devices, Online: p.Online, AtRisk: p.AtRisk, NextAt: timeText(p.NextAt), Confirm: len(p.Confirm) > 0}
	if w := p.Spec.When; w != nil && w.Cron != "" {
		out.Zone = cleantext.Short(w.Timezone, maxTitle)
	}
	for _, r := range p.Refusals {
		out.Refusals = append(out.Refusals, map[string]any{"code": r.Code, "detail": cleantext.Short(r.Detail, maxTaskResult), "count": r.Count})
	}
	return out
}
