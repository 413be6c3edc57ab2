package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSecurityClaimsHaveTests holds docs/security.md to its word: every test
// that it names exists.
func TestSecurityClaimsHaveTests(t *testing.T) {
	const root = "../.."
	text, err := os.ReadFile(filepath.Join(root, "docs", "security.md"))
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	known := map[string]bool{}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, match := range declared.FindAllSubmatch(source, -1) {
			known[string(match[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w+)`").FindAllStringSubmatch(string(text), -1)
	if len(named) < 20 {
		t.Fatalf("docs/security.md names %d tests", len(named))
	}
	for _, match := range named {
		if !known[match[1]] {
			t.Errorf("docs/security.md names %s, which does not exist", match[1])
		}
	}
	for _, line := range strings.Split(string(text), "\n") {
		// The rows of claims have three columns: what, by what, and the tests.
		if columns := strings.Split(line, "|"); len(columns) == 5 && columns[1] != "---" && columns[3] != " tests " && strings.HasSuffix(strings.TrimSpace(columns[1]), ".") && !strings.Contains(columns[3], "`Test") {
			t.Errorf("a claim without a test: %s", columns[1])
		}
	}
}
