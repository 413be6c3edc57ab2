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
