package main

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"

	"fleetd/internal/console"
	"fleetd/internal/gobuild"
)

// Figures of the console that are measured here; those in a browser have the names that TestBench gives them.
const (
	figureConsoleLoad   = "scripts and styles, gzipped, KiB"
	figureConsoleBinary = "growth of the program by the console's files, KiB"
)

var consoleLines = []line{
	{name: "first table, ms", goal: &goal{atMost, 1000}}, {name: "filter, ms", goal: &goal{atMost, 500}}, {name: "page 50, ms", goal: &goal{atMost, 500}}, {name: "back, ms", goal: &goal{atMost, 500}},
	{name: "longest task of the main thread in a storm, ms of CPU", goal: &goal{atMost, 200}},
	{name: "growth of the heap of the table page over three storms, MiB", precision: 1, goal: &goal{atMost, 4}},
	{name: "growth of the heap of the events page over three storms, MiB", precision: 1, goal: &goal{atMost, 4}},
	{name: figureConsoleLoad, precision: 1, goal: &goal{atMostEver, 87.9}}, {name: figureConsoleBinary, goal: &goal{atMostEver, 600}},
}

// measureConsole has a browser show a large fleet, and adds what the console weighs.
func (b *bench) measureConsole(ctx context.Context) error {
	if _, err := exec.LookPath("chromium-headless-shell"); err != nil {
		b.leaveOut("the console: there is no chromium-headless-shell")
		return nil
	}
	root, err := gobuild.Root(ctx)
	if err != nil {
		return err
	}
	tree := filepath.Join(root, "internal/console")
	n := b.opt.consoleDevices
	m := measurement{Name: "console", Title: fmt.Sprintf("The console beside %d devices, and three storms in which all of them connect at 1,000 a second", n)}
	weight := samples{}
	if err := weighConsole(ctx, filepath.Join(tree, "static"), b.dir, weight); err != nil {
		return err
	}
	all := samples{}
	for run := range b.opt.runs {
		if err := b.browse(ctx, filepath.Join(tree, "browser"), n, all); err != nil { // once: it takes minutes, and much of what a browser takes counts as other programs
			return fmt.Errorf("%s, run %d: %w", m.Name, run+1, err)
		}
		for figure, values := range weight {
			all.add(figure, values[0])
		}
		b.progress(m.Name, run, all, nil, consoleLines[0].name)
	}
	m.tabulate(all, nil, consoleLines)
	b.add(m)
	return nil
}

// browse runs the measurement in a browser once. It is in a module of its own, whose libraries are not those of fleetd.
func (b *bench) browse(ctx context.Context, module string, n int, into samples) error {
	out := filepath.Join(b.dir, "console.json")
	command := exec.CommandContext(ctx, "go", "test", "-tags", "bench", "-count=1", "-timeout", "30m", "-run", "^TestBench$", ".")
	command.Dir = module
	command.Env = append(os.Environ(), fmt.Sprintf("FLEETD_TEST_BENCH_DEVICES=%d", n), "FLEETD_TEST_BENCH_OUT="+out)
	m, err := startMeter("")
	if err != nil {
		return err
	}
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", command, err, output)
	}
	used, err := m.stop(runtime.NumCPU())
	if err != nil {
		return err
	}
	text, err := os.ReadFile(out)
	if err != nil {
		return err
	}
	var figures map[string]float64
	if err := json.Unmarshal(text, &figures); err != nil {
		return err
	}
	for name, value := range figures {
		into.add(name, value)
	}
	into.add(figureOthers, 100*used.others)
	return os.Remove(out)
}

// weighConsole adds what a browser loads, and how much longer the program is than one without the files of the console.
func weighConsole(ctx context.Context, static, dir string, into samples) error {
	handler, loaded := console.New(), 0
	fetch := func(path string) (*httptest.ResponseRecorder, error) {
		r, w := httptest.NewRequestWithContext(ctx, http.MethodGet, path, nil), httptest.NewRecorder()
		r.Header.Set("Accept-Encoding", "gzip")
		if handler.ServeHTTP(w, r); w.Code != http.StatusOK {
			return nil, fmt.Errorf("GET %s: %d", path, w.Code)
		}
		return w, nil
	}
	index, err := fetch(console.Root)
	if err != nil {
		return err
	}
	page, err := gzip.NewReader(index.Body)
	if err != nil {
		return err
	}
	text, err := io.ReadAll(page)
	if err != nil {
		return err
	}
	files := regexp.MustCompile(`/console/static/[^"]+\.(?:js|css)`).FindAllString(string(text), -1)
	slices.Sort(files)
	for _, file := range slices.Compact(files) {
		answer, err := fetch(file)
		if err != nil {
			return err
		}
		loaded += answer.Body.Len()
	}
	into.add(figureConsoleLoad, float64(loaded)/1024)

	none := map[string]string{}
	err = filepath.WalkDir(static, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || entry.Name() == "index.html" { // one file must be left to embed
			return err
		}
		none[name] = ""
		return nil
	})
	if err != nil {
		return err
	}
	without, err := programSize(ctx, dir, none)
	if err != nil {
		return err
	}
	with, err := programSize(ctx, dir, map[string]string{})
	if err != nil {
		return err
	}
	into.add(figureConsoleBinary, float64(with-without)/1024)
	return nil
}

// programSize returns how many bytes fleetd has where other files replace some of its own; one whose other name is empty is left out.
func programSize(ctx context.Context, dir string, replaced map[string]string) (int64, error) {
	description, program := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "weighed")
	text, err := json.Marshal(struct{ Replace map[string]string }{replaced})
	if err == nil {
		err = os.WriteFile(description, text, 0o600)
	}
	if err != nil {
		return 0, err
	}
	if err := gobuild.Build(ctx, ".", program, []string{"./cmd/fleetd"}, "-overlay", description, "-ldflags", "-s -w"); err != nil {
		return 0, err
	}
	info, err := os.Stat(program)
	if err != nil {
		return 0, err
	}
	return info.Size(), os.Remove(program)
}
