package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
	"fleetd/internal/firmware"
)

type firmwareRollCmd struct {
	What        string   `arg:"" name:"release|image" help:"Version, PROJECT@VERSION, or the first 12 digits of an image."`
	Select      string   `arg:"" name:"select|device" help:"Selection such as room=lab, or a device id. device=* selects all."`
	Stages      string   `help:"Stages: the total of devices that must be proved before the next one, then a pause, or hold to wait for jobs advance (default 1:30m,5%:2h,100%)." placeholder:"LIST"`
	Stop        string   `help:"Halt after this number or share of failures (default: 1 in the first stage, then 5% of 20)." placeholder:"N|SHARE"`
	Concurrency int      `help:"How many devices are upgraded at once (default 10)." placeholder:"N"`
	Rate        string   `help:"How many devices begin in a second, minute or hour (default 20/s)." placeholder:"30/m"`
	Window      string   `help:"Begin only inside a window: its cron expression, a slash, how long it is open, such as '0 2 * * */3h'." placeholder:"CRON/DURATION"`
	Until       string   `help:"When devices that have not begun are given up (default: 30d)." placeholder:"30d|TIME"`
	Restart     string   `help:"idle: restart connected devices that are in no conversation; never: wait for their next start." placeholder:"idle|never" values:"idle,never"`
	Stay        string   `help:"How long a device must stay up with the image (default 10m)." placeholder:"10m"`
	Gates       []string `help:"What a device must pass: boot, connect, tools, status, stay (default: all)." placeholder:"GATE"`
	MayLose     []string `help:"Tools that the device may lack with the image." placeholder:"TOOL"`
	OnHalt      string   `help:"When failed gates halt the job: stop, or rollback to bring the devices back." placeholder:"stop|rollback" values:"stop,rollback"`
	Allow       []string `help:"Findings that do not block: project, layout, version_too_old, ota_url." placeholder:"CODE"`
	Follow      bool     `help:"Also roll to devices that match the selection only later."`
	Note        string   `help:"A note, for people." placeholder:"TEXT"`
	Key         string   `help:"Idempotency key: the same command again starts nothing new." placeholder:"TEXT"`
	DryRun      bool     `help:"Show what would happen, and start nothing."`
	Watch       bool     `help:"Follow the rollout until it ends."`
	Yes         bool     `short:"y" help:"Start without asking."`
	jsonFlags   `embed:""`
}

// Run starts the rollout.
func (cmd *firmwareRollCmd) Run(ctx context.Context, a *app) error {
	flags := jobFlags{Stages: cmd.Stages, Stop: cmd.Stop, Concurrency: cmd.Concurrency, Rate: cmd.Rate, Window: cmd.Window, Until: cmd.Until, Follow: cmd.Follow,
		Note: cmd.Note, Key: cmd.Key, DryRun: cmd.DryRun, Watch: cmd.Watch, Yes: cmd.Yes, jsonFlags: cmd.jsonFlags}
	spec, err := flags.spec(cmd.Select, a.now())
	if err != nil {
		return err
	}
	options := api.FirmwareOptions{Restart: cmd.Restart, Stay: cmd.Stay, Gates: cmd.Gates, MayLose: cmd.MayLose, OnHalt: cmd.OnHalt, Allow: cmd.Allow}
	if firmware.IsID(cmd.What) {
		spec.Action.Firmware = &api.JobFirmware{Image: cmd.What, FirmwareOptions: options}
		return flags.start(ctx, a, spec)
	}
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	roll := api.FirmwareRoll{Release: cmd.What, Firmware: options, Select: spec.Select, Devices: spec.Devices, Follow: spec.Follow, When: spec.When, Pace: spec.Pace, Stages: spec.Stages, Stop: spec.Stop, Note: spec.Note}
	create := apiclient.Request{Method: http.MethodPost, Path: []string{"firmware", "roll"}, Body: roll, Header: apiclient.IdempotencyKey(cmd.Key)}
	dry := create
	dry.Query, dry.Timeout, dry.Header = apiclient.Query{"dry_run": "true"}, apiclient.LongestCall, nil
	if cmd.DryRun {
		return printSent(ctx, a, c, cmd.JSON, a.printRoll, dry)
	}
	plan, err := apiclient.Send[api.FirmwareRollPlan](ctx, c, dry)
	if err != nil {
		return err
	}
	if !cmd.Yes && !a.confirmed(rollQuestion(&plan)) {
		return exitError{errors.New("nothing was started: add --yes to start it, --dry-run to see more"), exitRefused}
	}
	made, err := apiclient.Send[apiclient.Answer[api.JobGroup]](ctx, c, create)
	if err != nil {
		return err
	}
	return a.startedGroup(ctx, c, made, cmd.Watch, cmd.JSON)
}

// eligible is the number of devices of a plan that may get the image.
func eligible(p *api.JobPlan) int64 {
	n := p.Devices - p.Already
	for _, no := range p.Refusals {
		n -= no.Count
	}
	return max(n, 0)
}

func rollQuestion(plan *api.FirmwareRollPlan) string {
	var devices, lost int64
	for i := range plan.Items {
		devices += eligible(&plan.Items[i])
		lost += plan.Items[i].NoWayBack
	}
	text := fmt.Sprintf("This gives %s a firmware image, in %s", devicesText(devices), count(len(plan.Items), "job"))
	if lost > 0 {
		text += fmt.Sprintf("; %s could not get back what they run", devicesText(lost))
	}
	return text + ". Start it?"
}

func (a *app) printRoll(plan api.FirmwareRollPlan) error {
	for i, p := range plan.Items {
		if i > 0 {
			fmt.Fprintln(a.stdout)
		}
		if err := a.printPlan(p); err != nil {
			return err
		}
	}
	return nil
}

// startedGroup says which jobs were started, or follows them.
func (a *app) startedGroup(ctx context.Context, c *apiclient.Client, made apiclient.Answer[api.JobGroup], watch, asJSON bool) error {
	g := made.Value
	if watch {
		return a.followGroup(ctx, c, g.Group, asJSON)
	}
	if asJSON {
		return printJSON(a.stdout, made.Raw)
	}
	for i := range g.Items {
		j := &g.Items[i]
		fmt.Fprintf(a.stdout, "job %s (%s) is %s\n", j.ID, actionText(&j.Spec.Action), stateText(j))
	}
	if g.Unreachable > 0 {
		fmt.Fprintf(a.stdout, "%s cannot be brought back: the image that they had is not stored\n", devicesText(g.Unreachable))
	}
	_, err := fmt.Fprintf(a.stdout, "follow them with `fleetd jobs --group %s`, or one with `fleetd jobs JOB --watch`\n", g.Group)
	return err
}

// followGroup shows the progress of the jobs of a group, a line for each change, until all have ended, halted or paused.
func (a *app) followGroup(ctx context.Context, c *apiclient.Client, group string, asJSON bool) error {
	shown := map[string]string{}
	for {
		open := false
		var worst error
		for j, err := range apiclient.List[api.Job](ctx, c, apiclient.Query{"group": group}, "jobs") {
			if err != nil {
				return err
			}
			line := fmt.Sprintf("job %s %s: %s%s", j.ID, stateText(&j), countsText(&j.Counts), phasesText(ctx, c, &j))
			if line != shown[j.ID] {
				shown[j.ID] = line
				if asJSON {
					err = json.NewEncoder(a.stdout).Encode(&j)
				} else {
					_, err = fmt.Fprintln(a.stdout, line)
				}
				if err != nil {
					return failed("write: %w", err)
				}
			}
			if slices.Contains([]string{"done", "cancelled", "halted", "paused"}, j.State) {
				worst = errors.Join(worst, jobExit(&j))
			} else {
				open = true
			}
		}
		if !open {
			return firstExit(worst)
		}
		if !clock.Sleep(ctx, a.refresh/2) {
			fmt.Fprintf(a.stderr, "the rollout goes on; follow it with `fleetd jobs --group %s`\n", group)
			return exitError{errors.New("interrupted"), exitInterrupted}
		}
	}
}

// firstExit is the first of joined errors, whose exit status counts.
func firstExit(err error) error {
	if exit, ok := errors.AsType[exitError](err); ok {
		return exit
	}
	return err
}

// phasesText says what the running tasks of a firmware job wait for.
func phasesText(ctx context.Context, c *apiclient.Client, j *api.Job) string {
	if j.Spec.Action.Firmware == nil || j.Counts.Running == 0 {
		return ""
	}
	var parts []string
	for t, err := range apiclient.List[api.Task](ctx, c, apiclient.Query{"state": "running"}, "jobs", j.ID, "tasks") {
		if err != nil {
			return "" // the job itself is what is followed
		}
		if phase := phaseText(t.Firmware); phase != "" {
			parts = append(parts, cleantext.Line(t.Device)+" "+phase)
		}
	}
	slices.Sort(parts)
	const most = 5
	if len(parts) > most {
		parts = append(parts[:most], fmt.Sprintf("%d more", len(parts)-most))
	}
	if len(parts) == 0 {
		return ""
	}
	return " (" + strings.Join(parts, ", ") + ")"
}

// phaseText says what a running firmware task waits for. It is empty for every other task.
func phaseText(f *api.TaskFirmware) string {
	switch {
	case f == nil || f.Phase == "":
		return ""
	case f.Phase == "loading" && f.Size > 0:
		return fmt.Sprintf("loading %d%%", 100*f.Bytes/f.Size)
	}
	return strings.TrimSpace(f.Phase + " " + f.Gate)
}

type firmwareRollbackCmd struct {
	Job   string `arg:"" name:"job|group" help:"Id of a firmware job or of a group, or last: the newest job."`
	Watch bool   `help:"Follow the rollback until it ends."`
	yesFlag
	jsonFlags
}

// Run takes firmware jobs back.
func (cmd *firmwareRollbackCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	id, err := jobID(ctx, c, cmd.Job)
	if err != nil {
		return err
	}
	if err := cmd.ask(a, "Give the devices of job "+id+" back the images that they had?"); err != nil {
		return err
	}
	ids := []string{}
	for j, err := range apiclient.List[api.Job](ctx, c, apiclient.Query{"group": id}, "jobs") {
		if err != nil {
			return err
		}
		ids = append(ids, j.ID)
	}
	if len(ids) == 0 {
		ids = []string{id}
	}
	var worst error
	for _, id := range ids {
		made, err := apiclient.Send[apiclient.Answer[api.JobGroup]](ctx, c, apiclient.Request{Method: http.MethodPost, Path: []string{"jobs", id, "rollback"}})
		if err == nil {
			err = a.startedGroup(ctx, c, made, cmd.Watch, cmd.JSON)
		}
		worst = errors.Join(worst, err)
	}
	return firstExit(worst)
}

type firmwareUnbarCmd struct {
	Device string `device:"name" arg:"" help:"Id or name of the device."`
	clientFlags
}

// Run lifts the bar of a device.
func (cmd *firmwareUnbarCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	_, err := apiclient.Send[struct{}](ctx, c, apiclient.Request{Method: http.MethodDelete, Path: []string{"devices", cmd.Device, "firmware", "bar"}})
	return a.change(cmd.Device, "may get firmware again", err)
}
