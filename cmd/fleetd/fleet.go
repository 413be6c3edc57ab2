package main

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

// shownValues is how many values of a dimension a summary shows.
const shownValues = 15

// otherValues is the name under which the server counts the remaining values of a dimension.
const otherValues = "other"

type fleetCmd struct {
	Select    string `arg:"" optional:"" name:"select" help:"Only devices of this selection, such as room=lab."`
	Since     string `help:"Show figures of the whole fleet over time instead of counts: since a duration before now such as 24h, a date or a time; at most 7 days." placeholder:"24h|TIME"`
	jsonFlags `set:"per=, with all values"`
}

// Run prints the counts, or the figures over time.
func (cmd *fleetCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if cmd.Since != "" {
		return cmd.history(ctx, a, c)
	}
	return printAnswer(ctx, a, c, cmd.JSON, a.printCounts, apiclient.Query{"select": cmd.Select}, "fleet")
}

func (a *app) printCounts(counts api.FleetCounts) error {
	head := devicesText(counts.Total)
	if !counts.AsOf.IsZero() {
		head += ", counted " + counts.AsOf.UTC().Format(time.RFC3339)
	}
	fmt.Fprintln(a.stdout, head)
	if counts.Total == 0 {
		return nil
	}
	var rows [][]string
	for _, dimension := range []struct {
		name   string
		values map[string]int64
	}{{"State", counts.State}, {"Offline reason", counts.OfflineReason}, {"Transport", counts.Transport}, {"Board", counts.Board},
		{"Firmware", counts.Firmware}, {"Node", counts.Node}, {"MCP state", counts.MCPState}} {
		name := dimension.name
		if name == "State" {
			rows = append(rows, stateRows(dimension.values)...)
			continue
		}
		for _, v := range frequent(dimension.values) {
			rows = append(rows, []string{name, v.text, strconv.FormatInt(v.devices, 10)})
			name = "" // once
		}
	}
	return a.table(a.stdout, "  ", rows)
}

// stateRows are the counts of states: online and offline are all devices, the others are counted beside these.
func stateRows(n map[string]int64) [][]string {
	rows := [][]string{{"State", "online", strconv.FormatInt(n["online"], 10)}, {"", "offline", strconv.FormatInt(n["offline"], 10)}}
	for _, beside := range []struct{ text, state string }{{"of these revoked", "revoked"}, {"waiting for approval", "pending"}, {"contested", "contested"}} {
		if n[beside.state] > 0 {
			rows = append(rows, []string{"", beside.text, strconv.FormatInt(n[beside.state], 10)})
		}
	}
	return rows
}

// valueCount is how many devices have a value.
type valueCount struct {
	text    string
	devices int64
}

// frequent returns the most frequent values, and at the end the sum of all others.
func frequent(values map[string]int64) []valueCount {
	var all []valueCount
	rest := values[otherValues]
	for text, n := range values {
		if text != otherValues {
			all = append(all, valueCount{cmp.Or(text, "(none)"), n})
		}
	}
	slices.SortFunc(all, func(a, b valueCount) int {
		return cmp.Or(cmp.Compare(b.devices, a.devices), cmp.Compare(a.text, b.text))
	})
	if len(all) > shownValues {
		for _, v := range all[shownValues:] {
			rest += v.devices
		}
		all = all[:shownValues]
	}
	if rest > 0 {
		all = append(all, valueCount{otherValues, rest})
	}
	return all
}

type changesCmd struct {
	Device    string `device:"former" arg:"" optional:"" help:"Only changes of this device."`
	Since     string `help:"Only changes since then: a revision, a duration before now such as 1h, a date or a time." placeholder:"REVISION|1h|TIME"`
	listFlags `set:"per=, one change per line"`
}

// Run prints the change log, oldest first.
func (cmd *changesCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	since := cmd.Since
	if _, err := strconv.ParseUint(since, 10, 63); since != "" && err != nil {
		at, err := moment(since, a.now(), -1)
		if err != nil {
			return failed("--since %w; it also takes a revision, which is a whole number", err)
		}
		since = at.UTC().Format(time.RFC3339Nano)
	}
	path := []string{"changes"}
	if cmd.Device != "" {
		path = []string{"devices", cmd.Device, "changes"}
	}
	changes := apiclient.List[apiclient.Answer[api.Change]](ctx, c, apiclient.Query{"since": since}, path...)
	if cmd.Device != "" { // the server lists the changes of one device newest first
		var err error
		if changes, err = reversed(changes); err != nil {
			return err
		}
	}
	for change, err := range first(changes, cmd.Limit) {
		if err != nil {
			return err
		}
		if cmd.JSON {
			err = printJSONLine(a.stdout, change.Raw)
		} else {
			err = printChange(a, change.Value)
		}
		if err != nil {
			return failed("write: %w", err)
		}
	}
	return nil
}

// reversed reads a list to its end and returns its items in reverse order.
func reversed[T any](list iter.Seq2[T, error]) (iter.Seq2[T, error], error) {
	all, err := apiclient.Collect(list)
	return func(yield func(T, error) bool) {
		for _, item := range slices.Backward(all) {
			if !yield(item, nil) {
				return
			}
		}
	}, err
}

func printChange(a *app, x api.Change) error {
	value := compact(x.Value)
	if len(x.Value) == 0 || value == "null" {
		value = "(removed)"
	}
	_, err := fmt.Fprintf(a.stdout, "%s  %-8d  %-17s  %-16s  %-16s  %s\n", x.At.UTC().Format("2006-01-02T15:04:05.000Z"), x.Revision,
		cmp.Or(cleantext.Line(x.Device), "-"), cmp.Or(cleantext.Line(x.Who), "-"), cleantext.Line(x.Aspect), cleantext.Line(value))
	return err
}
