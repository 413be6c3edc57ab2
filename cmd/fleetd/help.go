package main

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"fleetd/internal/config"
	"fleetd/internal/timespan"
)

// normalized returns the arguments as the parser has them, where people expect other forms: `fleetd help call` for
// `fleetd call --help`, and `fleetd --version`.
func normalized(args []string) []string {
	switch {
	case len(args) > 0 && args[0] == "help":
		return append(append([]string{}, args[1:]...), "--help")
	case len(args) == 1 && args[0] == "--version":
		return []string{"version"}
	}
	return args
}

// printHelp also says, for a command with a default, where the flags of the default are.
func printHelp(options kong.HelpOptions, command *kong.Context) error {
	err := kong.DefaultHelpPrinter(options, command)
	if n := command.Selected(); err == nil && n != nil && n.DefaultCmd != nil {
		_, err = fmt.Fprintf(command.Stdout, "\nRun \"%s --help\" for the arguments and flags of %s alone.\n", n.DefaultCmd.FullPath(), n.FullPath())
	}
	return err
}

// durations makes flags of type time.Duration take days, too.
func durations() kong.Option {
	return kong.TypeMapper(reflect.TypeFor[time.Duration](), kong.MapperFunc(func(c *kong.DecodeContext, target reflect.Value) error {
		var text string
		if err := c.Scan.PopValueInto("duration", &text); err != nil {
			return err
		}
		d, err := timespan.Parse(text)
		if err != nil {
			return fmt.Errorf("expected a duration such as 90s, 12h or 30d, not %q", text)
		}
		target.SetInt(int64(d))
		return nil
	}))
}

// numbers makes integer flags take decimal numbers from 0, and say so.
func numbers(kind reflect.Kind) kong.Option {
	return kong.KindMapper(kind, kong.MapperFunc(func(c *kong.DecodeContext, target reflect.Value) error {
		text := c.Scan.Pop().String() // also of one that begins like a flag
		n, err := strconv.ParseUint(text, 10, 63)
		if err != nil {
			return fmt.Errorf("expected a whole number, not %q", text)
		}
		target.SetInt(int64(n))
		return nil
	}))
}

// endsEarly matches what the parser says about a flag without its value at the end of the command line.
var endsEarly = regexp.MustCompile(`expected \w+ value but got "EOL" \(<EOL>\)|expected a whole number, not "EOL"`)

// usedCommand returns the command, as it is typed, whose help says what the parser expected.
func usedCommand(err error) string {
	parse := (*kong.ParseError)(nil)
	if !errors.As(err, &parse) {
		return "fleetd"
	}
	used := parse.Context.Model.Node
	for _, step := range parse.Context.Path {
		if step.Command != nil {
			used = step.Command
		}
	}
	switch ofFlag := strings.Contains(err.Error(), "--"); {
	case ofFlag && used.DefaultCmd != nil:
		used = used.DefaultCmd
	case !ofFlag && used.Parent != nil && used == used.Parent.DefaultCmd:
		used = used.Parent // whose commands the argument may have meant
	}
	return used.FullPath()
}

// nodeFlags say which node is meant.
var nodeFlags = []string{"data-dir", "api", "token"}

// repeated returns the name of a flag that is given twice and takes one value, of which one would be lost; empty
// without one. The last counts for settings of a node and for which node is meant: scripts put theirs in front of what
// their caller gives.
func repeated(command *kong.Context) string {
	if selected := command.Selected(); selected == nil || selected.Name == "serve" {
		return ""
	}
	var given []*kong.Flag
	for _, p := range command.Path {
		if p.Flag == nil || p.Flag.IsCumulative() || slices.Contains(nodeFlags, p.Flag.Name) {
			continue
		}
		if slices.Contains(given, p.Flag) {
			return p.Flag.Name
		}
		given = append(given, p.Flag)
	}
	return ""
}

// suggestion completes the error about a command that does not exist by the nearest that does; empty without one.
func suggestion(root *kong.Node, args []string) string {
	if len(args) == 0 || strings.HasPrefix(args[0], "-") {
		return ""
	}
	best, least := "", 3 // two slips at most
	for _, command := range root.Children {
		if command.Name == args[0] {
			return "" // the mistake is elsewhere
		}
		if d := config.Distance(args[0], command.Name); d < least && d < len(command.Name) {
			best, least = command.Name, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(", did you mean %q?", best)
}
