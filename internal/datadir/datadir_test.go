package datadir

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestLockedAndPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d")
	d, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := Open(path); err == nil || !strings.Contains(err.Error(), "in use by another fleetd") {
		t.Errorf("second node: %v", err)
	}
	first, err := d.Secret("")
	if err != nil || len(first) != 64 {
		t.Fatal(first, err)
	}
	if again, err := d.Secret(""); err != nil || again != first {
		t.Error("the secret changes between starts")
	}
	if given, err := d.Secret("given secret"); err != nil || given != "given secret" {
		t.Error("a given secret does not win")
	}
	info, err := os.Stat(d.File(FileSecret))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

func TestRunInfo(t *testing.T) {
	dir := t.TempDir()
	info := RunInfo{PID: 7, Node: "n-1", Version: "v1", API: "http://127.0.0.1:8080", Device: "http://192.0.2.1:8000",
		OTA: "http://192.0.2.1:8000/xiaozhi/ota/", NATS: "nats://127.0.0.1:4222", Started: time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC)}
	for range 2 { // the second replaces the first
		if err := WriteRunInfo(dir, info); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := ReadRunInfo(dir); err != nil || got != info {
		t.Errorf("%+v, %v", got, err)
	}
	stat, err := os.Stat(filepath.Join(dir, "run.json"))
	if err != nil || stat.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", stat.Mode(), err)
	}
	for range 2 { // the second finds nothing to remove
		if err := RemoveRunInfo(dir); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("files remain: %v, %v", left, err)
	}
	if err := WriteRunInfo(filepath.Join(dir, "none"), info); err == nil {
		t.Error("wrote into a directory that does not exist")
	}
}

// An empty secret is not taken for one, and the error names the file; empty ports are chosen again.
func TestEmptyFiles(t *testing.T) {
	path := t.TempDir()
	for _, name := range []string{FileSecret, FilePorts} {
		if err := os.WriteFile(filepath.Join(path, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	if secret, err := d.Secret(""); err == nil || secret != "" || !strings.Contains(err.Error(), d.File(FileSecret)) {
		t.Errorf("secret %q, %v", secret, err)
	}
	ports := map[string]string{"a": "b"}
	if err := d.ReadJSON(FilePorts, &ports); err != nil || ports["a"] != "b" {
		t.Errorf("%v, %v", ports, err)
	}
}

// A file that is written again with the same content is left alone: there may be no room for a copy of it.
func TestSameContentIsNotWritten(t *testing.T) {
	d, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	if err := d.Write(FileToken, []byte("x")); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(d.File(FileToken))
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Write(FileToken, []byte("x")); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(d.File(FileToken))
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("another file, %v", err)
	}
}
