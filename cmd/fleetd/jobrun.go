package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
	"fleetd/internal/jsonspan"
	"fleetd/internal/timespan"
)

// jobFlags are those of every command that starts a job.
type jobFlags struct {
	At          string `help:"Start no earlier than this: a duration from now, a date or a time." placeholder:"2h|TIME"`
	Cron        string `help:"Repeat: minute hour day month weekday, such as '0 7 * * 1-5'." placeholder:"CRON"`
	Timezone    string `help:"Timezone of --cron and --window; without it the nodes' --timezone, or UTC if that is empty." placeholder:"Europe/Berlin"`
	Until       string `help:"When tasks that have not begun expire (default: 24h); with --cron or --follow, the end of the job." placeholder:"24h|TIME"`
	Window      string `help:"Begin only inside a window: its cron expression, a slash, how long it is open, such as '0 2 * * */3h'." placeholder:"CRON/DURATION"`
	Rate        string `help:"How many devices begin in a second, minute or hour: 20/s, 30/m, 100/h or unlimited (default 20/s)." placeholder:"30/m"`
	Concurrency int    `help:"How many devices run at once (default 32, or the number of --stop if that is less)." placeholder:"N"`
	Stages      string `help:"Stages: the total of successes at which each ends, then a pause, or hold to wait for jobs advance, such as 1:30m,5%:hold,100%." placeholder:"LIST"`
	Stop        string `help:"Halt the job after this number or share of failures, such as 2 or 5%." placeholder:"N|SHARE"`
	Retry       string `help:"Repeat a failed task this many times, with an optional pause before each, such as 2 or 2:10m." placeholder:"N[:PAUSE]"`
	Follow      bool   `help:"Also run on devices that match the selection only later."`
	Repeatable  bool   `help:"The action may run twice without harm: with --retry, tasks with an unknown outcome are repeated, too."`
	Busy        string `help:"What to do with a device in a conversation: wait or skip it." placeholder:"wait|skip" values:"wait,skip"`
	Note        string `help:"A note, for people." placeholder:"TEXT"`
	Key         string `help:"Idempotency key: the same command again starts no second job." placeholder:"TEXT"`
	DryRun      bool   `help:"Show what the job would do, and start nothing."`
	Watch       bool   `help:"Follow the job until it ends."`
	Yes         bool   `short:"y" help:"Start the job without asking."`
	jsonFlags   `embed:""`
}

// spec fills in what the flags say.
func (f *jobFlags) spec(target string, now time.Time) (spec api.NewJob, err error) {
	if isSelection(target) {
		spec.Select = target
	} else {
		spec.Devices = []string{target}
	}
	spec.Follow, spec.Repeatable, spec.Busy, spec.Note = f.Follow, f.Repeatable, f.Busy, f.Note
	var when api.JobWhen
	when.Cron, when.Timezone = f.Cron, f.Timezone
	for _, t := range []struct {
		flag, text string
		at         *api.Time
	}{{"--at", f.At, &when.At}, {"--until", f.Until, &when.Until}} {
		if t.text == "" {
			continue
		}
		at, err := moment(t.text, now, 1)
		if err != nil {
			return spec, failed("%s %w", t.flag, err)
		}
		*t.at = api.At(at)
	}
	if f.Window != "" {
		i := strings.LastIndexByte(f.Window, '/')
		if i < 0 {
			return spec, failed("--window takes a cron expression, a slash and a duration, such as '0 2 * * */3h', not %q", f.Window)
		}
		when.Window = &api.JobWindow{Cron: f.Window[:i], For: f.Window[i+1:]}
	}
	if when != (api.JobWhen{}) {
		spec.When = &when
	}
	if f.Rate != "" || f.Concurrency != 0 {
		spec.Pace = &api.JobPace{Rate: f.Rate, Concurrency: f.Concurrency}
	}
	if spec.Stages, err = parseStages(f.Stages); err != nil {
		return spec, err
	}
	if f.Stop != "" {
		limit, err := api.ParseAmount(f.Stop)
		if err != nil {
			return spec, failed("--stop %w", err)
		}
		spec.Stop = &api.JobStop{Failed: int(limit.Number)}
		if limit.Percent > 0 {
			spec.Stop.Share = limit.String()
		}
	}
	if f.Retry != "" {
		times, pause, _ := strings.Cut(f.Retry, ":")
		n, err := api.ParseAmount(times)
		if err != nil || n.Number == 0 {
			return spec, failed("--retry takes a number, and a pause after a colon, such as 2:10m, not %q", f.Retry)
		}
		spec.Retry = &api.JobRetry{Failed: int(n.Number), After: pause}
	}
	return spec, nil
}

// parseStages reads 1:30m,5%:hold,100%.
func parseStages(text string) (stages []api.JobStage, err error) {
	if text == "" {
		return nil, nil
	}
	for _, part := range strings.Split(text, ",") {
		amount, after, _ := strings.Cut(strings.TrimSpace(part), ":")
		var stage api.JobStage
		if stage.OK, err = api.ParseAmount(amount); err != nil {
			return nil, failed("--stages: %q %w", amount, err)
		}
		switch {
		case after == "hold":
			stage.Hold = true
		case after != "":
			if _, err := timespan.Parse(after); err != nil {
				return nil, failed("--stages: after the colon of %q belongs a duration such as 30m, or hold", part)
			}
			stage.Soak = after
		}
		stages = append(stages, stage)
	}
	return stages, nil
}

type jobsRunCmd struct {
	Select string   `arg:"" name:"select|device" help:"Selection such as room=lab, or a device id. device=* selects all."`
	Tool   string   `arg:"" help:"Name of the tool."`
	Values []string `arg:"" optional:"" name:"key=value" help:"Arguments: numbers, true, false and JSON as they are, the rest as text; key:=JSON passes JSON as it is."`
	Args   string   `help:"Arguments as one JSON object; key=value adds to it." placeholder:"JSON"`
	// Timeout is that of one call.
	Timeout time.Duration `help:"How long each call may take (at most 300s)." placeholder:"30s"`
	jobFlags
}

// Run starts the job.
func (cmd *jobsRunCmd) Run(ctx context.Context, a *app) error {
	spec, err := cmd.spec(cmd.Select, a.now())
	if err != nil {
		return err
	}
	call := &api.JobCall{Tool: cmd.Tool}
	if call.Arguments, err = guessedArguments(cmd.Args, cmd.Values); err != nil {
		return err
	}
	if cmd.Timeout != 0 {
		call.Timeout = cmd.Timeout.String()
	}
	spec.Action.Call = call
	return cmd.start(ctx, a, spec)
}

// guessedArguments reads arguments without a schema: those of many devices may differ.
func guessedArguments(document string, values []string) (json.RawMessage, error) {
	arguments := make(map[string]json.RawMessage)
	if document != "" {
		if err := json.Unmarshal([]byte(document), &arguments); err != nil || arguments == nil {
			return nil, failed("--args must be one JSON object, such as '{\"volume\":50}'")
		}
	}
	given, err := splitValues(values)
	if err != nil {
		return nil, err
	}
	for _, g := range given {
		value := json.RawMessage(g.value)
		if !g.isJSON {
			value = guess(g.value)
		}
		arguments[g.key] = value
	}
	return json.Marshal(arguments)
}

type jobsMessageCmd struct {
	Select string   `arg:"" name:"select|device" help:"Selection such as room=lab, or a device id. device=* selects all."`
	Type   string   `arg:"" help:"Type of the message, such as alert."`
	Values []string `arg:"" optional:"" name:"key=value" help:"Members of the message, such as status=Note message='Back at ten' emotion=happy."`
	jobFlags
}

// Run starts the job.
func (cmd *jobsMessageCmd) Run(ctx context.Context, a *app) error {
	spec, err := cmd.spec(cmd.Select, a.now())
	if err != nil {
		return err
	}
	message := map[string]json.RawMessage{"type": jsonspan.AppendString(nil, cmd.Type)}
	given, err := splitValues(cmd.Values)
	if err != nil {
		return err
	}
	for _, g := range given {
		value := json.RawMessage(g.value)
		if !g.isJSON { // the members of messages are texts
			value = jsonspan.AppendString(nil, g.value)
		}
		message[g.key] = value
	}
	if spec.Action.Message, err = json.Marshal(message); err != nil {
		return failed("encode the message: %w", err)
	}
	return cmd.start(ctx, a, spec)
}

type restartCmd struct {
	Select string `arg:"" name:"select|device" help:"Selection such as room=lab, or a device id. device=* selects all."`
	Now    bool   `help:"Restart at once, also in the middle of a conversation."`
	jobFlags
}

// Run starts the job.
func (cmd *restartCmd) Run(ctx context.Context, a *app) error {
	spec, err := cmd.spec(cmd.Select, a.now())
	if err != nil {
		return err
	}
	spec.Action.Restart = &api.JobRestart{When: "idle"}
	if cmd.Now {
		spec.Action.Restart.When = "now"
	}
	return cmd.start(ctx, a, spec)
}

// start shows what is wrong with the plan, waits for a yes, and creates the job.
func (f *jobFlags) start(ctx context.Context, a *app, spec api.NewJob) error {
	c, err := f.client(a)
	if err != nil {
		return err
	}
	create := apiclient.Request{Method: http.MethodPost, Path: []string{"jobs"}, Body: spec}
	dry := create
	dry.Query, dry.Timeout = apiclient.Query{"dry_run": "true"}, apiclient.LongestCall
	if f.DryRun {
		return printSent(ctx, a, c, f.JSON, a.printPlan, dry)
	}
	plan, err := apiclient.Send[api.JobPlan](ctx, c, dry)
	switch {
	case err != nil:
		return err
	case plan.Devices == 0 && spec.Select != "" && f.Key == "" && !f.Follow && (spec.When == nil || spec.When.At.IsZero() && spec.When.Cron == ""):
		return exitError{fmt.Errorf("no device matches %s; nothing was started (with --follow, --at or --cron a job waits for devices that come to match)", spec.Select), exitRefused}
	}
	for _, no := range plan.Refusals {
		fmt.Fprintf(a.stderr, "fleetd: %s will be refused: %s\n", devicesText(no.Count), cleantext.Line(no.Detail)) // devices sent parts of it
	}
	if plan.Devices > 1 && !f.Yes && !a.confirmed(planQuestion(&plan)) {
		return exitError{fmt.Errorf("%s; nothing was started: add --yes to start it, --dry-run to see more", planText(&plan)), exitRefused}
	}
	create.Header = apiclient.IdempotencyKey(f.Key)
	made, err := apiclient.Send[apiclient.Answer[api.Job]](ctx, c, create)
	if problem, ok := errors.AsType[*apiclient.Problem](err); ok && problem.Confirmation != "" {
		if !f.Yes && !a.confirmed(fmt.Sprintf("The rule %s requires a confirmation of the whole job. Start it?", cleantext.Line(problem.Rule))) {
			return exitError{fmt.Errorf("the job needs a yes (rule %s); nothing was started: add --yes to confirm it", problem.Rule), exitRefused}
		}
		spec.Confirmation = problem.Confirmation
		create.Body = spec
		made, err = apiclient.Send[apiclient.Answer[api.Job]](ctx, c, create)
	}
	if err != nil {
		return err
	}
	j := made.Value
	if f.Watch {
		return a.followJob(ctx, c, j.ID, f.JSON)
	}
	if f.JSON {
		return printJSON(a.stdout, made.Raw)
	}
	_, err = fmt.Fprintf(a.stdout, "job %s is %s; follow it with `fleetd jobs %s --watch`\n", j.ID, stateText(&j), j.ID)
	return err
}

// planText is the plan in one line.
func planText(p *api.JobPlan) string {
	text := fmt.Sprintf("%s, %d connected", devicesText(p.Devices), p.Online)
	if p.AtRisk < p.Devices {
		text += fmt.Sprintf(", at most %d can fail before it halts", p.AtRisk)
	}
	return text
}

func planQuestion(p *api.JobPlan) string { return "This job is for " + planText(p) + ". Start it?" }

func (a *app) printPlan(p api.JobPlan) error {
	rows := [][]string{{"devices", fmt.Sprintf("%d, %d connected", p.Devices, p.Online)}, {"action", actionText(&p.Spec.Action)},
		{"at risk", fmt.Sprintf("%d can fail or get lost before it halts by itself", p.AtRisk)}}
	if p.Estimated != "" {
		rows = append(rows, []string{"takes", p.Estimated + " for the connected devices"})
	}
	for _, t := range []struct {
		name string
		at   api.Time
	}{{"next", p.NextAt}, {"until", p.Spec.When.Until}} {
		if !t.at.IsZero() {
			rows = append(rows, []string{t.name, utcText(t.at)})
		}
	}
	for _, no := range p.Refusals {
		rows = append(rows, []string{"refused", fmt.Sprintf("%s: %s (%s)", devicesText(no.Count), no.Detail, strings.Join(no.Devices, ", "))})
	}
	for _, rule := range p.Confirm {
		rows = append(rows, []string{"confirm", "the rule " + rule + " requires a confirmation of the job"})
	}
	return a.table(a.stdout, "", rows)
}

// followJob shows a job's progress until it ends, halts or pauses: on a terminal one line that changes, else a line
// for each change.
func (a *app) followJob(ctx context.Context, c *apiclient.Client, id string, asJSON bool) error {
	var shown string
	began, first, quiet := a.now(), int64(-1), 0
	for {
		answer, err := apiclient.Get[apiclient.Answer[api.Job]](ctx, c, nil, "jobs", id)
		if ctx.Err() != nil {
			a.endLine(shown)
			fmt.Fprintf(a.stderr, "the job goes on; follow it with `fleetd jobs %s --watch`, end it with `fleetd jobs cancel %s`\n", id, id)
			return exitError{errors.New("interrupted"), exitInterrupted}
		}
		if err != nil {
			a.endLine(shown)
			return err
		}
		j := answer.Value
		done := j.Counts.Total - j.Counts.Waiting - j.Counts.Running
		if first < 0 {
			first = done
		}
		line := fmt.Sprintf("job %s %s: %s%s", j.ID, stateText(&j), countsText(&j.Counts), speedText(done-first, j.Counts.Total-done, a.now().Sub(began)))
		changed := withoutSpeed(line) != withoutSpeed(shown)
		switch {
		case asJSON && changed:
			err = printJSONLine(a.stdout, answer.Raw)
		case asJSON:
		case a.columns > 0:
			_, err = fmt.Fprintf(a.stdout, "\r\x1b[K%s", clipLine(line, a.columns-1))
		case changed:
			_, err = fmt.Fprintln(a.stdout, line)
		}
		if err != nil {
			return failed("write: %w", err)
		}
		shown = line
		if quiet++; changed || j.State != "running" || j.Counts.Running > 0 {
			quiet = 0
		}
		if quiet == looksUntilQuiet && !asJSON {
			if err := a.tellAbsent(ctx, c, &j, shown); err != nil {
				return err
			}
		}
		switch j.State {
		case "done", "cancelled", "halted", "paused":
			if !asJSON {
				a.endLine(shown)
			}
			return jobExit(&j)
		}
		clock.Sleep(ctx, a.refresh/2)
	}
}

// looksUntilQuiet is how many looks at a job without a change there are before its waiting tasks are looked at.
const looksUntilQuiet = 5

// tellAbsent says that all waiting tasks of a job are for devices that are not connected, if that is so, and how to leave.
func (a *app) tellAbsent(ctx context.Context, c *apiclient.Client, j *api.Job, shown string) error {
	const most = 1000
	absent := int64(0)
	for _, reason := range []string{"offline", "asleep"} {
		for _, err := range apiclient.List[api.Task](ctx, c, apiclient.Query{"reason": reason, "limit": strconv.Itoa(most)}, "jobs", j.ID, "tasks") {
			if absent++; err != nil || absent > most {
				return nil // the job itself is what is followed
			}
		}
	}
	if absent == 0 || absent < j.Counts.Waiting {
		return nil
	}
	a.endLine(shown)
	_, err := fmt.Fprintf(a.stderr, "fleetd: only devices that are not connected are left (%d); the job waits for them until %s. Ctrl-C leaves, and the job goes on.\n", absent, cmp.Or(utcText(j.Until), "it is cancelled"))
	return err
}

// endLine ends the line that changes.
func (a *app) endLine(shown string) {
	if a.columns > 0 && shown != "" {
		fmt.Fprintln(a.stdout)
	}
}

// speedMark separates what changes with every look from the rest of a progress line.
const speedMark = "; "

// speedText is the rate since the first look, and how long the rest takes at it.
func speedText(done, left int64, took time.Duration) string {
	if done < 1 || took < time.Second {
		return ""
	}
	rate := float64(done) / took.Seconds()
	text := fmt.Sprintf("%s%.1f/s", speedMark, rate)
	if left > 0 {
		text += ", " + time.Duration(float64(left)/rate*float64(time.Second)).Round(time.Second).String() + " left"
	}
	return text
}

func withoutSpeed(line string) string {
	text, _, _ := strings.Cut(line, speedMark)
	return text
}

// clipLine cuts a line of ASCII to the width of the terminal.
func clipLine(line string, width int) string {
	if width < 1 || len(line) <= width {
		return line
	}
	return line[:width]
}

// jobExit is the exit status of a job that is followed to its end.
func jobExit(j *api.Job) error {
	switch n := j.Counts; {
	case j.State == "halted":
		lost := ""
		if n.Unknown > 0 {
			lost = fmt.Sprintf(", %d unknown", n.Unknown)
		}
		return exitError{fmt.Errorf("job %s is %s%s; `fleetd jobs report %s` has each device, `fleetd jobs resume %s` continues it", j.ID, stateText(j), lost, j.ID, j.ID), exitTimeout}
	case n.Unknown > 0:
		return exitError{fmt.Errorf("job %s is %s, %d unknown; `fleetd jobs report %s` has each device", j.ID, stateText(j), n.Unknown, j.ID), exitTimeout}
	case n.Failed > 0:
		return exitError{fmt.Errorf("%s failed; `fleetd jobs report %s` has each device, `fleetd jobs retry %s` repeats them", devicesText(n.Failed), j.ID, j.ID), exitTool}
	case n.Refused+n.Expired+n.Gone > 0:
		return exitError{fmt.Errorf("%s refused, %d expired, %d gone; `fleetd jobs report %s` has the reasons", devicesText(n.Refused), n.Expired, n.Gone, j.ID), exitRefused}
	}
	return nil
}
