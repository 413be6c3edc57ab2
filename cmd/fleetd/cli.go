package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
	"fleetd/internal/config"
)

// Exit statuses.
const (
	exitOK          = 0
	exitFailed      = 1 // wrong usage, or a node that could not start although its settings are right (else exitSettings)
	exitRefused     = 2 // refused, offline, not reachable
	exitTool        = 3 // the tool failed on the device
	exitTimeout     = 4
	exitInterrupted = 130
)

// app is what all commands share: their input and output, and what they know about the process.
type app struct {
	environ        []string
	stdin          io.Reader
	stdout, stderr io.Writer
	// interactive reports whether stdin and stderr are a terminal.
	interactive bool
	// open starts a browser.
	open func(link string) error
	now  func() time.Time
	// refresh is the pause between two requests of a command with --watch.
	refresh time.Duration
	// inContainer reports whether this process runs in a container.
	inContainer bool
	// columns is the width of the terminal in characters, 0 if it is unknown or stdout is not a terminal.
	columns int
	// jsonErrors reports whether errors are printed as JSON, for programs.
	jsonErrors bool
}

// commands is the command line.
type commands struct {
	Serve       serveCmd       `cmd:"" default:"withargs" help:"Run one node until SIGINT or SIGTERM (the default command)."`
	Devices     devicesCmd     `cmd:"" help:"List devices, show, edit, import or export them; approve, refuse, revoke, forget or rotate."`
	Fleet       fleetCmd       `cmd:"" help:"Count the devices by state, board, firmware and more; show figures over time."`
	Tools       toolsCmd       `cmd:"" help:"List the tools of a device."`
	Call        callCmd        `cmd:"" help:"Call a tool of a device."`
	Jobs        jobsCmd        `cmd:"" help:"Call a tool on many devices, later, repeatedly or at a pace; show and control jobs."`
	Queue       queueCmd       `cmd:"" help:"Show what waits for a device, and why."`
	Restart     restartCmd     `cmd:"" help:"Restart devices when they are idle."`
	Events      eventsCmd      `cmd:"" help:"Follow live events."`
	Explain     explainCmd     `cmd:"" help:"Show why a device is offline or has a problem, or why a call failed. Exit status 3: a cause was found; 4: the cause is unknown."`
	Log         logCmd         `cmd:"" help:"Show the device log: OTA checks, connections, failures and calls of a device."`
	Trace       traceCmd       `cmd:"" help:"Show the messages, calls and device-log entries of a device as they happen."`
	Webhooks    webhooksCmd    `cmd:"" help:"List, create, change, delete or try webhooks, which deliver events to your addresses."`
	Changes     changesCmd     `cmd:"" help:"Show the change log: who changed what, and when."`
	Photos      photosCmd      `cmd:"" help:"List, download or delete photos."`
	Console     consoleCmd     `cmd:"" help:"Open the web console with a one-time link."`
	MCP         mcpCmd         `cmd:"" name:"mcp" help:"Serve MCP on standard input and output, for LLM hosts that start a command."`
	Keys        keysCmd        `cmd:"" help:"Create, list, show or revoke API keys."`
	Secret      secretCmd      `cmd:"" help:"Rotate the fleet's secret, or the admin token."`
	Chips       chipsCmd       `cmd:"" help:"Import, list or remove chip keys; a device that proves to have one is admitted without approval."`
	Policy      policyCmd      `cmd:"" help:"Show, replace or explain the rules of the tool guard."`
	Audit       auditCmd       `cmd:"" help:"Show, export or verify the audit: who did what, and when."`
	Nodes       nodesCmd       `cmd:"" help:"List the nodes."`
	LogLevel    logLevelCmd    `cmd:"" name:"log-level" help:"Show or set how much a node logs."`
	Firmware    firmwareCmd    `cmd:"" help:"Show what firmware files are; store images, and show which devices could get them."`
	Doctor      doctorCmd      `cmd:"" help:"Show the OTA reply that a device gets, and settings with which devices cannot work."`
	Healthcheck healthcheckCmd `cmd:"" help:"Exit with 0 if the node is ready, else with 1 and the reason."`
	Backup      backupCmd      `cmd:"" help:"Back up a node's data directory and SQLite database, while it runs or not."`
	Restore     restoreCmd     `cmd:"" help:"Put a backup into an empty data directory."`
	Completion  completionCmd  `cmd:"" help:"Print a completion script for a shell."`
	Version     versionCmd     `cmd:"" help:"Print version, commit and Go version."`
}

// clientFlags are the flags of every command that talks to a node.
type clientFlags struct {
	DataDir string `help:"Data directory of the local node ($FLEETD_DATA_DIR)." placeholder:"./fleetd-data" group:"Node"`
	API     string `name:"api" help:"Base URL of a node's API, used instead of the data directory ($FLEETD_API)." placeholder:"URL" group:"Node"`
	Token   string `help:"Bearer token for the API ($FLEETD_TOKEN)." placeholder:"TOKEN" group:"Node"`
}

// jsonFlags are the flags of a command that can print JSON. The command's tag set says what that is (json=...), or completes the help (per=...).
type jsonFlags struct {
	JSON bool `name:"json" help:"Print ${json=the server's JSON}${per=}."`
	clientFlags
}

// listFlags are the flags of a command that prints a list.
type listFlags struct {
	Limit int `help:"Print only the first N." placeholder:"N"`
	jsonFlags
}

// client returns a client of the node that the flags name.
func (f clientFlags) client(a *app) (*apiclient.Client, error) {
	c := config.LoadClient(config.Client(f), a.environ)
	return apiclient.Discover(c.DataDir, c.API, c.Token)
}

// exitError is an error with an exit status that exitCode could not derive from the error itself.
type exitError struct {
	error
	code int
}

func (e exitError) Unwrap() error { return e.error }

// failed returns an error whose cause is the command line or this machine, not the server.
func failed(format string, args ...any) error {
	return exitError{fmt.Errorf(format, args...), exitFailed}
}

// run executes one command and returns its exit status.
func (a *app) run(ctx context.Context, args []string) int {
	if old, now := renamed(args); old != "" {
		return a.report(ctx, failed("`fleetd %s` is now `fleetd %s`, with the same arguments", old, now))
	}
	args = normalized(args)
	a.jsonErrors = slices.Contains(args, "--json") // before the parser, whose errors are then JSON, too
	helped := false
	parser, err := newParser(commandsFor(args),
		kong.Writers(a.stdout, a.stderr),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.Help(printHelp),
		kong.Exit(func(int) { helped = true }),
	)
	if err != nil {
		return a.report(ctx, failed("build the command line: %w", err))
	}
	command, err := parser.Parse(args)
	if helped {
		// kong goes on after it has printed the help, and may report missing arguments.
		return exitOK
	}
	if err != nil {
		return a.report(ctx, failed("%s%s (see %s --help)", endsEarly.ReplaceAllString(err.Error(), "expected a value"), suggestion(parser.Model.Node, args), usedCommand(err)))
	}
	if flag := repeated(command); flag != "" {
		return a.report(ctx, failed("--%s is given twice; give it once", flag))
	}
	command.BindTo(ctx, (*context.Context)(nil))
	err = command.BindToProvider(func() (*apiclient.Client, error) {
		selected := command.Selected().Target
		c, err := selected.Addr().Interface().(interface {
			client(a *app) (*apiclient.Client, error)
		}).client(a)
		if err != nil {
			return nil, err
		}
		return c, nameDevices(ctx, c, selected)
	})
	if err != nil {
		return a.report(ctx, failed("build the command line: %w", err))
	}
	return a.report(ctx, inWordsOf(command, command.Run(a)))
}

// commandsFor returns the command that the arguments name, else all of them. A parser of all takes longer to build than most commands take to run.
func commandsFor(args []string) any {
	all := &commands{Serve: newServeCmd()}
	for f, command := range reflect.ValueOf(all).Elem().Fields() {
		if name := cmp.Or(f.Tag.Get("name"), strings.ToLower(f.Name)); len(args) > 0 && args[0] == name {
			one := reflect.New(reflect.StructOf([]reflect.StructField{f}))
			one.Elem().Field(0).Set(command)
			return one.Interface()
		}
	}
	return all
}

// newParser returns the parser of a command line.
func newParser(cli any, options ...kong.Option) (*kong.Kong, error) {
	return kong.New(cli, append([]kong.Option{
		kong.Name("fleetd"),
		kong.Description("The control plane of a fleet of ESP32 devices that offer tools over MCP."),
		durations(),
		numbers(reflect.Int),
		numbers(reflect.Int64),
	}, options...)...)
}

// renamed returns the old and the new name of a command if the arguments begin with an old name, else empty strings.
func renamed(args []string) (old, now string) {
	switch {
	case len(args) > 0 && args[0] == "token":
		return "token", "keys"
	case len(args) > 1 && args[0] == "devices" && args[1] == "keys":
		return "devices keys", "chips"
	}
	return "", ""
}

// report prints an error as one line and returns the exit status.
func (a *app) report(ctx context.Context, err error) int {
	if err == nil {
		return exitOK
	}
	if status := statusError(0); errors.As(err, &status) {
		return int(status)
	}
	// A request that the user stopped is not a failure of the server.
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		fmt.Fprintln(a.stderr, "fleetd: interrupted")
		return exitInterrupted
	}
	if a.jsonErrors {
		return a.reportJSON(err)
	}
	if problem, ok := errors.AsType[*apiclient.Problem](err); ok && problem.Call != "" {
		fmt.Fprintln(a.stderr, "fleetd: call "+cleantext.Line(problem.Call)+" failed")
	}
	fmt.Fprintln(a.stderr, "fleetd: "+cleantext.Line(err.Error()))
	return exitCode(err)
}

// reportJSON prints an error as one JSON object on one line and returns the exit status. An error that the server
// answered with is in the object, too.
func (a *app) reportJSON(err error) int {
	report := struct {
		Error   string          `json:"error"`
		Exit    int             `json:"exit"`
		Problem json.RawMessage `json:"problem,omitempty"`
	}{Error: cleantext.Line(err.Error()), Exit: exitCode(err)}
	if problem, ok := errors.AsType[*apiclient.Problem](err); ok && json.Valid(problem.Raw) {
		report.Problem = problem.Raw
	}
	var line bytes.Buffer
	encoder := json.NewEncoder(&line)
	encoder.SetEscapeHTML(false) // it is read by people, too
	if err := encoder.Encode(report); err != nil {
		fmt.Fprintf(a.stderr, "{\"error\":\"cannot write the error as JSON\",\"exit\":%d}\n", report.Exit)
		return report.Exit
	}
	_, _ = a.stderr.Write(safeJSON(line.Bytes())) // a failure could be reported nowhere
	return report.Exit
}

func exitCode(err error) int {
	if exit, ok := errors.AsType[exitError](err); ok {
		return exit.code
	}
	var problem *apiclient.Problem
	if errors.Is(err, context.DeadlineExceeded) || (errors.As(err, &problem) && problem.Code == "device_timeout") {
		return exitTimeout
	}
	return exitRefused
}
