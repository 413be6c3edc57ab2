package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fleetd/internal/backup"
)

// What goes in and comes out of an archive is tested in internal/node; here, what people are told.
func TestBackupCommands(t *testing.T) {
	run := func(environ []string, args ...string) outcome {
		a, stdout, stderr := newApp()
		a.environ = environ
		code := a.run(t.Context(), args)
		return outcome{code, stdout.String(), stderr.String()}
	}
	dir := t.TempDir()
	run(nil, "backup").is(t, exitFailed, "", "fleetd: missing flags: --output=FILE|DIR (see fleetd backup --help)\n")
	run([]string{"FLEETD_DATA_DIR=" + dir}, "backup", "-o", t.TempDir()).is(t, exitFailed, "",
		"fleetd: "+dir+" holds no fleetd.db; give --database as the node has it, or another --data-dir\n")

	// A node with Postgres that was given its secret leaves little to back up, and the report has that.
	if err := os.WriteFile(filepath.Join(dir, "ports.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	got := run([]string{"FLEETD_DATA_DIR=" + dir, "FLEETD_SECRET=0123456789abcdef", "FLEETD_DATABASE=postgres://f:pw@db/f"}, "backup", "-o", file)
	for _, want := range []string{"Backup of a node that is not running: " + file + ", ", " bytes, 1 file.\n", "\nThe database is not in it", "\nThe secret is not in it", "'postgres://f@db/f'"} {
		if got.code != exitOK || !strings.Contains(got.stdout, want) || strings.Contains(got.stdout, "pw") {
			t.Errorf("%+v, want %q", got, want)
		}
	}
	to := filepath.Join(t.TempDir(), "to")
	got = run([]string{"FLEETD_DATA_DIR=" + to}, "restore", file)
	for _, want := range []string{"Restored 1 file into " + to, "\nThe backup holds no secret", "\nThe backup holds no database", "\nStart it with: fleetd serve --data-dir " + to + "\n"} {
		if got.code != exitOK || !strings.Contains(got.stdout, want) {
			t.Errorf("%+v, want %q", got, want)
		}
	}
	run(nil, "restore", filepath.Join(dir, "ports.json"), "--data-dir", to).is(t, exitFailed, "",
		"fleetd: "+filepath.Join(dir, "ports.json")+" is not a backup made by `fleetd backup`\n")
}

// A restore says what it halted, and how to go on; of nothing it says nothing.
func TestHaltedText(t *testing.T) {
	for _, c := range []struct {
		halted backup.Halted
		want   []string
	}{
		{backup.Halted{}, nil},
		{backup.Halted{Jobs: 1}, []string{"Halted: 1 open job, since "}},
		{backup.Halted{Jobs: 3, Schedules: 2}, []string{"Halted: 3 open jobs, of which 2 schedules"}},
		{backup.Halted{Jobs: 1, Kept: 2}, []string{"Halted: 1 open job, since ", "Kept: 2 schedules."}},
	} {
		got := haltedText(c.halted)
		if len(got) != len(c.want) {
			t.Errorf("%+v: %q", c.halted, got)
			continue
		}
		for i := range got {
			if !strings.HasPrefix(got[i], c.want[i]) || strings.HasPrefix(got[i], "Halted") && !strings.Contains(got[i], "fleetd jobs resume") {
				t.Errorf("%+v: %q, want %q", c.halted, got[i], c.want[i])
			}
		}
	}
}
