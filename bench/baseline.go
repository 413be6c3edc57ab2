package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"fleetd/bench/load"
	"fleetd/internal/gobuild"
)

// baselines are the programs beside which fleetd is measured. Each does one thing with nothing around it, and prints
// `min / median / max` of its runs.
type baselines struct{ program string }

// buildBaselines compiles the program in a directory.
func buildBaselines(ctx context.Context, dir string) (baselines, error) {
	b := baselines{program: filepath.Join(dir, "baseline")}
	return b, gobuild.Build(ctx, "bench", b.program, []string{"./baseline"})
}

// baselineLimit bounds one run of a baseline.
const baselineLimit = 3 * time.Minute

// run runs one program once and returns what it printed, and what the rest of the machine did meanwhile.
func (b baselines) run(ctx context.Context, name string, arguments ...string) (output string, others float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, baselineLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.program, slices.Concat([]string{name}, arguments, []string{"-runs", "1"})...)
	load.DieWithParent(cmd) // its own server ends when its input does
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

// serve runs a baseline's server without its load.
func (b baselines) serve(name string) (*load.Child, error) {
	return load.StartChild(b.program, nil, "server", name)
}

// triple is how the baselines print figures. The memory of few devices may shrink.
const triple = `(-?[0-9.]+) / (-?[0-9.]+) / (-?[0-9.]+)`

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
func (b baselines) measure(ctx context.Context, into samples, want []wanted, name string, arguments ...string) error {
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
