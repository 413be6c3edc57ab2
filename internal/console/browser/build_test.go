package browser

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A fresh clone is built by make with Go, a C compiler and what every system has, without Node and without a network where
// the modules are there, and its program has the console.
func TestBuiltWithGoAlone(t *testing.T) {
	long(t)
	dir := t.TempDir()
	tree, tools := filepath.Join(dir, "clone"), filepath.Join(dir, "tools")
	if out, err := exec.CommandContext(t.Context(), "git", "clone", "-q", filepath.Join("..", "..", ".."), tree).CombinedOutput(); err != nil {
		t.Skipf("NOT RUN: this is not a clone: %s", out)
	}
	if err := os.Mkdir(tools, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"go", "cc", "gcc", "make", "bash", "sh", "env", "git", "dirname"} {
		path, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(path, filepath.Join(tools, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	goEnv := func(name string) string {
		out, err := exec.CommandContext(t.Context(), "go", "env", name).Output()
		if err != nil {
			t.Fatal(err)
		}
		return name + "=" + strings.TrimSpace(string(out))
	}
	command := exec.CommandContext(t.Context(), "make", "build")
	command.Dir = tree
	command.Env = []string{"PATH=" + tools, "HOME=" + dir, "GOFLAGS=-mod=mod", "GOPROXY=off", goEnv("GOCACHE"), goEnv("GOMODCACHE"), goEnv("GOROOT")}
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	built := programs
	built.Fleetd = filepath.Join(tree, "bin", "fleetd")
	n := built.Start(t)
	answer, err := http.Get(n.Info.API + "/console/")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }() // read to its end
	if page, err := io.ReadAll(answer.Body); err != nil || answer.StatusCode != http.StatusOK || !strings.Contains(string(page), "/app/main.js") {
		t.Errorf("%d %s, %v", answer.StatusCode, page, err)
	}
}
