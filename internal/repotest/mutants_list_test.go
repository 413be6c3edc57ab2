package repotest

import (
	"cmp"
	"path"
	"slices"
	"strings"
	"testing"
)

// mutant is one edit of the program that a test must notice: a condition
// flipped, a check, a lock or a reset left out, a limit off by one. TestMutants
// applies it (build tag mutants).
type mutant struct {
	claim    string // of docs/security.md; empty for a mutant of a core package
	pkg      string // the directory of the package
	in       string // a function, Type.Method or other declaration of the package
	old, new string // old occurs once in it, whatever its format; an empty new leaves old out
	testPkg  string // of the test, if it is another than pkg
	test     string
	race     bool   // the race detector notices
	breaks   string // what is no longer so
}

// name is the claim, or the package, and what breaks.
func (m *mutant) name() string {
	return cmp.Or(m.claim, path.Base(m.pkg)) + ": " + m.breaks
}

// testDir is the directory of the test.
func (m *mutant) testDir() string { return cmp.Or(m.testPkg, m.pkg) }

// TestMutantsApply keeps the list true: what a mutant replaces is there, once,
// and its test belongs to the claim that it breaks. Its subtests have the names
// of those of TestMutants.
func TestMutantsApply(t *testing.T) {
	claims, _ := readClaims(t)
	tree := readTests(t)
	packages := sources{}
	names := map[string]bool{}
	broken := map[string]int{}
	for _, m := range mutants {
		if names[m.name()] {
			t.Errorf("two mutants are named %s", m.name())
		}
		names[m.name()] = true
		broken[cmp.Or(m.claim, m.pkg)]++
		t.Run(m.name(), func(t *testing.T) {
			if _, _, err := m.mutated(packages); err != nil {
				t.Error(err)
			}
			if !slices.Contains(tree.dirs[m.test], m.testDir()) {
				t.Errorf("%s has no test %s", m.testDir(), m.test)
			}
			if m.claim != "" && !slices.ContainsFunc(claims, func(c claim) bool {
				return c.id == m.claim && slices.ContainsFunc(c.tests, func(name string) bool {
					dir, test := tree.dirOf(name)
					return dir == m.testDir() && test == m.test
				})
			}) {
				t.Errorf("docs/security.md names no %s of %s for it", m.test, m.testDir())
			}
		})
	}
	for _, table := range []string{"K", "R", "H", "D", "N"} {
		if !slices.ContainsFunc(claims, func(c claim) bool { return strings.HasPrefix(c.id, table) && broken[c.id] > 0 }) {
			t.Errorf("no mutant breaks a claim %s", table)
		}
	}
	for _, dir := range coreDirs {
		if broken[dir] == 0 {
			t.Errorf("no mutant breaks %s", dir)
		}
	}
}

// coreDirs are the packages that have a mutant of their own.
var coreDirs = []string{"internal/access", "internal/audit", "internal/cluster", "internal/credential", "internal/devices", "internal/envelope", "internal/events",
	"internal/devices/session", "internal/hello", "internal/jsonspan", "internal/mcpclient", "internal/mqttdevice", "internal/writequeue", "internal/provision", "internal/store", "internal/udpaudio",
	"internal/wsdevice"}
