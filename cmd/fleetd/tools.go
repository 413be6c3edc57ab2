package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

type toolsCmd struct {
	Device string `device:"name" arg:"" help:"Id or name of the device."`
	User   bool   `help:"Also list the tools that are only for the user of the device, not for language models."`
	jsonFlags
}

// Run prints the tools, each with its arguments.
func (t *toolsCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	query := apiclient.Query{}
	if t.User {
		query["user"] = "true"
	}
	return printAnswer(ctx, a, c, t.JSON, a.printTools, query, "devices", t.Device, "tools")
}

func (a *app) printTools(list api.ToolList) error {
	if note := stateNote(list); note != "" {
		fmt.Fprintln(a.stderr, "fleetd: "+note)
	}
	for i, raw := range list.Items {
		if i > 0 {
			fmt.Fprintln(a.stdout)
		}
		if err := printTool(a, raw); err != nil {
			return err
		}
	}
	return nil
}

// stateNote explains why a list may not be what the device has now.
func stateNote(list api.ToolList) string {
	switch list.State {
	case "stale":
		return "these tools are known from before; the device has not confirmed them on its present connection"
	case "unknown":
		return "the tools of this device are not known yet"
	case "none":
		return "this device does not speak MCP"
	case "error":
		return "the tools of this device could not be read"
	}
	if list.Partial {
		return "the device's list could not be read to its end; it may have more tools than these, and they can be called"
	}
	if len(list.Items) == 0 {
		return "this device has no tools"
	}
	return ""
}

func printTool(a *app, raw json.RawMessage) error {
	var t tool
	if err := json.Unmarshal(raw, &t); err != nil {
		// A tool that cannot be shown must not hide the others.
		fmt.Fprintf(a.stdout, "(unreadable) %s\n", cleantext.Line(string(raw)))
		return nil
	}
	heading := cleantext.Line(t.Name)
	if t.userOnly() {
		heading += "  (user only)"
	}
	fmt.Fprintln(a.stdout, heading)
	if line, _, _ := strings.Cut(strings.TrimSpace(t.Description), "\n"); line != "" {
		fmt.Fprintln(a.stdout, "    "+cleantext.Line(line))
	}
	var rows [][]string
	for _, p := range t.InputSchema.Properties {
		need := "optional"
		switch {
		case p.Default != nil:
			need = "default " + compact(p.Default)
		case slices.Contains(t.InputSchema.Required, p.name):
			need = "required"
		}
		rows = append(rows, []string{p.name, cmp.Or(strings.Join(p.Type, "|"), "any"), cmp.Or(limits(p), "-"), need, p.Description})
	}
	return aligned(a.stdout, "    ", rows, 0)
}

// limits words what values an argument takes.
func limits(p property) string {
	switch {
	case p.Enum != nil:
		return "one of " + compact(p.Enum)
	case p.Minimum != nil && p.Maximum != nil:
		return compact(p.Minimum) + ".." + compact(p.Maximum)
	case p.Minimum != nil:
		return "from " + compact(p.Minimum)
	case p.Maximum != nil:
		return "up to " + compact(p.Maximum)
	}
	return ""
}

// compact writes a JSON value on one line, shortened to what a table has room for.
func compact(raw json.RawMessage) string {
	var out bytes.Buffer
	if err := json.Compact(&out, raw); err != nil {
		return cleantext.Line(string(raw))
	}
	runes := []rune(out.String())
	if len(runes) > 60 {
		return string(runes[:57]) + "..."
	}
	return string(runes)
}
