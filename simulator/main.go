// Command simulator runs virtual xiaozhi-esp32 devices against a fleet server: boot, activation, WebSocket
// conversations, MCP, photos and audio as the firmware does them, up to many thousands in one process. It shares no
// code with the server, so that the two can disagree. README.md lists flags, faults and the report.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"fleetd/simulator/firmware"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case err == nil:
	case errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintf(os.Stderr, "simulator: %v\n", err)
		os.Exit(2)
	default:
		fmt.Fprintf(os.Stderr, "simulator: %v\n", err)
		os.Exit(1)
	}
}

// run is the whole program; it returns when ctx ends or --duration is over and the report is written.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parseFlags(args, stderr)
	if err != nil {
		return err
	}
	if o.attack.kind != "" {
		return runAttack(ctx, o, stdout)
	}
	if o.images.dir != "" {
		return writeImages(o, stdout)
	}
	f, err := firmware.New(o.Options)
	if err != nil {
		return err
	}
	progress := stderr
	if o.quiet {
		progress = nil
	}
	if o.duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.duration)
		defer cancel()
	}
	f.Run(ctx, progress)
	// The report describes the fleet as it was, not as it looks once every socket is closed.
	r := f.Report()
	f.Close()
	return writeReports(o, r, stdout)
}

func writeReports(o *options, r *firmware.Report, stdout io.Writer) error {
	if o.reportFile != "" {
		file, err := os.Create(o.reportFile)
		if err != nil {
			return fmt.Errorf("--report-file: %w", err)
		}
		if err := errors.Join(buffered(file, r.WriteJSON), file.Close()); err != nil {
			return fmt.Errorf("--report-file: %w", err)
		}
	}
	write := func(w *bufio.Writer) error { return writeText(w, r) }
	if o.reportJSON {
		write = r.WriteJSON
	}
	return buffered(stdout, write)
}

func buffered(w io.Writer, write func(*bufio.Writer) error) error {
	b := bufio.NewWriterSize(w, 64<<10)
	return errors.Join(write(b), b.Flush())
}
