package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

// Exit statuses of explain.
const (
	exitCause   = statusError(3)
	exitUnknown = statusError(4)
)

// statusError is the exit status of a command that has printed its answer.
type statusError int

func (e statusError) Error() string { return "exit status " + strconv.Itoa(int(e)) }

// shownDevices limits the devices that `explain --offline` names for each cause.
const shownDevices = 5

// callID matches the ids of calls.
var callID = regexp.MustCompile(`^[a-z2-7]{16}$`)

type explainCmd struct {
	Target  string `arg:"" optional:"" name:"device|call" help:"Id or name of a device, or the id of a call."`
	Offline bool   `help:"All devices that are offline, grouped by cause." xor:"what"`
	Select  string `help:"With --offline: only these devices, such as room=lab." placeholder:"SELECT"`
	Unknown bool   `name:"strangers" help:"OTA checks and connections of devices that do not belong to this fleet." xor:"what"`
	jsonFlags
}

// Run prints the explanation of a device, of a call, or of all devices that are offline.
func (cmd *explainCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	switch {
	case cmd.Offline == (cmd.Target != "") && !cmd.Unknown, cmd.Unknown && cmd.Target != "":
		return failed("give one of these: a device id, a call id, --offline or --strangers")
	case cmd.Select != "" && !cmd.Offline:
		return failed("--select works only with --offline; add --offline, or leave --select out")
	case cmd.Unknown:
		return printLog(ctx, a, c, cmd.JSON, true, apiclient.Query{"limit": "1000"}, "refusals")
	case cmd.Offline:
		return cmd.offline(ctx, a, c)
	}
	if !callID.MatchString(cmd.Target) {
		var err error
		if cmd.Target, err = deviceID(ctx, c, cmd.Target, true); err != nil { // a device that is not of this fleet has an explanation, too
			return err
		}
	}
	e, err := explain(ctx, c, cmd.Target)
	if err != nil {
		return err
	}
	if cmd.JSON {
		err = printJSON(a.stdout, e.Raw)
	} else {
		err = printExplanation(a, e.Value)
	}
	return cmp.Or(err, statusOf(e.Value.Well, e.Value.Cause))
}

// statusOf returns the exit status of an explanation; nil if nothing is wrong.
func statusOf(well bool, cause string) error {
	switch {
	case well:
		return nil
	case cause == "unknown":
		return exitUnknown
	}
	return exitCause
}

// explain requests the explanation of a call if target has the form of a call id and the server knows that call, else
// that of a device.
func explain(ctx context.Context, c *apiclient.Client, target string) (apiclient.Answer[api.Why], error) {
	why := func(kind string) (apiclient.Answer[api.Why], error) {
		return apiclient.Get[apiclient.Answer[api.Why]](ctx, c, nil, kind, target, "explain")
	}
	if callID.MatchString(target) {
		e, err := why("calls")
		var problem *apiclient.Problem
		if !errors.As(err, &problem) || problem.Code != "not_found" {
			return e, err
		}
		if d, deviceErr := why("devices"); deviceErr == nil && d.Value.State != "unknown" {
			return d, nil
		}
		return e, err
	}
	return why("devices")
}

func printExplanation(a *app, e api.Why) error {
	certain := ""
	if !e.Certain {
		certain = " (not certain, but the best fit)"
	}
	what := "Device " + e.Device
	if e.Call != "" {
		what = "Call " + e.Call + " to " + e.Device
	}
	fmt.Fprintf(a.stdout, "%s is %s: %s%s\n%s\n", cleantext.Line(what), cleantext.Line(e.State), cleantext.Line(e.Cause), certain, cleantext.Line(e.Sentence))
	var rows [][]string
	for i, x := range e.Evidence {
		name := ""
		if i == 0 {
			name = "Evidence"
		}
		rows = append(rows, []string{name, x.At.UTC().Format(time.RFC3339), x.Kind, x.Text, "(node " + x.Node + ")"})
	}
	if err := aligned(a.stdout, "", rows, 0); err != nil {
		return err
	}
	for i, text := range e.Next {
		if i == 0 {
			fmt.Fprintln(a.stdout, "What to do")
		}
		fmt.Fprintf(a.stdout, "  %d. %s\n", i+1, cleantext.Line(text))
	}
	return printReach(a, e.Reach, e.Missing)
}

// printReach prints since when each node has recorded, and which nodes are missing from an answer.
func printReach(a *app, reach []api.Reach, missing []string) error {
	var parts []string
	for _, r := range reach {
		parts = append(parts, "on node "+r.Node+" at "+r.Since.UTC().Format(time.RFC3339))
	}
	if len(parts) > 0 {
		fmt.Fprintln(a.stdout, cleantext.Line("The device log begins "+strings.Join(parts, ", ")))
	}
	for _, m := range missing {
		fmt.Fprintln(a.stdout, cleantext.Line(m+" did not answer: its records are missing"))
	}
	return nil
}

// causeGroup is a cause with the devices that have it.
type causeGroup struct {
	api.OfflineCause
	count int
}

// offline explains all devices that are offline, a page at a time, and groups them by cause. Of each cause it keeps only
// the count and a few devices, so that its memory does not grow with the fleet.
func (cmd *explainCmd) offline(ctx context.Context, a *app, c *apiclient.Client) error {
	groups := map[string]*causeGroup{}
	var missing []string
	done := 0
	next := func(page apiclient.Answer[api.OfflineCauses]) string { return page.Value.NextCursor }
	for answer, err := range apiclient.Pages(ctx, c, next, apiclient.Query{"select": cmd.Select}, "explain") {
		if err == nil && cmd.JSON {
			err = printJSONLine(a.stdout, answer.Raw)
		}
		if err != nil {
			return err
		}
		page := answer.Value
		for _, g := range page.Groups {
			group := groups[g.Cause]
			if group == nil {
				group = &causeGroup{OfflineCause: g}
				group.Devices = nil
				groups[g.Cause] = group
			}
			group.count += g.Count
			group.Devices = append(group.Devices, g.Devices[:min(len(g.Devices), shownDevices-len(group.Devices))]...)
		}
		for _, node := range page.Missing {
			if !slices.Contains(missing, node) {
				missing = append(missing, node)
			}
		}
		if done += page.Explained; a.interactive && page.NextCursor != "" {
			fmt.Fprintf(a.stderr, "\r%d devices", done)
		}
	}
	if a.interactive && done > 0 {
		fmt.Fprint(a.stderr, "\r\x1b[K")
	}
	var status error
	for _, g := range groups {
		if s := statusOf(g.Well, g.Cause); status == nil || s == exitUnknown {
			status = s
		}
	}
	if cmd.JSON {
		return status
	}
	return cmp.Or(printGroups(a, groups), printReach(a, nil, missing), status)
}

func printGroups(a *app, groups map[string]*causeGroup) error {
	if len(groups) == 0 {
		_, err := fmt.Fprintln(a.stdout, "no offline devices")
		return err
	}
	rows := [][]string{{"CAUSE", "DEVICES", "WHICH", "WHAT TO DO"}}
	for _, g := range slices.SortedFunc(maps.Values(groups), func(x, y *causeGroup) int {
		return cmp.Or(cmp.Compare(y.count, x.count), strings.Compare(x.Cause, y.Cause))
	}) {
		ids := g.Devices
		if g.count > len(ids) {
			ids = append(ids, "...")
		}
		next := "-"
		if len(g.Next) > 0 {
			next = g.Next[0]
		}
		rows = append(rows, []string{g.Cause, strconv.Itoa(g.count), strings.Join(ids, " "), next})
	}
	return a.table(a.stdout, "", rows)
}

type logCmd struct {
	Device string `device:"name" arg:"" help:"Id or name of the device."`
	Kind   string `help:"Only entries of this kind, such as closed or call." placeholder:"KIND"`
	Before string `help:"Only entries before then: a duration before now such as 1h, a date or a time." placeholder:"1h|TIME"`
	Cursor string `help:"Show the page after this one: the next_cursor that --json printed." placeholder:"CURSOR"`
	Limit  int    `default:"50" help:"Maximum number of entries, up to 1000."`
	jsonFlags
}

// Run prints the log of a device, newest entry first.
func (cmd *logCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	before, err := timeParameter("--before", cmd.Before, a.now())
	if err != nil {
		return err
	}
	query := apiclient.Query{"kind": cmd.Kind, "before": before, "cursor": cmd.Cursor, "limit": strconv.Itoa(cmd.Limit)}
	return printLog(ctx, a, c, cmd.JSON, false, query, "devices", cmd.Device, "log")
}

// printLog prints the log at a path.
func printLog(ctx context.Context, a *app, c *apiclient.Client, asJSON, devices bool, query apiclient.Query, path ...string) error {
	return printAnswer(ctx, a, c, asJSON, func(r api.Log) error { return logTable(a, r, devices) }, query, path...)
}

func logTable(a *app, r api.Log, devices bool) error {
	rows := [][]string{{"TIME", "NODE", "KIND", "CAUSE", "DETAIL"}}
	if devices {
		rows[0] = slices.Insert(rows[0], 2, "DEVICE")
	}
	for _, x := range r.Items {
		var parts []string
		for _, text := range []string{x.Tool, x.Text, x.Transport, x.Address, x.Call} {
			if text != "" {
				parts = append(parts, text)
			}
		}
		if x.DurationMS > 0 {
			parts = append(parts, (time.Duration(x.DurationMS) * time.Millisecond).String())
		}
		if x.Count > 1 {
			parts = append(parts, strconv.Itoa(x.Count)+" times")
		}
		row := []string{timeCell(x.At), x.Node, x.Kind, cmp.Or(x.Cause, "-"), strings.Join(parts, " ")}
		if devices {
			row = slices.Insert(row, 2, x.Device)
		}
		rows = append(rows, row)
	}
	if len(r.Items) == 0 {
		fmt.Fprintln(a.stdout, "no entries")
	} else if err := a.table(a.stdout, "", rows); err != nil {
		return err
	}
	return printReach(a, r.Reach, r.Missing)
}
