package console

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

// The syntax of imports and exports that own modules may use: each on one line that begins with it.
var (
	importLine = regexp.MustCompile(`^import (?:(\w+)|\{ (.+) \}|\* as (\w+)) from "(\.[^"]+)";$`)
	reexport   = regexp.MustCompile(`^export \{ (.+) \} from "(\.[^"]+)";$`)
	exportLine = regexp.MustCompile(`^export ((?:async )?function\*? |const |class )(\w+)`)
)

// bundle joins own modules to one, without lines that are only a comment. Together they compress to two thirds of
// what they do alone, and a browser needs one request for them. Each module becomes a function that returns its
// exports, after those that it imports; a cycle is an error. Modules outside of app/ stay what they are.
type bundle struct {
	files   map[string][]byte
	exports map[string][]string // of the modules that are done, by path
	open    []string            // the modules whose imports are being added
	vendor  strings.Builder
	out     strings.Builder
}

// newBundle returns the module entry with all that it imports. files are own and other modules by path.
func newBundle(files map[string][]byte, entry string) ([]byte, error) {
	b := &bundle{files: files, exports: map[string][]string{}}
	if err := b.add(entry); err != nil {
		return nil, err
	}
	return []byte(b.vendor.String() + b.out.String()), nil
}

// variable is the name of a module's exports in the bundle.
func variable(name string) string {
	return "$" + regexp.MustCompile(`\W`).ReplaceAllString(strings.TrimSuffix(name, ".js"), "_")
}

func (b *bundle) add(name string) error {
	if slices.Contains(b.open, name) {
		return fmt.Errorf("modules import each other: %s -> %s", strings.Join(b.open, " -> "), name)
	}
	if _, done := b.exports[name]; done {
		return nil
	}
	source, ok := b.files[name]
	if !ok {
		return fmt.Errorf("%s is not a file; it is imported by way of: %s", name, strings.Join(b.open, " -> "))
	}
	if !strings.HasPrefix(name, "app/") {
		b.exports[name] = nil
		fmt.Fprintf(&b.vendor, "import * as %s from \"../%s\";\n", variable(name), name)
		return nil
	}
	b.open = append(b.open, name)
	var body strings.Builder
	var exports []string
	for i, line := range strings.Split(strings.TrimSuffix(string(source), "\n"), "\n") {
		converted, exported, err := b.line(name, line)
		if err != nil {
			return fmt.Errorf("%s:%d: %w", name, i+1, err)
		}
		exports = append(exports, exported...)
		if !strings.HasPrefix(strings.TrimSpace(line), "//") {
			body.WriteString(converted + "\n")
		}
	}
	b.open = b.open[:len(b.open)-1]
	b.exports[name] = exports
	fmt.Fprintf(&b.out, "const %s = (() => {\n%sreturn { %s };\n})();\n", variable(name), body.String(), strings.Join(exports, ", "))
	return nil
}

// line converts one line of a module and names what it exports. It adds the modules that the line imports.
func (b *bundle) line(module, line string) (converted string, exports []string, err error) {
	if m := exportLine.FindStringSubmatch(line); m != nil {
		return strings.TrimPrefix(line, "export "), []string{m[2]}, nil
	}
	names, from := "", ""
	switch m := importLine.FindStringSubmatch(line); {
	case m != nil && m[1] != "":
		names, from = "default as "+m[1], m[4]
	case m != nil:
		names, from = m[2], m[4]
		if m[3] != "" {
			line = "const " + m[3] + " = "
		}
	default:
		if m = reexport.FindStringSubmatch(line); m == nil {
			if strings.HasPrefix(line, "import ") || strings.HasPrefix(line, "export ") {
				return "", nil, fmt.Errorf("%q is not a form of import or export that bundle.go reads", line)
			}
			return line, nil, nil
		}
		names, from = m[1], m[2]
		exports = strings.Split(names, ", ")
	}
	target := path.Join(path.Dir(module), from)
	if err := b.add(target); err != nil {
		return "", nil, err
	}
	if names == "" {
		return line + variable(target) + ";", nil, nil
	}
	if known := b.exports[target]; known != nil {
		for _, name := range strings.Split(names, ", ") {
			if name, _, _ = strings.Cut(name, " as "); !slices.Contains(known, name) {
				return "", nil, fmt.Errorf("%s has no export %s", target, name)
			}
		}
	}
	return fmt.Sprintf("const { %s } = %s;", strings.ReplaceAll(names, " as ", ": "), variable(target)), exports, nil
}
