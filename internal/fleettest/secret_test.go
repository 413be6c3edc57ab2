package fleettest

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fleetd/internal/apiclient"
)

// rediscover takes the token that the node's directory has now.
func (n *Node) rediscover(t *testing.T) {
	t.Helper()
	var err error
	if n.Client, err = apiclient.Discover(n.Dir, "", ""); err != nil {
		t.Fatal(err)
	}
}

// The secret of three nodes with 200 devices is rotated, and the node that did it is
// killed at once: devices go on, those that boot get new credentials, the old admin
// token is dead everywhere, chip keys are sealed anew, and the audit is whole.
func TestRotateSecret(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Seed: 1})
	const stay, boot = 100, 100
	programs.Simulate(t, c.OTA, "--devices", "100", "--transport", "mqtt", "--profile", "fw-2.4", "--reconnect", "200ms", "--time-scale", "0.2")
	booting := func() *Simulation {
		return programs.Simulate(t, c.OTA, "--devices", "100", "--mac-base", "02:f1:ee:01:00:00", "--transport", "websocket", "--profile", "fw-2.4", "--time-scale", "0.2", "--wake", "5s")
	}
	second := booting()
	c.AwaitReady(t, stay+boot, time.Minute)
	file := filepath.Join(t.TempDir(), "keys.csv")
	const chips = 300 // more than are sealed anew at once
	var list strings.Builder
	list.WriteString("serial,key\n")
	for i := range chips {
		list.WriteString("SN" + strings.Repeat("0", 27) + string([]byte{'0' + byte(i/100), '0' + byte(i/10%10), '0' + byte(i%10)}) + "," + strings.Repeat("5a", 32) + "\n")
	}
	if err := os.WriteFile(file, []byte(list.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, errs, status := c.Nodes[0].Command(t, "chips", "import", file); status != 0 {
		t.Fatalf("%s %s", out, errs)
	}
	awaitOnline := func(count int) { // the rows of devices come a moment after these are ready
		t.Helper()
		c.Nodes[1].Await(t, fmt.Sprintf("the database has %d devices online", count), 20*time.Second, func() bool {
			return c.DB.Count(t, `SELECT count(*) FROM presence WHERE online`) == count
		})
	}
	awaitOnline(stay + boot)

	first := c.Nodes[0].Token(t)
	if _, errs, status := c.Nodes[0].Command(t, "secret", "rotate", "--grace", "1h"); status != 2 || !strings.Contains(errs, "add --yes") {
		t.Fatalf("without a yes: %d %s", status, errs)
	}
	out, errs, status := c.Nodes[0].Command(t, "secret", "rotate", "--grace", "1h", "--yes")
	if status != 0 || !strings.Contains(out, "secret 1 is in force") {
		t.Fatalf("%s %s", out, errs)
	}
	c.Nodes[0].Kill(t)
	for _, n := range c.Nodes[1:] {
		// security: K18
		n.Await(t, "the old admin token is dead", 10*time.Second, func() bool { return n.Status(t, first) == http.StatusUnauthorized })
		n.Await(t, "the new one is in its file", 10*time.Second, func() bool { return n.Status(t, n.Token(t)) == http.StatusOK })
		n.rediscover(t)
	}
	c.Nodes[0].Run(t)
	c.Nodes[0].rediscover(t)
	if token := c.Nodes[1].Token(t); token != c.Nodes[0].Token(t) || token != c.Nodes[2].Token(t) || token == first {
		t.Error("the nodes do not have the same new token")
	}
	if n := c.DB.Count(t, `SELECT count(*) FROM attestation_keys WHERE sealed LIKE '1:%'`); n != chips {
		c.Nodes[1].Await(t, "chip keys are sealed anew", 20*time.Second, func() bool {
			return c.DB.Count(t, `SELECT count(*) FROM attestation_keys WHERE sealed LIKE '1:%'`) == chips
		})
	}
	second.Report(t)                   // ends it
	c.AwaitReady(t, stay, time.Minute) // those of the killed node came back with what they had
	booting()
	c.AwaitReady(t, stay+boot, time.Minute)
	if n := c.DB.Count(t, `SELECT count(*) FROM presence WHERE online AND generation = 1 AND device >= '02:f1:ee:01'`); n != boot {
		c.Nodes[1].Await(t, "all that booted are noted with new credentials", 20*time.Second, func() bool {
			return c.DB.Count(t, `SELECT count(*) FROM presence WHERE online AND generation = 1 AND device >= '02:f1:ee:01'`) == boot
		})
	}
	awaitOnline(stay + boot)
	// Calls between nodes are signed with the new secret, and are accepted from everywhere.
	for i, n := range c.Nodes {
		for _, id := range []string{"02:f1:ee:00:00:00", "02:f1:ee:00:00:07", "02:f1:ee:01:00:03"} {
			if r, err := n.Volume(t, id, 10*time.Second); err != nil || r.IsError {
				t.Errorf("node %d, %s: %+v, %v", i, id, r, err)
			}
		}
	}
	if out, errs, status := c.Nodes[2].Command(t, "audit", "verify"); status != 0 {
		t.Errorf("audit: %s %s", out, errs)
	}
	if out, _, _ := c.Nodes[2].Command(t, "changes", "--json"); !strings.Contains(out, `"secret":1`) || strings.Contains(out, "sealed") {
		t.Error("the change log does not have the rotation, or shows what is sealed")
	}
	if _, errs, status := c.Nodes[2].Command(t, "secret", "rotate", "--yes"); status != 2 || !strings.Contains(errs, "rotated already") {
		t.Errorf("within the grace: %d %s", status, errs)
	}
	before := c.Nodes[2].Token(t)
	if out, errs, status := c.Nodes[2].Command(t, "secret", "rotate", "--admin-only", "--yes"); status != 0 || !strings.Contains(out, "the new admin token is in ") {
		t.Errorf("%s %s", out, errs)
	}
	for _, n := range c.Nodes {
		// security: K18
		n.Await(t, "the old admin token is not valid", 10*time.Second, func() bool { return n.Status(t, before) == http.StatusUnauthorized })
	}
}

// A backup from before a rotation, and one from after it, start with the secret of
// their directory, and a node without it does not.
func TestBackupAfterRotation(t *testing.T) {
	t.Parallel()
	n := programs.Start(t)
	dir := t.TempDir()
	older, newer := filepath.Join(dir, "older.tar.gz"), filepath.Join(dir, "newer.tar.gz")
	run := func(args ...string) {
		t.Helper()
		if out, errs, status := n.Command(t, args...); status != 0 {
			t.Fatalf("%q: %s %s", args, out, errs)
		}
	}
	before := n.Token(t)
	run("backup", "-o", older)
	run("secret", "rotate", "--yes")
	after := n.Token(t)
	if after == before {
		t.Error("the command ended before the new token was in its file")
	}
	run("backup", "-o", newer)
	n.Stop(t)
	for file, want := range map[string]string{older: before, newer: after} {
		restored := &Node{Dir: filepath.Join(t.TempDir(), "data"), programs: programs}
		if out, errs, status := restored.Command(t, "restore", file); status != 0 {
			t.Fatalf("%s: %s %s", file, out, errs)
		}
		restored.Run(t)
		if restored.Status(t, want) != http.StatusOK || restored.Token(t) != want {
			t.Errorf("%s: the token of its time is not accepted", filepath.Base(file))
		}
		restored.Stop(t)
	}
}
