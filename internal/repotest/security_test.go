package repotest

import (
	"slices"
	"testing"
)

// TestSecurityClaimsHaveTests checks the link between each claim of
// docs/security.md and the assertions that fail when it is no longer true. A
// row names tests; in each of them, or in a helper that it calls, a comment
// `// security: ID` is on the line above its assertion.
func TestSecurityClaimsHaveTests(t *testing.T) {
	claims, others := readClaims(t)
	tree := readTests(t)
	if len(claims) < 40 {
		t.Fatalf("docs/security.md has %d claims", len(claims))
	}
	for _, name := range others {
		if dir, _ := tree.dirOf(name); dir == "" {
			t.Errorf("docs/security.md names %s: there is no test of this name, or several; write package.%s", name, name)
		}
	}
	byID := map[string]*claim{}
	for i := range claims {
		c := &claims[i]
		if byID[c.id] != nil {
			t.Errorf("docs/security.md has two claims %s", c.id)
		}
		byID[c.id] = c
		if len(c.tests) == 0 {
			t.Errorf("%s has no test: %s", c.id, c.text)
		}
		for _, name := range c.tests {
			dir, test := tree.dirOf(name)
			if dir == "" {
				t.Errorf("%s names %s: there is no test of this name, or several; write package.%s", c.id, name, test)
				continue
			}
			if !slices.ContainsFunc(tree.markers, func(m marker) bool {
				return m.dir == dir && slices.Contains(m.ids, c.id) && tree.reaches(dir, test, m.in)
			}) {
				t.Errorf("%s names %s, which has no assertion below a comment `// security: %s`", c.id, name, c.id)
			}
		}
	}
	for _, m := range tree.markers {
		if m.from == 0 || !m.asserts {
			t.Errorf("%s/%s:%d: no assertion begins within %d lines below", m.dir, m.file, m.line, near)
		}
		for _, id := range m.ids {
			c := byID[id]
			if c == nil {
				t.Errorf("%s/%s:%d: docs/security.md has no claim %s", m.dir, m.file, m.line, id)
				continue
			}
			if !slices.ContainsFunc(c.tests, func(name string) bool {
				dir, test := tree.dirOf(name)
				return dir == m.dir && tree.reaches(dir, test, m.in)
			}) {
				t.Errorf("%s/%s:%d: %s is not part of a test that the row of %s names", m.dir, m.file, m.line, m.in, id)
			}
		}
	}
}
