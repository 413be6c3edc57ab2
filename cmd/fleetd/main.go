// Command fleetd runs one node of a device fleet, and talks to a running one.
//
// It parses the command line, calls the node or the API client, and turns an error into one line on standard error
// and an exit status: 0 fine, 1 a wrong command line or a node that could not start, 2 refused, offline or not
// reachable, 3 a tool failed on its device, 4 no answer in time, 78 wrong settings of a node, 130 interrupted.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"

	// With this import, time zones are found by name also on machines and in images without a zone database.
	_ "time/tzdata"

	"github.com/mattn/go-isatty"

	"fleetd/internal/config"
)

func main() {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	a := &app{
		environ:     config.Environ(),
		stdin:       os.Stdin,
		stdout:      os.Stdout,
		stderr:      os.Stderr,
		interactive: isatty.IsTerminal(os.Stdin.Fd()) && isatty.IsTerminal(os.Stderr.Fd()),
		open:        openBrowser(os.Environ()),
		now:         time.Now,
		refresh:     2 * time.Second,
		inContainer: isContainer("/"),
		columns:     columnsOf(os.Stdout),
	}
	done := make(chan int, 1)
	go func() { done <- a.run(ctx, os.Args[1:]) }()
	os.Exit(wait(done, signals, cancel))
}

// sameRequest is for how long after the first signal further ones count as the same request: Ctrl-C reaches a whole group
// of processes, so that the parent process may forward a signal that this process has already received.
const sameRequest = time.Second

// wait returns the exit status of the command. The first signal ends its context, which drains a node; a
// second one exits at once.
func wait(done <-chan int, signals <-chan os.Signal, cancel context.CancelFunc) int {
	var asked time.Time
	for {
		select {
		case code := <-done:
			return code
		case <-signals:
			switch {
			case asked.IsZero():
				asked = time.Now()
				cancel()
			case time.Since(asked) > sameRequest:
				return exitFailed
			}
		}
	}
}
