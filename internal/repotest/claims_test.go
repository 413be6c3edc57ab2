package repotest

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// root is the top of the tree, as tests of this package see it.
const root = "../.."

// claim is one row of the tables of docs/security.md.
type claim struct {
	id, text string
	tests    []string // TestName, or package.TestName
}

var (
	claimRow  = regexp.MustCompile(`^\| ([A-Z][0-9]+) \| (.+?) \| (.*?) \| (.*?) \|$`)
	namedTest = regexp.MustCompile("`((?:[a-z]+\\.)?(?:Test|Fuzz)[A-Z]\\w*)`")
)

// readClaims reads the tables of docs/security.md. others are the tests that
// its text names outside of them. Every row with a test must be a claim.
func readClaims(t *testing.T) (claims []claim, others []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "docs", "security.md"))
	if err != nil {
		t.Fatal(err)
	}
	names := func(text string) (out []string) {
		for _, match := range namedTest.FindAllStringSubmatch(text, -1) {
			out = append(out, match[1])
		}
		return out
	}
	in := false // a table of claims
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		switch m := claimRow.FindStringSubmatch(line); {
		case line == "| id | claim | by | tests |":
			in = true
		case !strings.HasPrefix(line, "|"):
			in = false
			others = append(others, names(line)...)
		case !in, strings.HasPrefix(line, "|---"):
		case m == nil:
			t.Errorf("docs/security.md: not a row of id, claim, by, tests: %s", line)
		default:
			claims = append(claims, claim{m[1], m[2], names(m[4])})
		}
	}
	return claims, others
}

// marker is a comment `// security: K3 K5` in a test, on the line above the
// assertion that fails when these claims are no longer true.
type marker struct {
	ids      []string
	dir      string // of the package
	file     string // its base name
	line     int    // of the comment
	from, to int    // the lines of the marked statement; 0: there is none
	in       string // the function around it
	asserts  bool   // the statement begins with an assertion
}

// near is how many lines below its marker an assertion may begin: a condition
// and what it needs.
const near = 4

var markerText = regexp.MustCompile(`^// security:((?: [A-Z][0-9]+)+)$`)

// testTree is what the test files below root contain.
type testTree struct {
	dirs    map[string][]string // of packages, by the test declared there
	markers []marker
	uses    map[string]map[string][]string // by directory and function: the functions named in it
}

// readTests reads every test file. Those of packages without a marker are
// searched for their tests alone.
func readTests(t *testing.T) *testTree {
	t.Helper()
	tree := &testTree{dirs: map[string][]string{}, uses: map[string]map[string][]string{}}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	texts, marked := map[string]map[string][]byte{}, map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		// Packages for tests alone hold helpers in ordinary files.
		if !strings.HasSuffix(path, "_test.go") && !slices.Contains(helperDirs, dir) {
			return nil
		}
		text, err := os.ReadFile(path)
		if texts[dir] == nil {
			texts[dir] = map[string][]byte{}
		}
		texts[dir][filepath.Base(path)] = text
		for _, match := range declared.FindAllSubmatch(text, -1) {
			tree.dirs[string(match[1])] = append(tree.dirs[string(match[1])], dir)
		}
		marked[dir] = marked[dir] || bytes.Contains(text, []byte("// security: "))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	helpers := map[string]bool{}
	for _, dir := range helperDirs {
		tree.readPackage(t, dir, texts[dir], helpers)
	}
	for dir, files := range texts {
		if marked[dir] && !slices.Contains(helperDirs, dir) {
			known := map[string]bool{}
			for name := range helpers {
				known[name] = true
			}
			tree.readPackage(t, dir, files, known)
		}
	}
	return tree
}

// helperDirs are packages whose helpers assert for tests of others.
var helperDirs = []string{"internal/devicetest", "internal/fleettest"}

// readPackage parses the files of one package. helpers are the functions that
// assert in the name of their caller; those of this package are added.
func (tree *testTree) readPackage(t *testing.T, dir string, texts map[string][]byte, helpers map[string]bool) {
	t.Helper()
	set := token.NewFileSet()
	var files []*ast.File
	declared := map[string]bool{}
	for name, text := range texts {
		f, err := parser.ParseFile(set, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok {
				declared[fn.Name.Name] = true
			}
		}
	}
	for known := -1; known != len(helpers); { // some assert by way of others
		known = len(helpers)
		for _, f := range files {
			findHelpers(f, helpers)
		}
	}
	uses := map[string][]string{}
	tree.uses[dir] = uses
	for _, f := range files {
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Body == nil {
				continue
			}
			ast.Inspect(fn.Body, func(n ast.Node) bool {
				if id, ok := n.(*ast.Ident); ok && declared[id.Name] {
					uses[fn.Name.Name] = append(uses[fn.Name.Name], id.Name)
				}
				return true
			})
		}
		tree.readMarkers(t, set, dir, f, helpers)
	}
}

// findHelpers adds the functions, closures included, that call t.Helper and
// assert: what fails in them is reported at the line of their caller.
func findHelpers(f *ast.File, helpers map[string]bool) {
	add := func(name string, body *ast.BlockStmt) {
		if body == nil {
			return
		}
		helps := false
		for _, s := range body.List {
			if x, ok := s.(*ast.ExprStmt); ok {
				if call, ok := x.X.(*ast.CallExpr); ok {
					sel, ok := call.Fun.(*ast.SelectorExpr)
					helps = helps || ok && sel.Sel.Name == "Helper"
				}
			}
		}
		if helps && firstAssertion(body, helpers).IsValid() {
			helpers[name] = true
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			add(n.Name.Name, n.Body)
		case *ast.AssignStmt:
			for i, x := range n.Rhs {
				if fn, ok := x.(*ast.FuncLit); ok && i < len(n.Lhs) {
					if id, ok := n.Lhs[i].(*ast.Ident); ok {
						add(id.Name, fn.Body)
					}
				}
			}
		}
		return true
	})
}

// firstAssertion is where the first assertion within n begins: a call of
// Error, Errorf, Fatal or Fatalf of a testing.TB, or of a helper.
func firstAssertion(n ast.Node, helpers map[string]bool) (at token.Pos) {
	ast.Inspect(n, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || at.IsValid() {
			return !at.IsValid()
		}
		switch fn := call.Fun.(type) {
		case *ast.Ident:
			ok = helpers[fn.Name]
		case *ast.SelectorExpr:
			switch fn.Sel.Name {
			case "Error", "Errorf", "Fatal", "Fatalf":
				ok = len(call.Args) > 0 // err.Error() has none
			default:
				ok = helpers[fn.Sel.Name]
			}
		default:
			ok = false
		}
		if ok {
			at = call.Pos()
		}
		return true
	})
	return at
}

// readMarkers finds the markers of a file and what they mark.
func (tree *testTree) readMarkers(t *testing.T, set *token.FileSet, dir string, f *ast.File, helpers map[string]bool) {
	t.Helper()
	at := map[int]*marker{} // by the line that must hold the statement
	for _, group := range f.Comments {
		for _, c := range group.List {
			if !strings.HasPrefix(c.Text, "// security: ") {
				continue
			}
			p := set.Position(c.Pos())
			m := markerText.FindStringSubmatch(c.Text)
			if m == nil {
				t.Errorf("%s/%s:%d: write `// security: K1 K2` on a line of its own", dir, p.Filename, p.Line)
				continue
			}
			at[p.Line+1] = &marker{ids: strings.Fields(m[1]), dir: dir, file: p.Filename, line: p.Line}
		}
	}
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || len(at) == 0 {
			continue
		}
		ast.Inspect(fn, func(n ast.Node) bool {
			s, ok := n.(ast.Stmt)
			if !ok {
				return true
			}
			from := set.Position(s.Pos()).Line
			if m := at[from]; m != nil && m.from == 0 { // the outermost that begins there
				m.from, m.to, m.in = from, set.Position(s.End()).Line, fn.Name.Name
				first := firstAssertion(s, helpers)
				m.asserts = first.IsValid() && set.Position(first).Line < from+near
			}
			return true
		})
	}
	for _, m := range at {
		tree.markers = append(tree.markers, *m)
	}
}

// dirOf is the directory of the package that declares a test, named with its
// package or without. It is empty if there is none, or more than one.
func (tree *testTree) dirOf(name string) (dir, test string) {
	pkg, test, qualified := strings.Cut(name, ".")
	if !qualified {
		pkg, test = "", name
	}
	dirs := slices.Clone(tree.dirs[test])
	if qualified {
		dirs = slices.DeleteFunc(dirs, func(dir string) bool { return filepath.Base(dir) != pkg })
	}
	if len(dirs) != 1 {
		return "", test
	}
	return dirs[0], test
}

// reaches reports whether a test is the function, or calls it by way of others of
// its package.
func (tree *testTree) reaches(dir, test, function string) bool {
	seen := map[string]bool{test: true}
	for next := []string{test}; len(next) > 0; next = next[1:] {
		if next[0] == function {
			return true
		}
		for _, name := range tree.uses[dir][next[0]] {
			if !seen[name] {
				seen[name] = true
				next = append(next, name)
			}
		}
	}
	return false
}
