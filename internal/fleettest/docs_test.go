package fleettest

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"fleetd/internal/racetest"
	"fleetd/internal/store/storetest"
)

// mostNotRun is how many blocks of commands may be left out, for the reason
// that they give after "not-run:". Write a block so that it runs before you
// raise it.
const mostNotRun = 29

// fewestRun is less than what the pages have: a test that finds no commands
// must not pass.
const fewestRun = 120

// shellBlock is a block of commands in a document.
type shellBlock struct {
	page, language, notRun string
	line                   int
	lines                  []string
}

// docPages are README and the pages of docs but the generated ones.
func docPages(t *testing.T) []string {
	t.Helper()
	pages := []string{"README.md"}
	err := fs.WalkDir(os.DirFS("../.."), "docs", func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".md") && !strings.HasPrefix(path, "docs/reference/") {
			pages = append(pages, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return pages
}

// shellBlocks returns the blocks of a page whose language is sh, bash or
// console. Every block needs a language: one without could be commands that
// nothing runs.
func shellBlocks(t *testing.T, page string) (blocks []shellBlock) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../..", page))
	if err != nil {
		t.Fatal(err)
	}
	var open *shellBlock
	indent := ""
	for i, line := range strings.Split(string(text), "\n") {
		trimmed := strings.TrimLeft(line, " ")
		info, fence := strings.CutPrefix(trimmed, "```")
		switch {
		case fence && open == nil:
			indent = line[:len(line)-len(trimmed)]
			language, rest, _ := strings.Cut(info, " ")
			reason, marked := strings.CutPrefix(rest, "not-run: ")
			if language == "" || rest != "" && (!marked || strings.TrimSpace(reason) == "") {
				t.Errorf("%s:%d: write ```LANGUAGE (text for output), or ```sh not-run: REASON", page, i+1)
			}
			open = &shellBlock{page: page, language: language, notRun: reason, line: i + 1}
		case fence:
			if open.language == "sh" || open.language == "bash" || open.language == "console" {
				blocks = append(blocks, *open)
			}
			open = nil
		case open != nil:
			open.lines = append(open.lines, strings.TrimPrefix(line, indent))
		}
	}
	return blocks
}

var (
	hereDocument = regexp.MustCompile(`<<'?([A-Z]+)'?`)
	exitStatus   = regexp.MustCompile(`# exit status (\d+)\b`)
	untilCtrlC   = regexp.MustCompile(`# (?:.*, )?until Ctrl-C(?:;.*)?$`)
	refusal      = regexp.MustCompile(`^fleetd: .*\([a-z_]+(?:, rule [a-z-]+)?\)$`)
)

// script is the shell script that runs the commands of a block one after the
// other. In a console block they follow "$ ". A command ends with the status
// that a comment "# exit status N" documents, else 0; one with the comment
// "# until Ctrl-C" is interrupted once it works.
func (b shellBlock) script(t *testing.T) string {
	t.Helper()
	var s strings.Builder
	for i := 0; i < len(b.lines); i++ {
		at, line := b.line+1+i, b.lines[i]
		if b.language == "console" {
			var ok bool
			if line, ok = strings.CutPrefix(line, "$ "); !ok {
				continue // output
			}
		}
		command := line
		end := ""
		if m := hereDocument.FindStringSubmatch(line); m != nil {
			end = m[1]
		}
		for end != "" && b.lines[i] != end || end == "" && !complete(t, command) {
			if i++; i == len(b.lines) {
				t.Fatalf("%s:%d: the command has no end", b.page, at)
			}
			command += "\n" + b.lines[i]
		}
		if strings.TrimSpace(command) == "" || strings.HasPrefix(command, "#") {
			continue
		}
		want, last := "0", command[strings.LastIndex(command, "\n")+1:]
		if m := exitStatus.FindStringSubmatch(last); m != nil {
			want = m[1]
		}
		if untilCtrlC.MatchString(last) {
			command = "until_ctrl_c " + command
		}
		fmt.Fprintf(&s, "at='%s:%d'\n%s\nended $? %s\n", b.page, at, command, want)
	}
	return s.String()
}

// refusals are the errors that a console block documents as its output.
func (b shellBlock) refusals() (lines []string) {
	for _, line := range b.lines {
		if refusal.MatchString(line) {
			lines = append(lines, line)
		}
	}
	return lines
}

// complete reports whether the shell reads the text as whole commands.
func complete(t *testing.T, command string) bool {
	t.Helper()
	return !strings.HasSuffix(command, "\\") && exec.CommandContext(t.Context(), "bash", "-n", "-c", command).Run() == nil
}

// prelude is what every script begins with. The commands of a page share one
// shell, in a directory with the programs, deploy and the node's data.
const prelude = `
set -o pipefail
ended() {
	[ "$1" = "$2" ] || wrong "exit status $1, documented is $2"
}
wrong() { echo "$at: $1" >&2; wrong=1; }
until_ctrl_c() {
	set -m
	rm -f "$SERVED"; "$@" & local pid=$! i status
	if [[ $1 == *fleetd && $2 == serve ]]; then
		for i in $(seq 600); do
			[ -s "$SERVED" ] && [ -e "$(cat "$SERVED")/run.json" ] && break
			kill -0 $pid 2>/dev/null || break
			sleep 0.1
		done
		[ -e "$(cat "$SERVED")/run.json" ] || wrong "the node does not serve"
	else
		for i in $(seq 100); do # until it has a connection
			ls -l /proc/$pid/fd 2>/dev/null | grep -q socket: && break
			kill -0 $pid 2>/dev/null || break
			sleep 0.1
		done
		sleep 0.5 # it must not end by itself
	fi
	kill -INT $pid 2>/dev/null || wrong "it ended by itself"
	wait $pid; status=$?
	set +m
	[ $status = 130 ] || return $status # what an interrupted client command ends with
}
`

// fleetdForDocs is fleetd as a page calls it. A node that a page starts has a
// data directory of its own, since the documented one is in use, and free
// ports where the page gives none. The node of the test is on loopback, which
// doctor reports with status 2.
const fleetdForDocs = `#!/usr/bin/env bash
if [ "$1" = serve ] && [ "$2" != --help ]; then
	export FLEETD_DATA_DIR=$(mktemp -d "$PWD/served.XXXX") FLEETD_PUBLIC_HOST=127.0.0.1
	export FLEETD_DEVICE_LISTEN=$FREE_1 FLEETD_MQTT_LISTEN=$FREE_2 FLEETD_UDP_LISTEN=$FREE_3 FLEETD_API_LISTEN=$FREE_4 FLEETD_MQTT_TLS_LISTEN=$FREE_5
	echo "$FLEETD_DATA_DIR" >"$SERVED"
	args=()
	for arg; do [ "$arg" = "$NODE_DIR" ] && arg=$FLEETD_DATA_DIR; args+=("$arg"); done
	exec "$FLEETD_TEST_PROGRAM" "${args[@]}"
fi
if [ "$1" = doctor ]; then
	"$FLEETD_TEST_PROGRAM" "$@" && exit 1
	[ $? = 2 ] && exit 0
	exit 1
fi
exec "$FLEETD_TEST_PROGRAM" "$@"
`

// substitutions are what the commands contain in place of the examples of the
// documents, in this order:
//
//	aa:bb:cc:dd:ee:ff, 34:85:18:ab:cd:ef, DEVICE   the first simulated device
//	aabbccddeeff                                   the same without colons
//	fld_...                                        the token of a key
//	127.0.0.1:8080, http://192.0.2.2:8000          the node's API, the node's address for devices
//	/var/lib/fleetd, /var/backups, /etc/fleetd     directories of the test; the first is the node's
//	/etc/letsencrypt/live/devices.example.com      a directory with a certificate
//	:443, :8443, 127.0.0.1:8000, :4222 and :9000 and the like   free ports
//	postgres://... at db.example.com               a database of the test
//	nats://nats.example.com:4222                   a NATS server of the test
//	go run ./simulator, go run ./examples/echo     the programs, built
//	--for 5s, --rate 60/m                          the same in less time
func substitutions(t *testing.T, n *Node, dir, page string) *strings.Replacer {
	t.Helper()
	const device = "02:f1:ee:00:00:00"
	pairs := []string{
		"aa:bb:cc:dd:ee:ff", device, "34:85:18:ab:cd:ef", device, " DEVICE", " " + device, "aabbccddeeff", strings.ReplaceAll(device, ":", ""),
		"http://127.0.0.1:8080", n.Info.API, "http://192.0.2.2:8000/xiaozhi/ota/", n.Info.OTA,
		"/var/lib/fleetd-restored", dir + "/restored", "/var/lib/fleetd", n.Dir, "/var/backups", dir + "/backups",
		"/etc/fleetd", dir + "/etc", "/etc/letsencrypt/live/devices.example.com", dir + "/etc",
		"listen :443", "listen " + freePort(t), "listen :8443", "listen " + freePort(t), "listen 127.0.0.1:8000", "listen " + freePort(t),
		"listen 10.0.0.11:8080", "listen " + freePort(t), "listen 127.0.0.1:4222", "listen " + freePort(t), "127.0.0.1:9000", freePort(t),
		"go run ./simulator", "bin/simulator --ota " + n.Info.OTA, "go run ./examples/echo", "bin/echo", "--for 5s", "--for 1s", "--rate 60/m", "--rate 600/m",
	}
	text, err := os.ReadFile(filepath.Join("../..", page))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), "fld_...") {
		token, stderr, status := n.Command(t, "keys", "create", "--name", "of-the-test", "--scope", "devices:read,tools:call,events:read")
		if status != 0 {
			t.Fatal(stderr)
		}
		pairs = append(pairs, "fld_...", strings.TrimSpace(token))
	}
	if strings.Contains(string(text), "db.example.com") {
		pairs = append(pairs, "postgres://fleetd:password@db.example.com:5432/fleetd", storetest.Postgres(t).URL)
	}
	if strings.Contains(string(text), "nats.example.com") {
		pairs = append(pairs, "nats://nats.example.com:4222", natsServerOfItsOwn(t).ClientURL())
	}
	return strings.NewReplacer(pairs...)
}

// Every command of README and docs runs against a node with four simulated
// devices, and ends as documented.
func TestDocsCommands(t *testing.T) {
	if racetest.Enabled {
		t.Skip("LACKS: the race detector has nothing to do with what commands print, and makes each of them four times as slow")
	}
	t.Parallel()
	run, notRun := 0, 0
	for _, page := range docPages(t) {
		var commands strings.Builder
		var refusals []string
		for _, b := range shellBlocks(t, page) {
			if b.notRun != "" {
				notRun++
				continue
			}
			commands.WriteString(b.script(t))
			refusals = append(refusals, b.refusals()...)
		}
		run += strings.Count(commands.String(), "\nended $? ")
		if commands.Len() > 0 {
			t.Run(page, func(t *testing.T) {
				t.Parallel()
				runCommands(t, page, commands.String(), refusals)
			})
		}
	}
	if notRun > mostNotRun {
		t.Errorf("%d blocks of commands are not run, more than %d", notRun, mostNotRun)
	}
	if run < fewestRun {
		t.Errorf("%d commands are run, fewer than %d", run, fewestRun)
	}
	t.Logf("%d commands of README and docs, and %d blocks that are not run", run, notRun)
}

// runCommands runs the commands of a page in a directory that looks like the
// repository to them. They print these refusals, word for word.
func runCommands(t *testing.T, page, commands string, refusals []string) {
	n := programs.Start(t, natsFlag, natsAnyPort, "--webhook-allow", "127.0.0.1")
	programs.Simulate(t, n.Info.OTA, "--devices", "4", "--profile", "fw-2.4,robot,fw-2.1,fw-1.9")
	n.AwaitReady(t, 4)
	if _, stderr, status := n.Command(t, "devices", "edit", "device=*", "room=lab", "--yes"); status != 0 {
		t.Fatal(stderr)
	}
	dir := t.TempDir()
	for _, sub := range []string{"bin", "etc", "backups"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	repository, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	for link, target := range map[string]string{"fleetd-data": n.Dir, "deploy": filepath.Join(repository, "deploy"), "bin/simulator": programs.Simulator, "bin/echo": programs.EchoService} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "bin/fleetd"), []byte(fleetdForDocs), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"fullchain.pem privkey.pem", "api.crt api.key"} {
		cert, key, _ := strings.Cut(name, " ")
		writePair(t, filepath.Join(dir, "etc", cert), filepath.Join(dir, "etc", key), 1, time.Now().Add(time.Hour))
	}
	if err := os.WriteFile(filepath.Join(dir, "etc/secret"), []byte("a secret of the docs test, 32 bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), "bash", "-c", prelude+substitutions(t, n, dir, page).Replace(commands)+"\nexit ${wrong:-0}")
	c.Dir = dir
	c.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"), "FLEETD_DATA_DIR="+n.Dir, "NODE_DIR="+n.Dir,
		"FLEETD_TEST_PROGRAM="+programs.Fleetd, "SERVED="+filepath.Join(dir, "served"))
	for i := range 5 {
		c.Env = append(c.Env, fmt.Sprintf("FREE_%d=%s", i+1, freePort(t)))
	}
	out, err := c.CombinedOutput()
	t.Logf("what the commands printed:\n%s", out)
	if err != nil {
		t.Error(err)
	}
	for _, line := range refusals {
		if !strings.Contains(string(out), line+"\n") {
			t.Errorf("the commands do not print %q", line)
		}
	}
}
