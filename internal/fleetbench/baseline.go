package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// baselines are the programs beside which fleetd is measured, built from the directory given. Each does one thing
// with nothing around it, and prints `min / median / max` of its runs; nil means that there are none.
type baselines struct{ programs string }

// baselineNames are those that this program runs.
var baselineNames = []string{"toolcall", "wsidle", "storm", "mqttbench", "udpaudio"}

// buildBaselines compiles the programs in source into a directory below dir.
func buildBaselines(ctx context.Context, source, dir string) (*baselines, error) {
	if source == "" {
		return nil, nil
	}
	b := &baselines{programs: filepath.Join(dir, "baselines")}
	if err := os.Mkdir(b.programs, 0o755); err != nil {
		return nil, err
	}
	for _, name := range baselineNames {
		cmd := exec.CommandContext(ctx, "go", "build", "-o", b.programs, "./"+name)
		cmd.Dir = source
		if output, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build the baseline %s in %s: %w\n%s", name, source, err, output)
		}
	}
	return b, nil
}

// baselineLimit bounds one run of a baseline.
const baselineLimit = 3 * time.Minute

// run runs one program once and returns what it printed, and what the rest of the machine did meanwhile.
func (b *baselines) run(ctx context.Context, name string, arguments ...string) (output string, others float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, baselineLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(b.programs, name), append(arguments, "-runs", "1")...)
	dieWithParent(cmd) // its own server ends when its input does
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	m, err := startMeter("")
	if err != nil {
		return "", 0, err
	}
	text, err := cmd.CombinedOutput()
	if err != nil {
		return "", 0, fmt.Errorf("baseline %s: %w\n%s", name, err, text)
	}
	s, err := m.stop(runtime.NumCPU())
	return string(text), s.others, err
}

// served is a baseline's server without its load.
type served struct {
	address, pid string
	stop         func()
}

// serve runs a baseline's server until stop.
func (b *baselines) serve(name string, arguments ...string) (served, error) {
	cmd := exec.Command(filepath.Join(b.programs, name), arguments...)
	dieWithParent(cmd)
	cmd.Stderr = os.Stderr
	stdin, inErr := cmd.StdinPipe()
	stdout, outErr := cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr); err != nil {
		return served{}, err
	}
	if err := cmd.Start(); err != nil {
		return served{}, err
	}
	stop := func() {
		_ = stdin.Close() // ends it
		timer := time.AfterFunc(stopLimit, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
		_ = cmd.Wait() // how it ended is of no interest
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	address, ready := strings.CutPrefix(strings.TrimSpace(line), "READY ")
	if !ready {
		stop()
		return served{}, errors.Join(fmt.Errorf("the baseline's server %s says %q", name, line), err)
	}
	return served{address, strconv.Itoa(cmd.Process.Pid), stop}, nil
}

// triple is how the baselines print figures.
const triple = `([0-9.]+) / ([0-9.]+) / ([0-9.]+)`

// reading finds the median printed between two texts.
func reading(output, before, after string) (float64, error) {
	pattern, err := regexp.Compile(regexp.QuoteMeta(before) + triple + regexp.QuoteMeta(after))
	if err != nil {
		return 0, err
	}
	found := pattern.FindStringSubmatch(output)
	if found == nil {
		return 0, errors.New("the baseline prints no " + strings.TrimSpace(before+" ... "+after) + ":\n" + output)
	}
	return strconv.ParseFloat(found[2], 64)
}

// wanted is one figure in a baseline's output.
type wanted struct {
	figure        string
	before, after string
	scale         float64 // to this program's unit; 0 counts as 1
}

// measure runs one program once and adds what it printed to the samples.
func (b *baselines) measure(ctx context.Context, into samples, want []wanted, name string, arguments ...string) error {
	output, others, err := b.run(ctx, name, arguments...)
	if err != nil {
		return err
	}
	for _, w := range want {
		value, err := reading(output, w.before, w.after)
		if err != nil {
			return err
		}
		if w.scale != 0 {
			value *= w.scale
		}
		into.add(w.figure, value)
	}
	into.add(figureOthers, others*100)
	return nil
}
