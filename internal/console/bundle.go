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

// The syntax of libraries, which a minifier wrote: imports at the beginning, exports at the end.
var (
	libraryImport  = regexp.MustCompile(`^import\{([^{}]+)\}from"(\.[^"]+)";`)
	libraryExport  = regexp.MustCompile(`export\{([^{}]+)\};?\s*$`)
	libraryDefault = regexp.MustCompile(`(?:^|[;}\n])(export default )`)
	libraryRest    = regexp.MustCompile(`(?:^|[;}\n])(?:import|export)\b\W`)
)

// comment is one at the end of a line: what contains a quote may be part of a text.
var comment = regexp.MustCompile("(?:^| +)// [^\"'`]*$")

// codeSpace is an operator or a brace with spaces that mean nothing but in a text.
var codeSpace = regexp.MustCompile(` (=>|[!=]==|&&|\|\||\?\?|[=?:+]) |(\{) | (\})`)

// texts is the module that has all texts.
const texts = "app/strings.js"

// localName finds what an own module declares at its top, or calls an import.
var localName = regexp.MustCompile(`(?m)^(?:export )?(?:(?:async )?function\*? |const |let |class )(\w+)|\bas (\w+)`)

// bundle joins all modules to one, own ones without indentation, comments and the space around operators: together they
// compress to two thirds of what they do alone, and a browser needs one request. Each module becomes a function that returns its exports, after
// those that it imports; a cycle is an error. The exports of own modules are variables of the bundle, so that no module
// names again what it imports; two modules cannot export the same name.
type bundle struct {
	files     map[string][]byte
	exports   map[string][]string // of the modules that are done, by path
	exporter  map[string]string   // the own module that has an export, by name
	open      []string            // the modules whose imports are being added
	whole     map[string]bool     // own modules that are imported as one object
	libraries strings.Builder
	own       strings.Builder
}

// newBundle returns the module entry with all that it imports. files are own and other modules by path.
func newBundle(files map[string][]byte, entry string) ([]byte, error) {
	b := &bundle{files: files, exports: map[string][]string{}, exporter: map[string]string{}, whole: map[string]bool{}}
	if err := b.add(entry); err != nil {
		return nil, err
	}
	return []byte(b.libraries.String() + b.own.String()), nil
}

// variable is the name of all exports of a module in the bundle.
func variable(name string) string {
	return "$" + regexp.MustCompile(`\W`).ReplaceAllString(strings.TrimSuffix(name, ".js"), "_")
}

func isLibrary(name string) bool { return !strings.HasPrefix(name, "app/") }

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
	b.open = append(b.open, name)
	defer func() { b.open = b.open[:len(b.open)-1] }()
	if isLibrary(name) {
		return b.library(name, string(source))
	}
	var body strings.Builder
	exports := []string{}
	for i, line := range strings.Split(strings.TrimSuffix(string(source), "\n"), "\n") {
		converted, exported, err := b.line(name, line)
		if err != nil {
			return fmt.Errorf("%s:%d: %w", name, i+1, err)
		}
		exports = append(exports, exported...)
		if converted = comment.ReplaceAllString(strings.TrimSpace(converted), ""); converted != "" && !strings.HasPrefix(converted, "//") {
			if name != texts {
				converted = codeSpace.ReplaceAllString(converted, "$1$2$3")
			}
			body.WriteString(converted)
			if !strings.ContainsAny(converted[len(converted)-1:], "({,;>") || strings.Contains(converted, "//") {
				body.WriteByte('\n') // elsewhere it means nothing, neither in a script nor in a template of htm
			}
		}
	}
	for _, export := range exports {
		if other := b.exporter[export]; other != "" {
			return fmt.Errorf("%s and %s both export %s; rename one", other, name, export)
		}
		b.exporter[export] = name
	}
	b.exports[name] = exports
	names := strings.Join(exports, ",")
	fmt.Fprintf(&b.own, "const{%s}=(() => {\n%sreturn{%s}})();\n", names, body.String(), names)
	return nil
}

// library adds a module that others wrote. Its code stays what it is.
func (b *bundle) library(name, source string) error {
	var exports []string
	imported, returned := "", ""
	if m := libraryImport.FindStringSubmatch(source); m != nil {
		target := path.Join(path.Dir(name), m[2])
		if err := b.add(target); err != nil {
			return err
		}
		imported = fmt.Sprintf("const { %s } = %s;\n", strings.ReplaceAll(m[1], " as ", ": "), variable(target))
		source = source[len(m[0]):]
	}
	if m := libraryExport.FindStringSubmatchIndex(source); m != nil {
		var members []string
		for pair := range strings.SplitSeq(source[m[2]:m[3]], ",") {
			local, exported, renamed := strings.Cut(pair, " as ")
			if !renamed {
				exported = local
			}
			members, exports = append(members, exported+": "+local), append(exports, exported)
		}
		source, returned = source[:m[0]], strings.Join(members, ", ")
	} else if m := libraryDefault.FindStringSubmatchIndex(source); m != nil {
		source = source[:m[2]] + "const $default = " + source[m[3]:]
		exports, returned = []string{"default"}, "default: $default"
	}
	if found := libraryRest.FindString(source); found != "" || exports == nil {
		return fmt.Errorf("%s imports or exports in a form that bundle.go does not read: %q", name, found)
	}
	b.exports[name] = exports
	fmt.Fprintf(&b.libraries, "const %s = (() => {\n%s%s;\nreturn { %s };\n})();\n", variable(name), imported, strings.TrimRight(source, "\n;"), returned)
	return nil
}

// line converts one line of an own module and names what it exports. It adds the modules that the line imports.
func (b *bundle) line(module, line string) (converted string, exports []string, err error) {
	if m := exportLine.FindStringSubmatch(line); m != nil {
		return strings.TrimPrefix(line, "export "), []string{m[2]}, nil
	}
	names, all, from := "", "", ""
	switch m := importLine.FindStringSubmatch(line); {
	case m != nil && m[1] != "":
		names, from = "default as "+m[1], m[4]
	case m != nil:
		names, all, from = m[2], m[3], m[4]
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
	if all != "" {
		if !b.whole[target] { // outside of all modules, whose local names may be those of exports
			fmt.Fprintf(&b.own, "const %s = { %s };\n", variable(target), strings.Join(b.exports[target], ", "))
			b.whole[target] = true
		}
		return fmt.Sprintf("const %s = %s;", all, variable(target)), nil, nil
	}
	var renamed []string
	for name := range strings.SplitSeq(names, ", ") {
		exported, local, isRenamed := strings.Cut(name, " as ")
		if !slices.Contains(b.exports[target], exported) {
			return "", nil, fmt.Errorf("%s has no export %s", target, exported)
		}
		if isRenamed {
			for _, m := range localName.FindAllStringSubmatch(string(b.files[module]), -1) {
				if !isLibrary(target) && (m[1] == exported || m[2] == exported) {
					return "", nil, fmt.Errorf("%s cannot be imported as %s, because it is also a local name; rename the export of %s", exported, local, target)
				}
			}
			renamed = append(renamed, fmt.Sprintf("const %s = %s;", local, exported))
		}
	}
	switch {
	case isLibrary(target):
		return fmt.Sprintf("const { %s } = %s;", strings.ReplaceAll(names, " as ", ": "), variable(target)), exports, nil
	case exports != nil:
		return "", nil, fmt.Errorf("%q: only what libraries export can be exported again", line)
	}
	return strings.Join(renamed, " "), nil, nil
}
