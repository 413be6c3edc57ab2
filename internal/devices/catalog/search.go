package catalog

import (
	"bytes"
	"cmp"
	"slices"
	"strings"

	"fleetd/internal/jsonspan"
)

// Search returns at most limit tools of lists, best first, that may permits and that have all
// words, in lower case, in their name or description. It keeps only these in memory.
func Search(lists map[*Catalog]struct{}, words [][]byte, limit int, may func(*Tool) bool) []*Tool {
	var found []match
	for cat := range lists {
		for i := range cat.Tools {
			t := &cat.Tools[i]
			rank := t.rank(words)
			if rank == 0 || cat.Tool(t.Name) != t || !may(t) {
				continue
			}
			m := match{t, rank}
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

// Ranks of matches.
const (
	rankDescription = 1 // a word is only in the description
	rankName        = 2 // all words are in the name
	rankLast        = 3 // the word is the last part of the name
)

// rank returns how well a tool matches; 0: not at all.
func (t *Tool) rank(words [][]byte) int {
	rank := rankName
	var description []byte
	for _, word := range words {
		if containsFold(t.Name, word) {
			continue
		}
		if rank == rankName {
			description = jsonspan.Member(t.Raw, "description") // as sent; words contain nothing that JSON escapes
		}
		rank = rankDescription
		if !containsFold(description, word) {
			return 0
		}
	}
	if last := t.Name[strings.LastIndexByte(t.Name, '.')+1:]; rank == rankName && len(words) == 1 && len(last) == len(words[0]) && containsFold(last, words[0]) {
		return rankLast
	}
	return rank
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
