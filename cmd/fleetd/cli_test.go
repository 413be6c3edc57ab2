package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/config"
	"fleetd/internal/datadir"
)

var testNow = time.Date(2026, 8, 1, 12, 0, 0, 0, time.UTC)

// fakeAPI is a fake node: answers by "METHOD /path?query", and a record of what was asked.
type fakeAPI struct {
	t       *testing.T
	url     string
	answers map[string]string
	status  map[string]int

	mu    sync.Mutex
	asked []string
}

func newAPI(t *testing.T, answers map[string]string) *fakeAPI {
	t.Helper()
	f := &fakeAPI{t: t, answers: answers, status: make(map[string]int)}
	server := httptest.NewServer(http.HandlerFunc(f.serve))
	t.Cleanup(server.Close)
	f.url = server.URL
	return f
}

func (f *fakeAPI) serve(w http.ResponseWriter, r *http.Request) {
	var body bytes.Buffer
	if _, err := body.ReadFrom(r.Body); err != nil {
		f.t.Error(err)
	}
	key := r.Method + " " + r.RequestURI
	f.mu.Lock()
	defer f.mu.Unlock()
	answer, ok := f.answers[key]
	if id, isDevice := strings.CutPrefix(key, "GET /v1/devices/"); !ok && isDevice && !strings.ContainsAny(id, "/?") {
		fmt.Fprintf(w, `{"id":%q}`, id) // the look whether an argument is an id
		return
	}
	f.asked = append(f.asked, strings.TrimSpace(key+" "+body.String()))
	if r.Header.Get("Authorization") != "Bearer t0ken" {
		f.t.Errorf("%s came with %q", key, r.Header.Get("Authorization"))
	}
	w.Header().Set("Date", testNow.Format(http.TimeFormat))
	if strings.HasPrefix(r.RequestURI, "/v1/events") {
		w.Header().Set("Content-Type", "text/event-stream")
	}
	switch {
	case !ok:
		f.t.Errorf("asked for %s, which this test does not expect", key)
		w.WriteHeader(http.StatusNotFound)
	case f.status[key] != 0:
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(f.status[key])
	case answer == "":
		w.WriteHeader(http.StatusNoContent)
	}
	fmt.Fprint(w, answer)
}

func (f *fakeAPI) requests() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.asked...)
}

// buffer is an output that a test may read while the command writes.
type buffer struct {
	mu      sync.Mutex
	content bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.content.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.content.String()
}

// outcome is the exit status and output of a command.
type outcome struct {
	code           int
	stdout, stderr string
}

func newApp() (*app, *buffer, *buffer) {
	var stdout, stderr buffer
	return &app{stdin: strings.NewReader(""), stdout: &stdout, stderr: &stderr, now: func() time.Time { return testNow }, refresh: time.Millisecond}, &stdout, &stderr
}

// run executes a command against the fake node.
func (f *fakeAPI) run(args ...string) outcome { return f.runWith(func(*app) {}, args...) }

// runWith is run in an app that change has changed.
func (f *fakeAPI) runWith(change func(*app), args ...string) outcome {
	a, stdout, stderr := newApp()
	a.environ = []string{"FLEETD_API=" + f.url, "FLEETD_TOKEN=t0ken"}
	change(a)
	code := a.run(f.t.Context(), args)
	return outcome{code, stdout.String(), stderr.String()}
}

// is compares an outcome whole.
func (o outcome) is(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if want := (outcome{code, stdout, stderr}); o != want {
		t.Errorf("status %d\n--- stdout\n%s--- stderr\n%s\nwant status %d\n--- stdout\n%s--- stderr\n%s",
			o.code, o.stdout, o.stderr, want.code, want.stdout, want.stderr)
	}
}

// The help of a command with a default says where the flags of the default are.
func TestHelpOfDefault(t *testing.T) {
	a, stdout, _ := newApp()
	if code := a.run(t.Context(), []string{"devices", "--help"}); code != exitOK || !strings.Contains(stdout.String(), `Run "fleetd devices list --help" for`) {
		t.Errorf("status %d: %s", code, stdout)
	}
}

func TestUsage(t *testing.T) {
	cases := []struct {
		args []string
		want string // in the sentence
	}{
		{[]string{"bogus"}, "unexpected argument bogus (see"},
		{[]string{"devcies"}, `unexpected argument devcies, did you mean "devices"?`},
		{[]string{"help", "evnts"}, `did you mean "events"?`},
		{[]string{"devices", "--label", "room=lab", "--label", "floor=1"}, "--label is given twice; give it once"},
		{[]string{"devices", "rotate", "--all", "--grace", "30days"}, "expected a duration such as 90s, 12h or 30d"},
		{[]string{"--device-listn", ":1"}, `did you mean "--device-listen"?`},
		{[]string{"devices", "--limit", "-1"}, `--limit: expected a whole number, not "-1" (see fleetd devices list --help)`},
		{[]string{"devices", "--label"}, "--label: expected a value (see"},
		{[]string{"webhooks", "bogus"}, "unexpected argument bogus (see fleetd webhooks --help)"},
		{[]string{"call"}, `expected "<device> <tool>`},
		{[]string{"call", "d"}, `expected "<tool>`},
		{[]string{"call", "d", "t", "--timeout", "soon"}, "--timeout"},
		{[]string{"call", "d", "t", "--timeout=-1s"}, "--timeout must be above zero, not -1s"},
		{[]string{"call", "d", "t", "volume"}, `"volume" is not key=value or key:=JSON`},
		{[]string{"call", "d", "t", "=5"}, `"=5" is not key=value`},
		{[]string{"call", "d", "t", "a:={"}, `the argument a is not JSON: "{"`},
		{[]string{"call", "d", "t", "a=1", "a:=2"}, "the argument a is given twice"},
		{[]string{"call", "d", "t", "--args", "[1]"}, "--args must be one JSON object"},
		{[]string{"call", "d", "t", "--args", "null"}, "--args must be one JSON object"},
		{[]string{"devices", "approve"}, `expected "<device>"`},
		{[]string{"serve", "--websocket-version", "4"}, `--websocket-version (FLEETD_WEBSOCKET_VERSION) is "4" but must be`},
		{[]string{"--websocket-version=4"}, `--websocket-version (FLEETD_WEBSOCKET_VERSION) is "4" but must be`},
	}
	for _, tc := range cases {
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) {
			a, stdout, stderr := newApp()
			code := a.run(t.Context(), tc.args)
			got := stderr.String()
			want := exitFailed
			if strings.Contains(tc.want, "FLEETD_WEBSOCKET_VERSION") { // a setting
				want = exitSettings
			}
			if code != want || stdout.String() != "" || !strings.HasPrefix(got, "fleetd: ") || strings.Count(got, "\n") != 1 || !strings.Contains(got, tc.want) {
				t.Errorf("status %d, stdout %q, stderr %q; want %q", code, stdout, got, tc.want)
			}
		})
	}
	a, _, stderr := newApp()
	a.environ = []string{"FLEETD_LOGLEVEL=debug"}
	if code := a.run(t.Context(), nil); code != exitSettings || !strings.Contains(stderr.String(), "FLEETD_LOG_LEVEL") {
		t.Errorf("an unknown variable: status %d, %q", code, stderr)
	}
}

func TestHelp(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"serve", "--help"}, {"call", "--help"}, {"devices", "approve", "--help"}, {"backup", "--help"}, {"restore", "--help"},
		{"help"}, {"help", "devices", "approve"}, {"help", "serve"}} {
		a, stdout, stderr := newApp()
		if code := a.run(t.Context(), args); code != exitOK || !strings.HasPrefix(stdout.String(), "Usage: fleetd") || stderr.String() != "" {
			t.Errorf("%v: status %d, stdout %q, stderr %q", args, code, stdout, stderr)
		}
	}
	a, stdout, _ := newApp()
	a.run(t.Context(), []string{"serve", "--help"})
	for _, f := range config.Flags() {
		if !strings.Contains(stdout.String(), "--"+f.Name+"=") || !strings.Contains(stdout.String(), "($"+f.Env+")") {
			t.Errorf("serve --help does not show --%s with $%s", f.Name, f.Env)
		}
		if f.Default != "" && !strings.Contains(stdout.String(), "--"+f.Name+"="+f.Default) {
			t.Errorf("serve --help does not show the default %s of --%s", f.Default, f.Name)
		}
	}
}

// A command that is named has a parser of its own, with the same arguments and flags as in the parser of all.
func TestParserOfOneCommand(t *testing.T) {
	all, err := newParser(commandsFor(nil))
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range all.Model.Children {
		one, err := newParser(commandsFor([]string{n.Name, "--help"}))
		if err != nil {
			t.Fatal(err)
		}
		if len(one.Model.Children) != 1 || one.Model.Children[0].Name != n.Name || one.Model.Children[0].Summary() != n.Summary() {
			t.Errorf("fleetd %s has %d commands", n.Name, len(one.Model.Children))
		}
	}
}

// TestServeFlags checks that every setting of the table can be given to the default command, and only what was given
// counts as given.
func TestServeFlags(t *testing.T) {
	parse := func(args ...string) map[string]string {
		t.Helper()
		cli := commands{Serve: newServeCmd()}
		parser, err := newParser(&cli)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := parser.Parse(args); err != nil {
			t.Fatal(err)
		}
		return cli.Serve.given()
	}
	for _, prefix := range [][]string{nil, {"serve"}} {
		if got := parse(prefix...); len(got) != 0 {
			t.Errorf("%v gives %v", prefix, got)
		}
		args, want := prefix, make(map[string]string)
		for i, f := range config.Flags() {
			want[f.Name] = fmt.Sprintf("value %d", i)
			args = append(args, "--"+f.Name, want[f.Name])
		}
		if got := parse(args...); !reflect.DeepEqual(got, want) {
			t.Errorf("%v gives %v", prefix, got)
		}
		if got := parse(append(prefix, "--public-host=")...); !reflect.DeepEqual(got, map[string]string{"public-host": ""}) {
			t.Errorf("an empty flag gives %v", got)
		}
	}
}

// lockDir holds the lock of a data directory as its node does while it runs.
func lockDir(t *testing.T, dir string) {
	t.Helper()
	file, err := os.Create(filepath.Join(dir, datadir.LockFile))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
}

func TestNoNode(t *testing.T) {
	dir := t.TempDir()
	a, stdout, stderr := newApp()
	code := a.run(t.Context(), []string{"devices", "--data-dir", dir})
	outcome{code, stdout.String(), stderr.String()}.is(t, exitRefused, "",
		"fleetd: no running node found in "+dir+"; start one with `fleetd serve`, or give --api URL and --token\n")

	again, _, notFound := newApp()
	again.run(t.Context(), []string{"devices", "--data-dir", "there", "--data-dir", dir})
	if !strings.Contains(notFound.String(), "found in "+dir) {
		t.Errorf("the last of several data directories: %s", notFound)
	}

	// A node announces itself; its token is found beside it.
	f := newAPI(t, map[string]string{"GET /v1/devices?limit=1000": `{"items":[],"next_cursor":""}`})
	lockDir(t, dir)
	if err := datadir.WriteRunInfo(dir, datadir.RunInfo{API: f.url}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/admin-token", []byte("t0ken\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	a, stdout, stderr = newApp()
	a.environ = []string{"FLEETD_DATA_DIR=" + dir}
	code = a.run(t.Context(), []string{"devices"})
	outcome{code, stdout.String(), stderr.String()}.is(t, exitOK, "no devices yet; `fleetd doctor` shows the OTA URL to type into one\n", "")
}

func TestExitCode(t *testing.T) {
	cases := []struct {
		err  error
		want int
	}{
		{nil, exitOK},
		{failed("x"), exitFailed},
		{fmt.Errorf("call: %w", errTool), exitTool},
		{&apiclient.Problem{Problem: api.Problem{Code: "device_offline"}}, exitRefused},
		{fmt.Errorf("call: %w", &apiclient.Problem{Problem: api.Problem{Code: "device_timeout"}}), exitTimeout},
		{context.DeadlineExceeded, exitTimeout},
		{apiclient.ErrNoNode, exitRefused},
		{errors.New("anything else"), exitRefused},
		{context.Canceled, exitRefused},
	}
	for _, tc := range cases {
		a, _, _ := newApp()
		if got := a.report(t.Context(), tc.err); got != tc.want {
			t.Errorf("%v: %d, want %d", tc.err, got, tc.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	a, _, stderr := newApp()
	if got := a.report(ctx, fmt.Errorf("x: %w", context.Canceled)); got != exitInterrupted || stderr.String() != "fleetd: interrupted\n" {
		t.Errorf("interrupted: %d %q", got, stderr)
	}
	a, _, stderr = newApp()
	a.report(t.Context(), errors.New("two\nlines \x1b[31mred"))
	if stderr.String() != "fleetd: two lines red\n" {
		t.Errorf("got %q", stderr)
	}
}

func TestWait(t *testing.T) {
	signals, done := make(chan os.Signal, 2), make(chan int, 1)
	signal.Notify(signals, syscall.SIGTERM)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	// The first signal cancels; the command then ends with its own status.
	go func() {
		<-ctx.Done()
		done <- 7
	}()
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := wait(done, signals, cancel); code != 7 {
		t.Errorf("status %d, want the command's own", code)
	}

}

// A command that does not end is abandoned at the second signal, unless that
// comes with the first: Ctrl-C, and a script that passes it on.
func TestSecondSignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		signals, ended := make(chan os.Signal), make(chan int, 1)
		cancelled := 0
		go func() { ended <- wait(nil, signals, func() { cancelled++ }) }()
		signals <- syscall.SIGINT
		signals <- syscall.SIGTERM
		synctest.Wait()
		if len(ended) > 0 || cancelled != 1 {
			t.Fatalf("abandoned at once; %d cancellations", cancelled)
		}
		time.Sleep(2 * sameRequest)
		signals <- syscall.SIGINT
		if code := <-ended; code != exitFailed || cancelled != 1 {
			t.Errorf("status %d after %d cancellations", code, cancelled)
		}
	})
}

func TestVersion(t *testing.T) {
	a, stdout, stderr := newApp()
	code := a.run(t.Context(), []string{"version"})
	lines := strings.Split(stdout.String(), "\n")
	if code != exitOK || stderr.String() != "" || len(lines) != 4 || !strings.HasPrefix(lines[0], "fleetd ") ||
		!strings.HasPrefix(lines[1], "commit ") || !strings.HasPrefix(lines[2], "go     go1.") {
		t.Errorf("status %d, %q", code, stdout)
	}
	again, stdoutAgain, _ := newApp()
	if code := again.run(t.Context(), []string{"--version"}); code != exitOK || stdoutAgain.String() != stdout.String() {
		t.Errorf("--version: status %d, %q", code, stdoutAgain)
	}
	info := &debug.BuildInfo{Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{
		{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.modified", Value: "true"}}}
	if got := (build{}).completed(info); got != (build{"v1.2.3", "abc", true}) {
		t.Errorf("from the record: %+v", got)
	}
	if got := (build{version: "v2", commit: "def"}).completed(info); got != (build{"v2", "def", false}) {
		t.Errorf("the linker wins: %+v", got)
	}
	info.Main.Version = "(devel)"
	if got := (build{}).completed(info); got.version != "" {
		t.Errorf("(devel) counts as the version %q", got.version)
	}
}

// An error of the server names the flag or argument that is wrong, and where ids are listed.
func TestErrorsInWordsOfTheCommandLine(t *testing.T) {
	for _, c := range []struct {
		args          []string
		problem, want string
		code          int
	}{
		{[]string{"log", "02:00:00:00:00:01", "--kind", "x"}, `"bad_request","detail":"query.kind: expected value to be one of \"call\""`, `--kind: expected value to be one of "call"`, exitFailed},
		{[]string{"devices", "edit", "d", "--transport", "x"}, `"bad_request","detail":"body.transport_wanted: wrong"`, "--transport: wrong", exitFailed},
		{[]string{"keys", "create", "--name", "n", "--scope", "x"}, `"bad_request","detail":"unknown scope \"x\""`, `unknown --scope "x"`, exitFailed},
		{[]string{"keys", "create", "--name", "n", "--scope", "x"}, `"bad_request","detail":"a key named n exists"`, "a key named n exists", exitRefused},
		{[]string{"restart", "d", "-y"}, `"invalid_arguments","detail":"the job is not valid: /when/window/cron is wrong","errors":[{"pointer":"/when/window/cron","detail":"is wrong"},{"pointer":"/pace/rate","detail":"is odd"}]`,
			"the job is not valid: --window is wrong; --rate is odd", exitFailed},
		{[]string{"call", "02:00:00:00:00:01", "t"}, `"invalid_arguments","call":"c","detail":"not valid","errors":[{"pointer":"/timeout","detail":"is required"}]`, "/timeout is required", exitRefused},
		{[]string{"jobs", "x"}, `"not_found","detail":"unknown job x; GET /v1/jobs lists them"`, "unknown job x; `fleetd jobs` lists them", exitRefused},
		{[]string{"keys", "revoke", "x"}, `"not_found","detail":"unknown key"`, "unknown key; `fleetd keys` lists them", exitRefused},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprintf(w, `{"status":400,"code":%s}`, c.problem)
		}))
		a, _, stderr := newApp()
		if code := a.run(t.Context(), append(c.args, "--api", server.URL, "--token", "t")); code != c.code || !strings.Contains(stderr.String(), c.want) {
			t.Errorf("%v: status %d: %s", c.args, code, stderr)
		}
		server.Close()
	}
}

// A program that asked for JSON gets errors as JSON, too: of the server as it sent them, and of the command line.
func TestErrorsAsJSON(t *testing.T) {
	const problem = `{"title":"Not Found","status":404,"code":"device_unknown","detail":"no device aa\u001b[1m"}`
	f := newAPI(t, map[string]string{"GET /v1/devices/aa:aa:aa:aa:aa:aa": problem})
	f.status = map[string]int{"GET /v1/devices/aa:aa:aa:aa:aa:aa": http.StatusNotFound}
	f.run("devices", "show", "aa:aa:aa:aa:aa:aa", "--json").is(t, exitRefused, "",
		"{\"error\":\"no device aa; `fleetd devices` lists them (device_unknown)\""+`,"exit":2,"problem":`+problem+"}\n")
	f.run("devices", "show", "--json").is(t, exitFailed, "", `{"error":"expected \"<device>\" (see fleetd devices show --help)","exit":1}`+"\n")
	f.run("call", "d", "t", "--json", "x").is(t, exitFailed, "", `{"error":"\"x\" is not key=value or key:=JSON","exit":1}`+"\n")
}
