package durable

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// watch records what is synced, without the random part of temporary names.
func watch(t *testing.T) *[]string {
	t.Helper()
	var synced []string
	real := syncFile
	syncFile = func(f *os.File) error {
		name, _, _ := strings.Cut(filepath.Base(f.Name()), ".")
		if info, err := f.Stat(); err == nil && !info.IsDir() && info.Size() == 0 {
			t.Errorf("%s is synced before it has its bytes", name)
		}
		synced = append(synced, name)
		return real(f)
	}
	t.Cleanup(func() { syncFile = real })
	return &synced
}

// Every write syncs the content first, then the directory.
func TestEveryWriteIsSynced(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	synced := watch(t)
	for _, step := range []struct {
		name string
		do   func() error
		want []string
	}{
		{"make two directories", func() error { return MkdirAll(filepath.Join(dir, "below")) }, []string{filepath.Base(filepath.Dir(dir)), "data"}},
		{"make them again", func() error { return MkdirAll(filepath.Join(dir, "below")) }, nil},
		{"write", func() error { return WriteFile(filepath.Join(dir, "secret"), []byte("a")) }, []string{"secret", "data"}},
		{"replace", func() error { return WriteFile(filepath.Join(dir, "secret"), []byte("b")) }, []string{"secret", "data"}},
		{"create", func() error { return Create(filepath.Join(dir, "copy"), 0o600, strings.NewReader("c")) }, []string{"copy", "data"}},
		{"append", func() error { return Append(filepath.Join(dir, "copy"), 10, []byte("d")) }, []string{"copy", "data"}},
		{"rename", func() error { return Rename(filepath.Join(dir, "copy"), filepath.Join(dir, "last")) }, []string{"data"}},
	} {
		*synced = nil
		// security: N7
		if err := step.do(); err != nil || !slices.Equal(*synced, step.want) {
			t.Errorf("%s: synced %v, want %v; error %v", step.name, *synced, step.want, err)
		}
	}
	for name, want := range map[string]string{"secret": "b", "last": "cd"} {
		path := filepath.Join(dir, name)
		content, err := os.ReadFile(path)
		if info, _ := os.Stat(path); err != nil || string(content) != want || info.Mode().Perm() != 0o600 {
			t.Errorf("%s holds %q with mode %v, %v", name, content, info.Mode(), err)
		}
	}
}

// A failed write leaves the old content, and no other file.
func TestFailedWriteLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.json")
	if err := WriteFile(path, []byte("old")); err != nil {
		t.Fatal(err)
	}
	real := syncFile
	syncFile = func(*os.File) error { return os.ErrDeadlineExceeded }
	t.Cleanup(func() { syncFile = real })
	if err := WriteFile(path, []byte("new")); err == nil {
		t.Error("a write that was not synced is reported as written")
	}
	entries, err := os.ReadDir(dir)
	content, _ := os.ReadFile(path)
	if err != nil || len(entries) != 1 || string(content) != "old" {
		t.Errorf("%v, %q, %v", entries, content, err)
	}
	if err := Append(path, 2, []byte("more")); err == nil {
		t.Error("a file was appended to beyond its limit")
	}
}
