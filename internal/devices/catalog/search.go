package catalog

import (
	"bytes"
	"cmp"
	"slices"

	"fleetd/internal/jsonspan"
)

// Search returns at most limit tools of lists, best first, that may permits and that have one of the
// words, in lower case, in their name or description. rank says how well a tool with a name and a description fits; 0: not at
// all. Search keeps only these in memory.
func Search(lists map[*Catalog]struct{}, words [][]byte, rank func(name, description string) int, limit int, may func(*Tool) bool) []*Tool {
	var found []match
	for cat := range lists {
		for i := range cat.Tools {
			t := &cat.Tools[i]
			if !t.hasOne(words) || cat.Tool(t.Name) != t || !may(t) {
				continue
			}
			description, _ := jsonspan.String(jsonspan.Member(t.Raw, "description"))
			m := match{t, rank(t.Name, description)}
			if m.rank == 0 {
				continue
			}
			at, same := slices.BinarySearchFunc(found, m, match.compare)
			if same || at == limit {
				continue
			}
			if len(found) == limit {
				found = found[:limit-1]
			}
			found = slices.Insert(found, at, m)
		}
	}
	found = slices.DeleteFunc(found, func(m match) bool { return 4*m.rank < found[0].rank }) // what fits far worse
	tools := make([]*Tool, len(found))
	for i := range found {
		tools[i] = found[i].tool
	}
	return tools
}

// match is a found tool.
type match struct {
	tool *Tool
	rank int
}

// compare orders better matches first; the same tool is equal.
func (m match) compare(o match) int {
	return cmp.Or(cmp.Compare(o.rank, m.rank), cmp.Compare(m.tool.Name, o.tool.Name), bytes.Compare(m.tool.Raw, o.tool.Raw))
}

// hasOne reports whether a tool has one of the words; the others need not be ranked.
func (t *Tool) hasOne(words [][]byte) bool {
	description := jsonspan.Member(t.Raw, "description") // as sent; words contain nothing that JSON escapes
	return slices.ContainsFunc(words, func(word []byte) bool { return containsFold(t.Name, word) || containsFold(description, word) })
}

// containsFold reports whether text contains word, which is in lower case, ignoring the case
// of ASCII letters.
func containsFold[T string | []byte](text T, word []byte) bool {
	for i := 0; i+len(word) <= len(text); i++ {
		n := 0
		for n < len(word) && lower(text[i+n]) == word[n] {
			n++
		}
		if n == len(word) {
			return true
		}
	}
	return false
}

func lower(c byte) byte {
	if c >= 'A' && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}
