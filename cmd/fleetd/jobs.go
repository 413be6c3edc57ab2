package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
	"fleetd/internal/jobs"
)

type jobsCmd struct {
	List     jobsListCmd         `cmd:"" default:"withargs" help:"List jobs, or show one (the default)."`
	Run      jobsRunCmd          `cmd:"" help:"Call a tool on all devices of a selection: now, later, repeatedly, at a pace."`
	Message  jobsMessageCmd      `cmd:"" help:"Send a message, such as an alert, to all devices of a selection."`
	Pause    jobsPauseCmd        `cmd:"" help:"Pause a job: no further task begins."`
	Resume   jobsResumeCmd       `cmd:"" help:"Continue a paused or halted job."`
	Cancel   jobsCancelCmd       `cmd:"" help:"Cancel a job: waiting tasks end, running ones finish."`
	Retry    jobsRetryCmd        `cmd:"" help:"Repeat the failed tasks of a job."`
	Advance  jobsAdvanceCmd      `cmd:"" help:"Open the next stage of a job."`
	Rollback firmwareRollbackCmd `cmd:"" help:"Give the devices of a firmware job back the images that they had."`
	Report   jobsReportCmd       `cmd:"" help:"Write what became of each device, as CSV or NDJSON."`
}

type jobsListCmd struct {
	Job       string `arg:"" optional:"" help:"Id of a job, or last: the newest one."`
	State     string `help:"Only jobs in this state." placeholder:"STATE" values:"scheduled,preparing,running,paused,halted,done,cancelled"`
	Group     string `help:"Only jobs of this group: those of one release." placeholder:"GROUP"`
	Device    string `device:"name" help:"Only jobs with a task for this device." placeholder:"DEVICE"`
	Watch     bool   `help:"Follow the job until it ends; the list, until Ctrl-C."`
	listFlags `set:"per=, one job per line"`
}

// Run prints the jobs, or one.
func (cmd *jobsListCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if cmd.Job != "" {
		var err error
		if cmd.Job, err = jobID(ctx, c, cmd.Job); err != nil {
			return err
		}
		return cmd.show(ctx, a, c)
	}
	return a.look(ctx, cmd.Watch, false, func(out io.Writer) error { return cmd.write(ctx, a, c, out) })
}

func (cmd *jobsListCmd) write(ctx context.Context, a *app, c *apiclient.Client, out io.Writer) error {
	head := []string{"JOB", "STATE", "ACTION", "DEVICES", "DONE", "OK", "FAILED", "UNKNOWN", "REFUSED", "EXPIRED", "CREATED", "BY"}
	none := "no job matches"
	if cmd.State == "" && cmd.Device == "" && cmd.Group == "" {
		none = "no jobs yet; `fleetd jobs run SELECT TOOL` starts one"
	}
	return printList(ctx, a, out, c, cmd.listFlags, head, none, func(j api.Job) []string {
		n := j.Counts
		return []string{j.ID, stateText(&j), cut(actionText(&j.Spec.Action), actionWidth), selectionText(&j.Spec), fmt.Sprintf("%d of %d", n.Total-n.Waiting-n.Running, n.Total),
			strconv.FormatInt(n.OK, 10), strconv.FormatInt(n.Failed, 10), strconv.FormatInt(n.Unknown, 10), strconv.FormatInt(n.Refused, 10), strconv.FormatInt(n.Expired, 10), timeCell(j.CreatedAt), j.CreatedBy}
	}, apiclient.Query{"group": cmd.Group, "state": cmd.State, "device": cmd.Device}, "jobs")
}

// show prints one job, and follows it with --watch.
func (cmd *jobsListCmd) show(ctx context.Context, a *app, c *apiclient.Client) error {
	if cmd.Watch {
		return a.followJob(ctx, c, cmd.Job, cmd.JSON)
	}
	return printAnswer(ctx, a, c, cmd.JSON, a.printJob, nil, "jobs", cmd.Job)
}

func (a *app) printJob(j api.Job) error {
	rows := [][]string{{"job", j.ID}, {"state", stateText(&j)}, {"action", actionText(&j.Spec.Action)}, {"devices", selectionText(&j.Spec)},
		{"tasks", countsText(&j.Counts)}, {"created", j.CreatedAt.UTC().Format(time.RFC3339) + " by " + cmp.Or(j.CreatedBy, "-")}}
	add := func(name, value string) {
		if value != "" {
			rows = append(rows, []string{name, value})
		}
	}
	if w := j.Spec.When; w != nil {
		zone := ""
		if w.Timezone != "" {
			zone = " (" + w.Timezone + ")"
		}
		add("at", utcText(w.At))
		if w.Cron != "" {
			add("schedule", w.Cron+zone)
		}
		if w.Window != nil {
			add("window", fmt.Sprintf("%s, open for %s%s", w.Window.Cron, w.Window.For, zone))
		}
	}
	if p := j.Spec.Pace; p != nil {
		add("pace", fmt.Sprintf("%s, %d at once", p.Rate, p.Concurrency))
	}
	if n := len(j.Spec.Stages); n > 0 {
		text := fmt.Sprintf("%d of %d (%s)", min(j.Stage, n), n, stagesText(j.Spec.Stages))
		if j.State == "running" && j.Reason == "hold" {
			text += fmt.Sprintf("; it has passed, and `fleetd jobs advance %s` opens the next", j.ID)
		}
		add("stage", text)
	}
	add("stop", stopText(j.Spec.Stop))
	add("retry", retryText(j.Spec.Retry))
	if j.Round > 0 || j.Missed > 0 {
		add("rounds", fmt.Sprintf("%d, %d missed", j.Round, j.Missed))
	}
	add("next", utcText(j.NextAt))
	add("begun", utcText(j.BegunAt))
	add("until", utcText(j.Until))
	add("ended", utcText(j.EndedAt))
	add("note", j.Spec.Note)
	return a.table(a.stdout, "", rows)
}

// stateText is the state with its reason.
func stateText(j *api.Job) string {
	if j.Reason == "" {
		return j.State
	}
	return j.State + " (" + j.Reason + ")"
}

// actionWidth is how much of an action a list shows.
const actionWidth = 60

// actionText is the action with its arguments or its text.
func actionText(x *api.JobAction) string {
	if action, known := jobs.ActionOf(x); known {
		return action.String()
	}
	return "another one; ask a newer fleetd"
}

func selectionText(spec *api.JobSpec) string {
	if spec.Select != "" {
		return spec.Select
	}
	if len(spec.Devices) > 3 {
		return devicesText(int64(len(spec.Devices)))
	}
	return strings.Join(spec.Devices, ",")
}

// stagesText writes stages as --stages takes them.
func stagesText(stages []api.JobStage) string {
	texts := make([]string, len(stages))
	for i, stage := range stages {
		texts[i] = stage.OK.String()
		switch {
		case stage.Hold:
			texts[i] += ":hold"
		case stage.Soak != "":
			texts[i] += ":" + stage.Soak
		}
	}
	return strings.Join(texts, ", ")
}

func stopText(stop *api.JobStop) string {
	var texts []string
	if stop != nil && stop.Failed > 0 {
		texts = append(texts, fmt.Sprintf("at %d failed or unknown", stop.Failed))
	}
	if stop != nil && stop.Share != "" {
		texts = append(texts, fmt.Sprintf("at %s failed or unknown, once %d tasks have ended", stop.Share, stop.Of))
	}
	return strings.Join(texts, ", or ")
}

func retryText(retry *api.JobRetry) string {
	if retry == nil || retry.Failed == 0 {
		return ""
	}
	text := fmt.Sprintf("at most %d of each task", retry.Failed)
	if retry.After != "" {
		text += ", " + retry.After + " apart"
	}
	return text
}

// countsText writes the counts that are not zero.
func countsText(n *api.JobCounts) string {
	text := fmt.Sprintf("%d of %d done", n.Total-n.Waiting-n.Running, n.Total)
	for _, part := range []struct {
		n    int64
		name string
	}{{n.Running, "running"}, {n.OK, "ok"}, {n.Failed, "failed"}, {n.Unknown, "unknown"}, {n.Refused, "refused"}, {n.Expired, "expired"},
		{n.Cancelled, "cancelled"}, {n.Already, "already"}, {n.Superseded, "superseded"}, {n.Gone, "gone"}} {
		if part.n > 0 {
			text += fmt.Sprintf(", %d %s", part.n, part.name)
		}
	}
	return text
}

// lastJob is what people write in place of the newest job's id.
const lastJob = "last"

// jobID returns the id of a job that a person has named.
func jobID(ctx context.Context, c *apiclient.Client, name string) (string, error) {
	if name != lastJob {
		return name, nil
	}
	for j, err := range apiclient.List[api.Job](ctx, c, nil, "jobs") { // the newest comes first
		return j.ID, err
	}
	return "", exitError{errors.New("there are no jobs; `fleetd jobs run SELECT TOOL` starts one"), exitRefused}
}

// jobVerb is a command that changes one job.
type jobVerb struct {
	Job string `arg:"" help:"Id of the job, or last: the newest one."`
	jsonFlags
}

func (cmd *jobVerb) do(ctx context.Context, a *app, c *apiclient.Client, verb, reason string, outcomes []string) error {
	id, err := jobID(ctx, c, cmd.Job)
	if err != nil {
		return err
	}
	return printSent(ctx, a, c, cmd.JSON, func(j api.Job) error {
		hint := ""
		switch {
		case verb != "retry":
		case j.State == "halted" || j.State == "paused":
			hint = fmt.Sprintf("; `fleetd jobs resume %s` continues it", j.ID)
		case j.State == "done":
			hint = fmt.Sprintf("; no task is %s: nothing is repeated", strings.Join(outcomes, " or "))
		}
		_, err := fmt.Fprintf(a.stdout, "job %s is %s; %s%s\n", j.ID, stateText(&j), countsText(&j.Counts), hint)
		return err
	}, apiclient.JobVerb(id, verb, reason, outcomes))
}

type jobsPauseCmd struct {
	Reason string `help:"Why, for people." placeholder:"TEXT"`
	jobVerb
}

// Run pauses the job.
func (cmd *jobsPauseCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return cmd.do(ctx, a, c, "pause", cmd.Reason, nil)
}

type jobsResumeCmd struct{ jobVerb }

// Run resumes the job.
func (cmd *jobsResumeCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return cmd.do(ctx, a, c, "resume", "", nil)
}

type jobsCancelCmd struct{ jobVerb }

// Run cancels the job.
func (cmd *jobsCancelCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return cmd.do(ctx, a, c, "cancel", "", nil)
}

type jobsRetryCmd struct {
	Outcome []string `help:"Repeat tasks with these outcomes; a task whose outcome is unknown may have acted." placeholder:"failed,unknown" default:"failed"`
	jobVerb
}

// Run repeats tasks.
func (cmd *jobsRetryCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return cmd.do(ctx, a, c, "retry", "", cmd.Outcome)
}

type jobsAdvanceCmd struct{ jobVerb }

// Run opens the next stage.
func (cmd *jobsAdvanceCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return cmd.do(ctx, a, c, "advance", "", nil)
}

type jobsReportCmd struct {
	Job    string `arg:"" help:"Id of the job, or last: the newest one."`
	Format string `help:"csv (the default) or ndjson." values:"csv,ndjson" default:"csv" placeholder:"FORMAT"`
	Output string `short:"o" help:"File to write; without it, standard output." placeholder:"FILE"`
	clientFlags
}

// Run writes the report.
func (cmd *jobsReportCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if cmd.Format != "csv" && cmd.Format != "ndjson" {
		return failed("--format must be csv or ndjson, not %q", cmd.Format)
	}
	job, err := jobID(ctx, c, cmd.Job)
	if err != nil {
		return err
	}
	return a.save(cmd.Output, func(w io.Writer) (int64, error) {
		return c.Download(ctx, w, apiclient.Query{"format": cmd.Format}, "jobs", job, "report")
	})
}

type queueCmd struct {
	Device    string `device:"name" arg:"" help:"Id or name of the device."`
	Cancel    string `help:"Cancel the waiting task of this job; last is the newest." placeholder:"JOB"`
	jsonFlags `set:"per=, one task per line"`
}

// Run prints what waits for a device.
func (cmd *queueCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if cmd.Cancel != "" {
		var err error
		if cmd.Cancel, err = jobID(ctx, c, cmd.Cancel); err != nil {
			return err
		}
		if err := c.Do(ctx, http.MethodPost, nil, "devices", cmd.Device, "tasks", cmd.Cancel, "cancel"); err != nil || cmd.JSON { // the server answers without content
			return err
		}
		_, err = fmt.Fprintf(a.stdout, "the task of job %s for %s is cancelled\n", cmd.Cancel, cleantext.Line(cmd.Device))
		return err
	}
	queue, err := apiclient.Get[api.List[apiclient.Answer[api.Task]]](ctx, c, nil, "devices", cmd.Device, "tasks")
	if err != nil {
		return err
	}
	rows := [][]string{{"JOB", "STATE", "WAITS FOR", "DUE", "ATTEMPT", "ACTION"}}
	for _, answer := range queue.Items {
		if cmd.JSON {
			if err := printJSONLine(a.stdout, answer.Raw); err != nil {
				return err
			}
			continue
		}
		t := answer.Value
		j, err := c.Job(ctx, t.Job)
		if err != nil {
			return err
		}
		rows = append(rows, []string{t.Job, t.State, cmp.Or(phaseText(t.Firmware), t.Reason), utcText(t.DueAt), strconv.Itoa(t.Attempt), cut(actionText(&j.Spec.Action), actionWidth)})
	}
	if cmd.JSON {
		return nil
	}
	if len(rows) == 1 {
		_, err := fmt.Fprintf(a.stdout, "nothing waits for %s\n", cleantext.Line(cmd.Device))
		return err
	}
	return a.table(a.stdout, "", rows)
}
