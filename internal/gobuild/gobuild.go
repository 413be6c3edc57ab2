// Package gobuild compiles programs of fleetd for tests and benches, whichever of the repository's modules these are in.
package gobuild

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Root returns the directory of the module fleetd.
func Root(ctx context.Context) (string, error) {
	command := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "fleetd")
	out, err := command.Output()
	if err != nil {
		return "", fmt.Errorf("find the module fleetd (run this inside the repository): %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Build compiles packages, such as "./cmd/fleetd", of the module in a directory below the root: "." or "bench". It writes
// the program to out, an absolute path; if that is a directory, each program has the name of its package.
func Build(ctx context.Context, module, out string, packages []string, flags ...string) error {
	root, err := Root(ctx)
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, "go", slices.Concat([]string{"build", "-o", out}, flags, packages)...)
	command.Dir = filepath.Join(root, module)
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", strings.Join(packages, " "), err, output)
	}
	return nil
}
