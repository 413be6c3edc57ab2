package repotest

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// declaration is a function, method, type, variable or constant.
type declaration struct {
	file     string // its path
	text     []byte // of the whole file
	from, to int    // the bytes of the declaration in text
}

// sources has the declarations of each package read so far, by the directory
// below root and the name: hashOf, or Registry.Put for a method. A name has
// several if files for other platforms declare it, too.
type sources map[string]map[string][]declaration

// declarations parses the files of a package that are not tests.
func (s sources) declarations(dir string) (map[string][]declaration, error) {
	if s[dir] != nil {
		return s[dir], nil
	}
	files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if err := s.parse(dir, file, text); err != nil {
			return nil, err
		}
	}
	return s[dir], nil
}

// parse adds the declarations of one file.
func (s sources) parse(dir, file string, text []byte) error {
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, file, text, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	if s[dir] == nil {
		s[dir] = map[string][]declaration{}
	}
	add := func(name string, n ast.Node) {
		d := declaration{file, text, set.Position(n.Pos()).Offset, set.Position(n.End()).Offset}
		s[dir][name] = append(s[dir][name], d)
	}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			add(receiver(d)+d.Name.Name, d)
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					add(spec.Name.Name, spec)
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						add(name.Name, spec)
					}
				}
			}
		}
	}
	return nil
}

// receiver returns the type that a method belongs to and a dot, or nothing for a
// function. In *Queue[K] the first name is that of the type.
func receiver(d *ast.FuncDecl) (prefix string) {
	if d.Recv == nil {
		return ""
	}
	ast.Inspect(d.Recv.List[0].Type, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && prefix == "" {
			prefix = id.Name + "."
		}
		return prefix == ""
	})
	return prefix
}

// lexeme is a token and where it is in its text.
type lexeme struct {
	kind     token.Token
	literal  string
	from, to int
}

// is reports whether two lexemes are the same token.
func (x lexeme) is(y lexeme) bool { return x.kind == y.kind && x.literal == y.literal }

// lex returns the tokens of a text without comments. A semicolon that the scanner
// puts at the end of a line equals a written one. Those before a closing bracket
// and at the end are left out, because one line does not need them there.
func lex(text []byte) (list []lexeme) {
	var s scanner.Scanner
	file := token.NewFileSet().AddFile("", -1, len(text))
	s.Init(file, text, nil, 0)
	for {
		pos, kind, literal := s.Scan()
		switch last := len(list) - 1; kind {
		case token.SEMICOLON:
			literal = ";"
		case token.RPAREN, token.RBRACE, token.EOF:
			if last >= 0 && list[last].kind == token.SEMICOLON {
				list = list[:last]
			}
		}
		if kind == token.EOF {
			return list
		}
		literal = cmp.Or(literal, kind.String())
		list = append(list, lexeme{kind, literal, file.Offset(pos), file.Offset(pos) + len(literal)})
	}
}

// edits returns the file with old replaced, once for each place in the
// declaration where old occurs.
func (d *declaration) edits(old, replacement string) (texts []string) {
	want, have := lex([]byte(old)), lex(d.text[d.from:d.to])
	for i := 0; len(want) > 0 && i+len(want) <= len(have); i++ {
		j := 0
		for j < len(want) && have[i+j].is(want[j]) {
			j++
		}
		if j == len(want) {
			from, to := d.from+have[i].from, d.from+have[i+j-1].to
			texts = append(texts, string(d.text[:from])+replacement+string(d.text[to:]))
		}
	}
	return texts
}

// mutated returns the path of the file that the mutant is in and its text with
// the edit.
func (m *mutant) mutated(s sources) (file, text string, err error) {
	declared, err := s.declarations(m.pkg)
	if err != nil {
		return "", "", err
	}
	if len(declared[m.in]) == 0 {
		return "", "", fmt.Errorf("%s does not declare %s; set `in` to the function that contains this now: %q", m.pkg, m.in, m.old)
	}
	found := 0
	for _, d := range declared[m.in] {
		for _, text = range d.edits(m.old, m.new) {
			file = d.file
			found++
		}
	}
	if found != 1 {
		return "", "", fmt.Errorf("%s of %s contains the text %d times; change `old` to a text that it contains once, or `in` if the text has moved: %q", m.in, m.pkg, found, m.old)
	}
	if m.old == m.new {
		return "", "", fmt.Errorf("`old` and `new` are the same; change one of them: %q", m.old)
	}
	if _, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution); err != nil {
		return "", "", fmt.Errorf("the edit leaves no valid Go; change `old` or `new`: %w", err)
	}
	return file, text, nil
}

// TestMutantsHaveAPlace checks what an edit depends on: the function and the
// tokens in it, not the file, its format or its comments.
func TestMutantsHaveAPlace(t *testing.T) {
	const list = `package list

var limit = 8 // at first

type List[K comparable] struct{ all []K }

// add is before Add: if k == nil { return }
func add() { check(limit) }

func (l *List[K]) Add(k K) {
	check(
		limit, // of all
	)
	l.mu.Lock()
	defer l.mu.Unlock()

	if len(l.all) > limit { // the oldest
		l.drop()
	}
	l.all = append(l.all, k); l.all = l.all[:limit]
}
`
	for _, tt := range []struct{ in, old, replacement, cut, put, fails string }{
		{in: "limit", old: "8", replacement: "9", cut: "8", put: "9"},
		{in: "List", old: "[]K", replacement: "[]*K", cut: "[]K", put: "[]*K"},
		{in: "add", old: "check( limit )", cut: "check(limit)"},
		{in: "List.Add", old: "l.mu.Lock(); defer l.mu.Unlock()", cut: "l.mu.Lock()\n\tdefer l.mu.Unlock()"},
		{in: "List.Add", old: "l.mu.Lock()\n\tdefer l.mu.Unlock();", cut: "l.mu.Lock()\n\tdefer l.mu.Unlock()"},
		{in: "List.Add", old: "if len(l.all) > limit { l.drop() }", cut: "if len(l.all) > limit { // the oldest\n\t\tl.drop()\n\t}"},
		{in: "List.Add", old: "len(l.all)>limit", replacement: "true", cut: "len(l.all) > limit", put: "true"},
		{in: "List.Add", old: "k)\nl.all =", replacement: "k);", cut: "k); l.all =", put: "k);"},
		{in: "List.Add", old: "// of all", fails: "0 times"},
		{in: "List.Add", old: "lim", fails: "0 times"},
		{in: "List.Add", old: "", fails: "0 times"},
		{in: "List.Add", old: "limit", fails: "3 times"},
		{in: "Add", old: "limit", fails: "does not declare Add"},
		{in: "add", old: "limit", replacement: "limit", fails: "the same"},
		{in: "add", old: "(limit)", replacement: "(limit", fails: "list.go:8"},
	} {
		s := sources{}
		if err := s.parse("list", "list.go", []byte(list)); err != nil {
			t.Fatal(err)
		}
		m := mutant{pkg: "list", in: tt.in, old: tt.old, new: tt.replacement}
		_, text, err := m.mutated(s)
		switch {
		case tt.fails != "":
			if err == nil || !strings.Contains(err.Error(), tt.fails) {
				t.Errorf("%s, %q: %v", tt.in, tt.old, err)
			}
		case err != nil:
			t.Errorf("%s, %q: %v", tt.in, tt.old, err)
		case strings.Count(list, tt.cut) != 1 || text != strings.Replace(list, tt.cut, tt.put, 1):
			t.Errorf("%s, %q: %s", tt.in, tt.old, text)
		}
	}
}
