// Package goldentest compares what a program writes with a file of the repository, in
// tests. `make reference` runs these tests with FLEETD_TEST_UPDATE=1, which writes
// the files instead.
package goldentest

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// Compare fails unless the file at path, relative to the package, has this
// content. With FLEETD_TEST_UPDATE=1 it writes the file.
func Compare(t testing.TB, path string, content []byte) {
	t.Helper()
	if os.Getenv("FLEETD_TEST_UPDATE") == "1" {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; write it with `make reference`", err)
	}
	if bytes.Equal(have, content) {
		return
	}
	old, now := bytes.Split(have, []byte("\n")), bytes.Split(content, []byte("\n"))
	for i := 0; ; i++ {
		switch {
		case i < len(old) && i < len(now) && bytes.Equal(old[i], now[i]):
			continue
		case i >= len(old):
			t.Fatalf("%s differs from the program from line %d on, which is missing: %q; run `make reference` and commit the file", path, i+1, now[i])
		case i >= len(now):
			t.Fatalf("%s has lines that the program does not write, from line %d on: %q; run `make reference` and commit the file", path, i+1, old[i])
		}
		t.Fatalf("%s differs from the program in line %d:\n  file    %q\n  program %q\nrun `make reference` and commit the file", path, i+1, old[i], now[i])
	}
}
