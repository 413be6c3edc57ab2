package repotest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The command line is released for systems on which no test runs. Its types are checked as they are there, without the minutes that
// compiling takes for each. Nothing is released for linux/arm, which whoever compiles may have: its int has 32 bits.
func TestTypesElsewhere(t *testing.T) {
	if testing.Short() {
		t.Skip("IN VERIFY: takes half a minute with the race detector")
	}
	for _, system := range []string{"linux/arm64", "linux/arm", "windows/amd64", "darwin/arm64", "darwin/amd64"} {
		t.Run(system, func(t *testing.T) {
			if err := checkTypes(t, system, "../../cmd/fleetd"); err != nil {
				t.Error(err)
			}
		})
	}
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module other\n", "main.go": "package main\n\nimport \"syscall\"\n\nfunc main() { _ = syscall.Kill(1, 1) }\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := checkTypes(t, "windows/amd64", dir); err == nil || !strings.Contains(err.Error(), "syscall.Kill") {
		t.Errorf("a program that needs Unix: %v", err)
	}
}

// imports are the packages that were checked, by path.
type imports map[string]*types.Package

// listed is a package as go list prints it.
type listed struct {
	ImportPath, Dir string
	GoFiles         []string
	ImportMap       map[string]string
	Module          *struct{ Main bool }
}

// checkTypes checks the types of the package in dir and of all that it needs, as on a system like linux/arm64; of what is not in its
// module without the bodies of functions.
func checkTypes(t *testing.T, system, dir string) error {
	t.Helper()
	goos, goarch, _ := strings.Cut(system, "/")
	done := imports{"unsafe": types.Unsafe}
	for _, p := range goList[listed](t, dir, []string{"CGO_ENABLED=0", "GOOS=" + goos, "GOARCH=" + goarch}, "-deps", "-json=ImportPath,Dir,GoFiles,ImportMap,Module", ".") {
		if p.ImportPath == "unsafe" {
			continue
		}
		if err := done.check(&p, goarch); err != nil {
			return fmt.Errorf("%s: %w", p.ImportPath, err)
		}
	}
	return nil
}

func (done imports) check(p *listed, goarch string) error {
	places := token.NewFileSet()
	var files []*ast.File
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(places, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, f)
	}
	own := p.Module != nil && p.Module.Main
	config := types.Config{Sizes: types.SizesFor("gc", goarch), IgnoreFuncBodies: !own, Importer: importer(func(path string) (*types.Package, error) {
		if mapped := p.ImportMap[path]; mapped != "" {
			path = mapped
		}
		if found := done[path]; found != nil {
			return found, nil
		}
		return nil, fmt.Errorf("package %s is not known", path)
	})}
	checked, err := config.Check(p.ImportPath, places, files, nil)
	done[p.ImportPath] = checked
	return err
}

type importer func(path string) (*types.Package, error)

func (f importer) Import(path string) (*types.Package, error) { return f(path) }
