package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/audit"
	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
	"fleetd/internal/config"
	"fleetd/internal/node"
)

type auditCmd struct {
	Show   auditShowCmd   `cmd:"" default:"withargs" help:"Show entries, the newest last (the default)."`
	Export auditExportCmd `cmd:"" help:"Write the audit to a new file, with the proof that it is complete."`
	Verify auditVerifyCmd `cmd:"" help:"Look for gaps and changes, in the audit of the node or in an exported file."`
}

// spanFlags select a time.
type spanFlags struct {
	Since string `help:"Only entries since then: a duration before now such as 1h, a date or a time." placeholder:"1h|TIME"`
	Until string `help:"Only entries until then: a duration before now such as 1h, a date or a time." placeholder:"1h|TIME"`
}

func (f spanFlags) filter(a *app) (apiclient.Query, error) {
	filter := apiclient.Query{}
	for _, side := range [][2]string{{"since", f.Since}, {"until", f.Until}} {
		var err error
		if filter[side[0]], err = timeParameter("--"+side[0], side[1], a.now()); err != nil {
			return nil, err
		}
	}
	return filter, nil
}

type auditShowCmd struct {
	spanFlags
	Device    string `device:"former" help:"Only entries of this device." placeholder:"DEVICE"`
	Key       string `help:"Only entries of this key, by id or name; or of admin, open, voice or gateway." placeholder:"KEY"`
	Kind      string `help:"Only entries of this kind: call, message, device, key, policy, refusal, run, credential." placeholder:"KIND"`
	Tool      string `help:"Only calls of this tool, or other actions of this name, such as the type of a message." placeholder:"TOOL"`
	Outcome   string `help:"Only entries with this outcome, such as ok or tool_denied." placeholder:"OUTCOME"`
	Limit     int    `help:"Maximum number of entries, the newest ones." default:"100"`
	Follow    bool   `short:"f" help:"Print further entries as they come."`
	jsonFlags `set:"per=, one entry per line"`
}

// Run prints entries.
func (cmd *auditShowCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	filter, err := cmd.filter(a)
	if err != nil {
		return err
	}
	if cmd.Limit < 1 {
		return failed("--limit must be above zero, not %d", cmd.Limit)
	}
	maps.Copy(filter, apiclient.Query{"device": cmd.Device, "key": cmd.Key, "kind": cmd.Kind, "action": cmd.Tool, "outcome": cmd.Outcome,
		"limit": strconv.Itoa(min(cmd.Limit, 999) + 1)}) // reports whether there are more
	seen := make(map[string]int64) // the highest number of each run
	begun := a.now()
	for first := true; ; first = false {
		entries, cut, err := cmd.fresh(ctx, c, filter, seen, first, begun)
		if err != nil {
			if cmd.Follow && ctx.Err() != nil {
				return nil
			}
			return err
		}
		if cut {
			fmt.Fprintf(a.stderr, "fleetd: only the newest %d entries; --limit shows more, and --until older ones\n", cmd.Limit)
		}
		for _, e := range slices.Backward(entries) {
			seen[e.Value.Run] = max(seen[e.Value.Run], e.Value.Seq)
			if err := cmd.print(a.stdout, e); err != nil {
				return failed("write: %w", err)
			}
		}
		if !cmd.Follow {
			return nil
		}
		if !clock.Sleep(ctx, a.refresh) {
			return nil
		}
	}
}

// maxKnown is how many entries in a row that were shown already end the look for others: those of several nodes come
// in any order.
const maxKnown = 500

// fresh returns what was not shown yet, newest first: at most the limit the first time, with whether there is more,
// everything later. Of a run that
// did not show up the first time, only what happened since is news.
func (cmd *auditShowCmd) fresh(ctx context.Context, c *apiclient.Client, filter apiclient.Query, seen map[string]int64, first bool, begun time.Time) (entries []apiclient.Answer[api.AuditEntry], cut bool, err error) {
	known := 0
	if !first {
		filter["limit"] = strconv.Itoa(maxKnown)
	}
	for e, err := range apiclient.List[apiclient.Answer[api.AuditEntry]](ctx, c, filter, "audit") {
		if err != nil {
			return nil, false, err
		}
		if first && len(entries) == cmd.Limit {
			return entries, true, nil
		}
		if last, met := seen[e.Value.Run]; !first && (e.Value.Seq <= last || !met && e.Value.At.Before(begun)) {
			if known++; known == maxKnown {
				break
			}
			continue
		}
		known = 0
		entries = append(entries, e)
	}
	return entries, false, nil
}

func (cmd *auditShowCmd) print(w io.Writer, answer apiclient.Answer[api.AuditEntry]) error {
	if cmd.JSON {
		return printJSONLine(w, answer.Raw)
	}
	e := answer.Value
	text := cleantext.Line(e.Outcome)
	if e.Rule != "" {
		text += " by " + cleantext.Line(e.Rule)
	}
	if e.Count > 0 {
		text += " ×" + strconv.FormatInt(e.Count, 10)
	}
	if e.Duration > 0 {
		text += " " + time.Duration(e.Duration).Round(time.Millisecond/10).String()
	}
	if e.Detail != "" {
		text += "  " + cleantext.Line(e.Detail)
	}
	_, err := fmt.Fprintf(w, "%s  %-8s  %-17s  %-16s  %-7s  %s  %s\n", e.At.UTC().Format("2006-01-02T15:04:05.000Z"), cleantext.Line(e.Kind), cmp.Or(cleantext.Line(e.Device), "-"),
		cmp.Or(cleantext.Line(e.Name), cleantext.Line(e.Key), "-"), cmp.Or(cleantext.Line(e.Via), "-"), cleantext.Line(e.Action), text)
	return err
}

type auditExportCmd struct {
	File string `arg:"" help:"File to write; - is standard output."`
	spanFlags
	clientFlags
}

// Run copies the record. A file that is not whole does not stay.
func (cmd *auditExportCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	filter, err := cmd.filter(a)
	if err != nil {
		return err
	}
	export := func(w io.Writer) (int64, error) { return c.Download(ctx, w, filter, "audit", "export") }
	if cmd.File == "-" {
		_, err := export(a.stdout)
		return err
	}
	f, err := os.OpenFile(cmd.File, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return failed("write the export: %w", err)
	}
	n, err := export(f)
	if closeErr := f.Close(); err == nil && closeErr != nil {
		err = failed("write the export: %w", closeErr)
	}
	if err != nil {
		_ = os.Remove(cmd.File) // the error that led here has the cause
		return err
	}
	fmt.Fprintf(a.stdout, "%s: %d bytes\n", cmd.File, n)
	return nil
}

type auditVerifyCmd struct {
	jsonFlags  `set:"json=the report as JSON"`
	File       string  `arg:"" optional:"" help:"An exported file, or - for standard input; without it, the node verifies its own audit."`
	SecretFile *string `help:"File with the fleet's secret, to verify an exported file where there is no data directory of a node ($FLEETD_SECRET_FILE, $FLEETD_SECRET)." placeholder:"FILE"`
	spanFlags
}

// key is the fleet's, from the secret of the node whose settings these are.
func (cmd *auditVerifyCmd) key(a *app) ([]byte, error) {
	given := map[string]string{"data-dir": config.LoadClient(config.Client(cmd.clientFlags), a.environ).DataDir}
	if cmd.SecretFile != nil {
		given["secret-file"] = *cmd.SecretFile
	}
	cfg, err := config.Load(given, a.environ)
	if err != nil {
		return nil, exitError{err, exitFailed}
	}
	key, err := node.AuditKey(cfg)
	if err != nil {
		return nil, exitError{err, exitFailed}
	}
	return key, nil
}

// Run looks for gaps. A file is checked here, so that the node that exported it need not be trusted.
func (cmd *auditVerifyCmd) Run(ctx context.Context, a *app) error {
	report, err := cmd.report(ctx, a)
	if err != nil {
		return err
	}
	if cmd.JSON {
		err = printValue(a.stdout, report)
	} else {
		printReport(a.stdout, report)
	}
	if err == nil && !report.Intact {
		err = failed("the audit log is incomplete or was modified")
	}
	return err
}

func printReport(w io.Writer, report api.AuditReport) {
	fmt.Fprintf(w, "%d entries in %d blocks of %d runs\n", report.Entries, report.Blocks, report.Runs)
	if report.Headless > 0 {
		fmt.Fprintf(w, "%d runs begin before this part of the audit\n", report.Headless)
	}
	if report.Dropped > 0 {
		fmt.Fprintf(w, "%d entries were dropped while the database was away, as the nodes recorded\n", report.Dropped)
	}
	for _, run := range report.Unended {
		fmt.Fprintf(w, "no end: %s\n", cleantext.Line(run))
	}
	for _, fault := range report.Faults {
		fmt.Fprintf(w, "fault: %s\n", cleantext.Line(fault))
	}
	if report.Intact {
		fmt.Fprintln(w, "nothing is missing between the blocks, and none was changed")
	}
}

func (cmd *auditVerifyCmd) report(ctx context.Context, a *app) (report api.AuditReport, err error) {
	if cmd.File == "" {
		filter, err := cmd.filter(a)
		if err != nil {
			return report, err
		}
		c, err := cmd.client(a)
		if err != nil {
			return report, err
		}
		return apiclient.Send[api.AuditReport](ctx, c, apiclient.Request{Path: []string{"audit", "verify"}, Query: filter, Timeout: apiclient.BulkTimeout})
	}
	in, err := input(a.stdin, cmd.File)
	if err != nil {
		return report, failed("read the export: %w", err)
	}
	defer in.Close()
	key, err := cmd.key(a)
	if err != nil {
		return report, err
	}
	v := audit.Verifier{Key: key}
	if err := audit.ReadExport(in, func(b *audit.Block) error { v.Add(b); return nil }); err != nil {
		return report, failed("%s: %w", cmd.File, err)
	}
	if v.NeedsKey() {
		return report, failed("%s is hashed under the fleet's secret; run this with the --data-dir of a node, or with --secret-file", cmd.File)
	}
	return v.Report(), nil
}
