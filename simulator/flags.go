package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"time"

	"fleetd/simulator/firmware"
)

// errUsage marks mistakes on the command line: exit status 2.
var errUsage = errors.New("wrong command line")

// options is the parsed command line.
type options struct {
	firmware.Options
	duration   time.Duration
	reportJSON bool
	reportFile string
	quiet      bool
	attack     attackOptions
	images     imageOptions
}

// parseFlags reads the arguments. flag.ErrHelp means that help was printed.
func parseFlags(args []string, stderr io.Writer) (*options, error) {
	o := &options{Options: firmware.Defaults()}
	fs := flag.NewFlagSet("simulator", flag.ContinueOnError)
	// The flag package would print the whole help after every typing mistake.
	fs.SetOutput(io.Discard)
	read := o.Flags(fs)
	level := fs.String("log", "", "`level`: debug writes connections and conversations to standard error")
	o.attack.flags(fs)
	o.images.flags(fs)
	fs.DurationVar(&o.duration, "duration", 0, "stop after `D`; 0: at SIGINT or SIGTERM")
	report := fs.String("report", "", "`format` of the report on standard output at the end: json, or empty for a short text")
	fs.StringVar(&o.reportFile, "report-file", "", "write the JSON report to `PATH` as well")
	fs.BoolVar(&o.quiet, "quiet", false, "no progress lines on standard error")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			_, _ = io.WriteString(stderr, "Usage: go run ./simulator [flags]\n\nVirtual xiaozhi-esp32 devices, written from the firmware.\n\nFlags (one dash or two):\n")
			fs.SetOutput(stderr)
			fs.PrintDefaults()
			return nil, err
		}
		return nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	if err := errors.Join(o.resolve(fs.Args(), *report, *level, stderr), read(), o.attack.resolve()); err != nil {
		return nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	return o, nil
}

// resolve checks the flags that are not of the devices and turns their texts into values.
func (o *options) resolve(rest []string, report, level string, stderr io.Writer) error {
	if len(rest) > 0 {
		return fmt.Errorf("unexpected argument %q; every setting is a flag", rest[0])
	}
	switch report {
	case "", "text":
	case "json":
		o.reportJSON = true
	default:
		return fmt.Errorf("--report: %q is unknown; known is json", report)
	}
	switch level {
	case "":
	case "debug":
		o.Log = slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	default:
		return fmt.Errorf("--log: %q is unknown; known is debug", level)
	}
	return nil
}
