package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// maxLines is how many product lines a package of the core may have.
const maxLines = 2500

// overSize are the packages that may have more, each with its reason.
var overSize = map[string]int{
	"internal/devices":         2600, // the words of all parts; it has no state to cut along
	"internal/devices/session": 3000, // a session, its entry and its claims change under two locks; a seam would be a third
}

// sized is a row of the table in docs/architecture.md, under "The core in numbers".
var sized = regexp.MustCompile("(?m)^\\| `(internal/[a-z/]+)` \\| ([0-9,]+) \\| [^|]+ \\|$")

// The packages of the core have a size that one can read, which the table has.
func TestPackageSizes(t *testing.T) {
	text, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]int{}
	for _, row := range sized.FindAllStringSubmatch(string(text), -1) {
		n, err := strconv.Atoi(strings.ReplaceAll(row[2], ",", ""))
		if err != nil {
			t.Fatal(err)
		}
		listed[row[1]] = n
	}
	for _, part := range []string{"internal/devices", "internal/devices/*", "internal/fleet", "internal/access", "internal/store", "internal/store/*", "internal/cluster", "internal/events"} {
		dirs, err := filepath.Glob("../../" + part)
		if err != nil || len(dirs) == 0 {
			t.Fatalf("%s: %v, %v", part, dirs, err)
		}
		for _, dir := range dirs {
			name := strings.TrimPrefix(filepath.ToSlash(dir), "../../")
			lines := productLines(t, dir)
			if lines == 0 || strings.HasSuffix(name, "test") {
				continue
			}
			if most := max(maxLines, overSize[name]); lines > most {
				t.Errorf("%s has %d lines, at most %d are allowed: find the seam", name, lines, most)
			}
			if n := listed[name]; n < lines-100 || n > lines+100 {
				t.Errorf("%s has %d lines; the table in docs/architecture.md has %d", name, lines, n)
			}
		}
	}
}

// productLines counts the lines of a package without its tests.
func productLines(t *testing.T, dir string) (lines int) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		lines += bytes.Count(text, []byte("\n"))
	}
	return lines
}
