package node

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// Whatever a node writes into its data directory goes through package durable,
// or a power cut leaves it empty: here and in the client's package, which writes
// run.json, nothing else makes or renames a file.
func TestFilesAreWrittenDurably(t *testing.T) {
	writes := map[string]bool{"WriteFile": true, "Create": true, "CreateTemp": true, "OpenFile": true, "Rename": true, "Link": true,
		"Symlink": true, "Mkdir": true, "MkdirAll": true}
	allowed := map[string]bool{
		"datadir.go: OpenFile":   true, // the lock, which holds nothing
		"storage.go: CreateTemp": true, // removed at once: is there room?
	}
	for _, dir := range []string{".", "../apiclient"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, name, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(file, func(n ast.Node) bool {
				s, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				if pkg, ok := s.X.(*ast.Ident); ok && pkg.Name == "os" && writes[s.Sel.Name] && !allowed[filepath.Base(name)+": "+s.Sel.Name] {
					t.Errorf("%s: os.%s; use package durable", set.Position(s.Pos()), s.Sel.Name)
				}
				return true
			})
		}
	}
}
