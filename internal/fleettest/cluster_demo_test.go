package fleettest

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devicetest"
	"fleetd/internal/store/storetest"
)

// What `make cluster-demo` prints can be pasted: each line calls the same
// device on another node, and all answers name the node that holds it. Ctrl-C
// leaves nothing.
func TestClusterDemo(t *testing.T) {
	t.Parallel()
	for _, balanced := range []bool{false, true} {
		t.Run(fmt.Sprintf("balanced=%t", balanced), func(t *testing.T) {
			setting := "HAPROXY=off"
			if balanced {
				haproxy(t)
				setting = "HAPROXY="
			}
			db := storetest.Postgres(t)
			url, _, js, _ := natsServer(t)
			if _, err := exec.LookPath("psql"); err != nil {
				t.Skip(storetest.NotRun + "no psql on this machine")
			}
			clusterDemo(t, db, url, js, setting)
		})
	}
}

func clusterDemo(t *testing.T, db storetest.Database, natsURL string, js jetstream.JetStream, setting string) {
	const nodes, devices = 2, 2
	temp := t.TempDir()
	out := &Output{}
	demo := exec.Command("scripts/cluster-demo")
	demo.Dir = "../.."
	demo.Env = append(os.Environ(), "BIN="+filepath.Dir(programs.Fleetd), fmt.Sprintf("NODES=%d", nodes), fmt.Sprintf("DEVICES=%d", devices), setting,
		fmt.Sprintf("PORT=%d", 10_000+os.Getpid()*31%5_000), // below the ports of other tests, which it would take between look and use
		"TMPDIR="+temp, "FLEETD_TEST_POSTGRES="+db.URL, "FLEETD_TEST_NATS="+natsURL, "FLEETD_ADMISSION=approve") // a setting of the caller's must not leak in
	demo.Stdout, demo.Stderr = out, out
	if err := demo.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = demo.Wait() // its output has more
		close(ended)
	}()
	interrupt := func() {
		_ = demo.Process.Signal(syscall.SIGINT) // it may have ended
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			_ = demo.Process.Kill()
			<-ended
			t.Errorf("the demo does not end:\n%s", out)
		}
	}
	defer interrupt()
	ready := time.After(60 * time.Second)
	for !strings.Contains(out.String(), "Ctrl-C ends") {
		select {
		case <-ended:
			t.Fatalf("the demo ended:\n%s", out)
		case <-ready:
			t.Fatalf("the demo is not ready after a minute:\n%s", out)
		case <-time.After(100 * time.Millisecond):
		}
	}
	calls := regexp.MustCompile(`(?m)^ {4}(\S+ call .*)$`).FindAllStringSubmatch(out.String(), -1)
	held := map[string]int{}
	for _, c := range calls {
		answer, err := exec.Command("bash", "-c", c[1]).CombinedOutput()
		var result struct {
			Node    string `json:"node"`
			IsError bool   `json:"isError"`
		}
		if err != nil || json.Unmarshal(answer, &result) != nil || result.IsError {
			t.Errorf("%s: %v\n%s", c[1], err, answer)
		}
		held[result.Node]++
	}
	if len(held) != 1 || held[""] != 0 || len(calls) < nodes {
		t.Errorf("%d calls were answered by %v, want one for each node, all answered by one", len(calls), held)
	}
	if rows := regexp.MustCompile(`(?m)^02:\S+ +online +mqtt +node-\d$`).FindAllString(out.String(), -1); len(rows) != nodes*devices {
		t.Errorf("%d devices are listed, want %d:\n%s", len(rows), nodes*devices, out)
	}
	if _, err := exec.LookPath("curl"); err == nil {
		ask := regexp.MustCompile(`(?m)^ {4}(curl .*)$`).FindStringSubmatch(out.String())
		devicetest.Eventually(t, "the nodes are listed", func() bool {
			answer, err := exec.Command("bash", "-c", ask[1]).Output()
			return err == nil && strings.Contains(string(answer), "node-1") && strings.Contains(string(answer), "node-2")
		})
	}

	interrupt()
	if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
		t.Errorf("left in the temporary directory: %v, %v", left, err)
	}
	mark := fmt.Sprintf("fleetd_demo_%d_", demo.Process.Pid)
	if n := db.Count(t, "SELECT count(*) FROM pg_database WHERE starts_with(datname, $1)", mark); n != 0 {
		t.Errorf("%d databases remains", n)
	}
	names := js.StreamNames(t.Context())
	for name := range names.Name() {
		if strings.Contains(name, strings.ToUpper(mark)) {
			t.Errorf("stream %s remains", name)
		}
	}
	if err := names.Err(); err != nil {
		t.Error(err)
	}
	if processes, err := exec.Command("pgrep", "-f", temp).Output(); err == nil {
		t.Errorf("processes remains: %s", processes)
	}
}
