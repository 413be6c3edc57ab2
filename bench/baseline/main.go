// Command baseline is the programs beside which bench measures fleetd. Each does one thing that fleetd does, with
// nothing around it: no credentials, no limits, no metrics, no events. Each starts its server in a process of its own,
// loads it over loopback and prints minimum / median / maximum of its runs:
//
//	baseline toolcall    HTTP calls that cross the server to a WebSocket device and back
//	baseline wsidle      memory per idle WebSocket device, with TLS or without
//	baseline storm       devices from dial to a stored tool list
//	baseline mqttbench   MQTT devices: memory per idle one, or calls to them
//	baseline udpaudio    UDP audio: receive, decrypt, encrypt for the peer, send
//	baseline server P    the server of program P alone, until its input ends
//
// They are for measuring only: an error ends the program.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
)

// program is a load and its server.
type program struct {
	load  func(ctx context.Context, arguments []string, out io.Writer) error
	serve func(arguments []string) error
}

var programs = map[string]program{
	"toolcall":  {loadCalls, serveCalls},
	"wsidle":    {loadIdle, serveIdle},
	"storm":     {loadStorm, serveStorm},
	"mqttbench": {loadMQTT, serveMQTT},
	"udpaudio":  {loadAudio, serveAudio},
}

// serverCommand runs a program's server.
const serverCommand = "server"

func main() {
	err := run(context.Background(), os.Args[1:], os.Stdout)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "baseline:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string, out io.Writer) error {
	serve := len(arguments) > 0 && arguments[0] == serverCommand
	if serve {
		arguments = arguments[1:]
	}
	if len(arguments) == 0 {
		return unknownProgram("")
	}
	p, known := programs[arguments[0]]
	switch {
	case !known:
		return unknownProgram(arguments[0])
	case serve:
		return p.serve(arguments[1:])
	}
	return p.load(ctx, arguments[1:], out)
}

func unknownProgram(name string) error {
	return fmt.Errorf("unknown program %q; there are %s", name, strings.Join(slices.Sorted(maps.Keys(programs)), ", "))
}

// options are a program's flags. All have the number of runs.
type options struct {
	*flag.FlagSet
	runs *int
}

func newOptions(name string) options {
	o := options{FlagSet: flag.NewFlagSet(name, flag.ContinueOnError)}
	o.runs = o.Int("runs", 3, "repetitions")
	return o
}

// choice is a flag with the values given, the first of which it has at first. Many have one value: it names, in the
// command line, what is measured.
func (o options) choice(name, usage string, values ...string) *string {
	chosen := values[0]
	o.Func(name, usage+": "+strings.Join(values, " or "), func(value string) error {
		if !slices.Contains(values, value) {
			return errors.New("there is only " + strings.Join(values, " and "))
		}
		chosen = value
		return nil
	})
	return &chosen
}

// positive reads the command line; numbers must be above 0.
func (o options) positive(arguments []string, numbers ...*int) error {
	if err := o.Parse(arguments); err != nil {
		return err
	}
	if o.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", o.Arg(0))
	}
	for _, n := range append(numbers, o.runs) {
		if *n < 1 {
			return fmt.Errorf("%s: numbers must be positive", o.Name())
		}
	}
	return nil
}

// series are the values of a figure, one for each run.
type series []float64

// text is minimum, median and maximum.
func (s series) text(precision int) string {
	sorted := slices.Sorted(slices.Values(s))
	format := func(x float64) string { return strconv.FormatFloat(x, 'f', precision, 64) }
	return format(sorted[0]) + " / " + format(sorted[len(sorted)/2]) + " / " + format(sorted[len(sorted)-1])
}
