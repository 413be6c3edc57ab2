//go:build mutants

package repotest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// mutantTime bounds the test of one mutant, its compilation included.
const mutantTime = 5 * time.Minute

// failedLine is how go test reports a failed assertion.
var failedLine = regexp.MustCompile(`(?m)^ +(\w+_test\.go):(\d+): `)

// TestMutants applies each mutant in an overlay, so that no file of the tree
// changes, and runs its test, which must fail by an assertion; for a mutant of
// a claim, by one that is marked with it.
func TestMutants(t *testing.T) {
	tree, packages := readTests(t), sources{}
	var summary bytes.Buffer
	table := tabwriter.NewWriter(&summary, 0, 4, 2, ' ', 0)
	for _, m := range mutants {
		t.Run(m.name(), func(t *testing.T) {
			begun := time.Now()
			by, err := m.run(t, tree, packages)
			if err != nil {
				by = "NOT CAUGHT: " + strings.SplitN(err.Error(), "\n", 2)[0]
				t.Error(err)
			}
			fmt.Fprintf(table, "%s\t%s %s\t%s\t%.1fs\n", m.name(), m.pkg, m.in, by, time.Since(begun).Seconds())
		})
	}
	if err := table.Flush(); err != nil {
		t.Fatal(err)
	}
	t.Logf("the mutants and what caught them:\n%s", summary.String())
}

// run returns the assertion that caught the mutant.
func (m *mutant) run(t *testing.T, tree *testTree, packages sources) (by string, err error) {
	file, edited, err := m.mutated(packages)
	if err != nil {
		return "", err
	}
	original, err := filepath.Abs(file)
	if err != nil {
		return "", err
	}
	changed, overlay := filepath.Join(t.TempDir(), filepath.Base(file)), filepath.Join(t.TempDir(), "overlay.json")
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {original: changed}})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(changed, []byte(edited), 0o600); err != nil {
		return "", err
	}
	if err := os.WriteFile(overlay, replace, 0o600); err != nil {
		return "", err
	}
	args := []string{"test", "-overlay", overlay, "-vet=off", "-count=1", "-timeout", "2m", "-run", "^" + m.test + "$"}
	if m.race {
		args = append(args, "-race")
	}
	ctx, cancel := context.WithTimeout(t.Context(), mutantTime)
	defer cancel()
	command := exec.CommandContext(ctx, "go", append(args, "./"+m.testDir())...)
	command.Dir = root
	command.Env = append(os.Environ(), "GORACE=halt_on_error=1") // what follows a race may wait without end
	output, err := command.CombinedOutput()
	text := bytes.TrimSpace(output)
	switch {
	case err == nil:
		return "", fmt.Errorf("%s passes: nothing notices that %s", m.test, m.breaks)
	case bytes.Contains(output, []byte("[build failed]")) || bytes.Contains(output, []byte("[setup failed]")):
		return "", fmt.Errorf("it does not compile:\n%s", text)
	case m.race && bytes.Contains(output, []byte("WARNING: DATA RACE")):
		return m.test + ", by the race detector", nil
	}
	for _, found := range failedLine.FindAllStringSubmatch(string(output), -1) {
		line, err := strconv.Atoi(found[2])
		if err == nil && m.isItsOwn(tree, found[1], line) {
			return fmt.Sprintf("%s, %s:%d", m.test, found[1], line), nil
		}
	}
	return "", fmt.Errorf("%s fails, but not by an assertion:\n%s", m.test, text) // a panic, or the end of its time
}

// isItsOwn reports whether an assertion is one of the mutant's claim. Mutants of
// core packages take any.
func (m *mutant) isItsOwn(tree *testTree, file string, line int) bool {
	return m.claim == "" || slices.ContainsFunc(tree.markers, func(k marker) bool {
		return k.dir == m.testDir() && k.file == file && k.from <= line && line <= k.to && slices.Contains(k.ids, m.claim)
	})
}
