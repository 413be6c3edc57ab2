package repotest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

// documents are the files that people read: README, CHANGELOG, docs and the
// READMEs of directories.
func documents(t *testing.T) []string {
	t.Helper()
	files := []string{"README.md", "CHANGELOG.md"}
	for _, dir := range []string{"docs", "deploy", "examples", "simulator"} {
		err := fs.WalkDir(os.DirFS("../.."), dir, func(path string, _ fs.DirEntry, err error) error {
			if strings.HasSuffix(path, ".md") {
				files = append(files, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// prose returns a document without its code, in which nothing is a link or a
// heading.
func prose(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../..", file))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	code := false
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
			continue
		}
		if !code {
			b.WriteString(line)
		}
	}
	return b.String()
}

// anchors are the fragments by which a document's headings are linked to, as
// GitHub makes them.
func anchors(text string) map[string]bool {
	known := map[string]bool{}
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		known[strings.Map(func(r rune) rune {
			switch {
			case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
				return unicode.ToLower(r)
			case r == ' ':
				return '-'
			}
			return -1
		}, heading[1])] = true
	}
	return known
}

// Every relative link of the documents leads to a file that is there, and to a
// heading of it.
func TestLinksResolve(t *testing.T) {
	links := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	inline := regexp.MustCompile("`[^`\n]*`")
	checked := 0
	for _, file := range documents(t) {
		text := prose(t, file)
		for _, link := range links.FindAllStringSubmatch(inline.ReplaceAllString(text, ""), -1) {
			path, anchor, anchored := strings.Cut(link[1], "#")
			if strings.Contains(path, "://") || strings.HasPrefix(path, "mailto:") {
				continue
			}
			checked++
			target := file
			if path != "" {
				target = filepath.Join(filepath.Dir(file), path)
			}
			if _, err := os.Stat(filepath.Join("../..", target)); err != nil {
				t.Errorf("%s: link to %s: %v", file, link[1], err)
				continue
			}
			if anchored && !anchors(prose(t, target))[anchor] {
				t.Errorf("%s: link to %s: no heading of %s has this anchor", file, link[1], target)
			}
		}
	}
	if checked < 200 {
		t.Errorf("%d links found", checked)
	}
}

// docs/README.md names every page: one that it leaves out is found by nobody.
func TestIndexOfDocs(t *testing.T) {
	index := prose(t, "docs/README.md")
	for _, file := range documents(t) {
		page, ok := strings.CutPrefix(file, "docs/")
		if ok && page != "README.md" && !strings.Contains(index, "]("+page+")") {
			t.Errorf("docs/README.md has no link to %s", page)
		}
	}
}
