package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

type policyCmd struct {
	Show     policyShowCmd     `cmd:"" default:"withargs" help:"Show the rules in force (the default)."`
	Set      policySetCmd      `cmd:"" help:"Replace the rules by those of a file."`
	Explain  policyExplainCmd  `cmd:"" help:"Say which rule decides about a call, without making it."`
	Versions policyVersionsCmd `cmd:"" help:"List the versions of the rules."`
}

type policyShowCmd struct {
	jsonFlags `set:"json=the document, as policy set takes it"`
}

// policyView is as much of the document as is shown.
type policyView struct {
	Version int64     `json:"version"`
	Changed time.Time `json:"changed"`
	By      string    `json:"by"`
	Rules   []struct {
		Name, Action     string
		Tools, Keys, Via []string
		Devices          api.Selection
	} `json:"rules"`
	Reads []struct {
		Tools   []string
		Devices api.Selection
		TTL     string
	} `json:"reads"`
	URLs []struct {
		Tools, Prefixes []string
	} `json:"urls"`
	AuditArguments []string `json:"audit_arguments"`
}

// Run prints the rules.
func (cmd *policyShowCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return printAnswer(ctx, a, c, cmd.JSON, a.printPolicy, nil, "policy")
}

func (a *app) printPolicy(p policyView) error {
	w := a.stdout
	switch {
	case p.By != "":
		fmt.Fprintf(w, "version %d, written %s by %s\n", p.Version, p.Changed.UTC().Format(time.RFC3339), cleantext.Line(p.By))
	default:
		fmt.Fprintf(w, "version %d\n", p.Version)
	}
	any := func(list []string) string { return cmp.Or(strings.Join(list, ","), "any") }
	rows := [][]string{{"RULE", "ACTION", "TOOLS", "DEVICES", "KEYS", "VIA"}}
	for _, r := range p.Rules {
		rows = append(rows, []string{r.Name, r.Action, any(r.Tools), cmp.Or(r.Devices.String(), "all"), any(r.Keys), any(r.Via)})
	}
	if len(rows) == 1 {
		fmt.Fprintln(w, "no rules of your own; the built-in ones hold")
	} else if err := a.table(w, "", rows); err != nil {
		return err
	}
	for _, r := range p.Reads {
		fmt.Fprintf(w, "reads  %s  devices %s  kept for %s\n", cleantext.Line(any(r.Tools)), cleantext.Line(cmp.Or(r.Devices.String(), "all")), cleantext.Line(cmp.Or(r.TTL, "0s")))
	}
	for _, u := range p.URLs {
		fmt.Fprintf(w, "urls   %s  %s\n", cleantext.Line(any(u.Tools)), cleantext.Line(strings.Join(u.Prefixes, " ")))
	}
	if len(p.AuditArguments) > 0 {
		fmt.Fprintf(w, "arguments kept in the audit: %s\n", cleantext.Line(any(p.AuditArguments)))
	}
	return nil
}

type policySetCmd struct {
	File string `arg:"" help:"File with the rules as JSON; - is standard input."`
	jsonFlags
}

// maxPolicyFile is more than a server takes.
const maxPolicyFile = 1 << 20

// Run replaces the rules. A document that names the version it was made from is checked against the one in force; else
// the one in force a moment ago is meant.
func (cmd *policySetCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	in, err := input(a.stdin, cmd.File)
	if err != nil {
		return failed("read the policy: %w", err)
	}
	defer in.Close()
	text, err := io.ReadAll(io.LimitReader(in, maxPolicyFile))
	if err != nil {
		return failed("read the policy: %w", err)
	}
	var given struct {
		Version *int64 `json:"version"`
	}
	if err := json.Unmarshal(text, &given); err != nil {
		return failed("the policy is not JSON: %w", err)
	}
	if given.Version == nil {
		current, err := apiclient.Get[policyView](ctx, c, nil, "policy")
		if err != nil {
			return err
		}
		given.Version = &current.Version
	}
	document, err := c.SetPolicy(ctx, text, *given.Version)
	if err != nil {
		return err
	}
	if cmd.JSON {
		return printJSON(a.stdout, document)
	}
	var p struct {
		policyView
		Warnings []string `json:"warnings"`
	}
	if err := json.Unmarshal(document, &p); err != nil {
		return fmt.Errorf("the server's answer is not a policy: %w", err)
	}
	for _, warning := range p.Warnings {
		fmt.Fprintf(a.stderr, "warning: %s; check the spelling, or go on if the tool is still to come\n", warning)
	}
	fmt.Fprintf(a.stdout, "version %d with %d rules is in force\n", p.Version, len(p.Rules))
	return nil
}

type policyExplainCmd struct {
	Key    string   `arg:"" help:"Id or name of an API key; or admin (the admin token), open (no authentication), voice or gateway."`
	Device string   `device:"name" arg:"" help:"Id or name of the device."`
	Tool   string   `arg:"" help:"Name of the tool."`
	Values []string `arg:"" optional:"" name:"key=value" help:"Arguments; key:=JSON passes JSON as it is."`
	Via    string   `help:"How the call arrives: rest, raw, nats, gateway, voice, mcp or job." default:"rest" placeholder:"WAY"`
	jsonFlags
}

// Run prints which rule decides.
func (cmd *policyExplainCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	arguments, err := guessedArguments("", cmd.Values)
	if err != nil {
		return err
	}
	query := apiclient.Query{"key": cmd.Key, "device": cmd.Device, "tool": cmd.Tool, "via": cmd.Via}
	if len(cmd.Values) > 0 {
		query["arguments"] = string(arguments)
	}
	return printAnswer(ctx, a, c, cmd.JSON, a.printDecision, query, "policy", "explain")
}

// decision is what would become of a call.
type decision struct {
	Action, Rule, Detail string
	Steps                []struct{ Rule, Action, Verdict, Why string }
	Shared               bool
	TTL                  string
}

func (a *app) printDecision(x decision) error {
	fmt.Fprintf(a.stdout, "%s by %s\n", cleantext.Line(x.Action), cleantext.Line(x.Rule))
	if x.Detail != "" {
		fmt.Fprintln(a.stdout, cleantext.Line(x.Detail))
	}
	if x.Shared {
		fmt.Fprintf(a.stdout, "identical calls at the same time share one answer, which is kept for %s\n", cleantext.Line(cmp.Or(x.TTL, "0s")))
	}
	rows := [][]string{{"RULE", "ACTION", "VERDICT", "WHY"}}
	for _, step := range x.Steps {
		rows = append(rows, []string{step.Rule, cmp.Or(step.Action, "-"), step.Verdict, cmp.Or(step.Why, "-")})
	}
	return aligned(a.stdout, "", rows, 0)
}

type policyVersionsCmd struct {
	listFlags `set:"per=, one version per line"`
}

// Run lists the versions.
func (cmd *policyVersionsCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return printList(ctx, a, a.stdout, c, cmd.listFlags, []string{"VERSION", "CHANGED", "BY", "RULES"}, "the rules were never changed", func(v api.PolicyVersion) []string {
		return []string{strconv.FormatInt(v.Version, 10), v.Changed.UTC().Format(time.RFC3339), cmp.Or(v.By, "-"), strconv.Itoa(v.Rules)}
	}, nil, "policy", "versions")
}
