package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"fleetd/internal/goldentest"
)

// docs/reference/commands.md is what the program has.
func TestReference(t *testing.T) {
	parser, err := newParser(commandsFor(nil))
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	b.WriteString("# Commands\n\nGenerated from the program by `make reference`; do not edit.\n\n" +
		"Client commands find a node on the same machine through `--data-dir`, any other through `--api URL` and `--token` (`FLEETD_API`, `FLEETD_TOKEN`). " +
		"`--json` prints the server's JSON, of a list one object per line; errors are then JSON on standard error, too.\n\n" +
		"Exit status: 0 ok, 1 wrong usage, 2 refused or offline, 3 the tool failed on the device, 4 timeout, 78 wrong settings of `serve`, 130 interrupted.\n")
	for _, n := range parser.Model.Children {
		describeCommand(&b, n)
	}
	goldentest.Compare(t, "../../docs/reference/commands.md", b.Bytes())
}

// describeCommand writes a command and those below it.
func describeCommand(b *bytes.Buffer, n *kong.Node) {
	if n.Hidden {
		return
	}
	if len(n.Children) == 0 || n.DefaultCmd != nil {
		shown := n
		if n.DefaultCmd != nil {
			shown = n.DefaultCmd
		}
		usage := "fleetd " + strings.TrimPrefix(n.Path(), "fleetd ")
		for _, p := range shown.Positional {
			usage += " " + p.Summary()
		}
		fmt.Fprintf(b, "\n## `%s`\n\n%s\n", usage, n.Help)
		if n.Name == "serve" {
			b.WriteString("\nFlags: [settings.md](settings.md).\n")
			return
		}
		describeFlags(b, shown)
	}
	for _, child := range n.Children {
		if child != n.DefaultCmd {
			describeCommand(b, child)
		}
	}
}

// describeFlags writes the arguments and flags of a command, but those that every client command has.
func describeFlags(b *bytes.Buffer, n *kong.Node) {
	var rows []string
	for _, p := range n.Positional {
		if p.Help != "" {
			rows = append(rows, fmt.Sprintf("`%s` | %s", p.Name, p.Help))
		}
	}
	for _, f := range n.Flags {
		if f.Hidden || f.Name == "help" || f.Group != nil && f.Group.Key == "Node" {
			continue
		}
		rows = append(rows, fmt.Sprintf("`%s` | %s", f.String(), f.Help))
	}
	if len(rows) == 0 {
		return
	}
	b.WriteString("\n| argument or flag | meaning |\n|---|---|\n")
	for _, row := range rows {
		name, help, _ := strings.Cut(strings.ReplaceAll(row, "\n", " "), " | ")
		fmt.Fprintf(b, "| %s | %s |\n", strings.ReplaceAll(name, "|", `\|`), strings.ReplaceAll(help, "|", `\|`))
	}
}
