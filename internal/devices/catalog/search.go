package catalog

import (
	"bytes"
	"cmp"
	"slices"

	"fleetd/internal/jsonspan"
)

// maxRanked is how many tools one search ranks, which takes up to a second.
const maxRanked = 30_000

// Search returns at most limit tools of lists, best first, that may permits. rank says how well a tool with a name and a description
// fits; 0: not at all. Search keeps only these in memory.
func Search(lists map[*Catalog]struct{}, rank func(name, description string) int, limit int, may func(*Tool) bool) []*Tool {
	var found []match
	ranked := 0
	for cat := range lists {
		if ranked += len(cat.Tools); ranked > maxRanked {
			break
		}
		for i := range cat.Tools {
			t := &cat.Tools[i]
			if cat.Tool(t.Name) != t || !may(t) {
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
