package devices

import (
	"bytes"
	"cmp"
	"slices"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/jsonspan"
)

// ToolMatch is a tool that a search found: Count devices have it word for word.
type ToolMatch struct {
	Tool    *Tool
	Count   int
	Devices []ID // some of them
	rank    int
}

// SearchTools finds tools that have all words of the query in their name or
// description, whatever their case, among those that key and rules let the
// caller call. It returns at most limit, the best first, each with up to
// examples devices.
//
// Devices of one firmware share a list, so the distinct lists are searched;
// then the devices are counted without keeping anything of them. What it
// allocates grows with its answer and the number of lists, not with the fleet.
func (s *Service) SearchTools(by access.By, query string, limit, examples int) []ToolMatch {
	words := bytes.Fields([]byte(strings.ToLower(query)))
	if by.Who == nil || len(words) == 0 || limit < 1 {
		return nil
	}
	// Lists that none of the caller's devices has must not take places.
	lists := map[*Catalog]struct{}{}
	s.eachListed(by.Who, func(_ *Device, cat *Catalog) { lists[cat] = struct{}{} })
	guard := s.Guard()
	found := search(by, guard, lists, words, limit)
	if len(found) == 0 {
		return nil
	}
	s.eachListed(by.Who, func(d *Device, cat *Catalog) {
		for i := range found {
			m := &found[i]
			if t := cat.Tool(m.Tool.Name); t == nil || !bytes.Equal(t.Raw, m.Tool.Raw) ||
				guard.RuleAction(access.Question{By: by, Device: string(d.ID), Labels: d.Labels, Tool: t.Name}) == access.Deny {
				continue
			}
			if m.Count++; len(m.Devices) < examples {
				m.Devices = append(m.Devices, d.ID)
			}
		}
	})
	// What rules deny on each of these devices, and not on others, took a place.
	return slices.DeleteFunc(found, func(m ToolMatch) bool { return m.Count == 0 })
}

// eachListed calls f for every device of the caller with the list it had last,
// if that is in memory. f must not wait for a device.
func (s *Service) eachListed(who *access.Caller, f func(*Device, *Catalog)) {
	for i := range s.hub.shards {
		shard := &s.hub.shards[i]
		shard.mu.RLock()
		for id, e := range shard.entries {
			d := e.device.Load()
			if d.Admission != AdmissionMember || !who.Devices.Matches(string(id), d.Labels) {
				continue
			}
			e.mu.Lock() // nobody who holds it waits for a shard
			hash := e.catalog
			e.mu.Unlock()
			if cat := s.catalogs.get(hash); cat != nil {
				f(d, cat)
			}
		}
		shard.mu.RUnlock()
	}
}

// search looks through lists. Nothing is held but the best.
func search(by access.By, guard *access.Guard, lists map[*Catalog]struct{}, words [][]byte, limit int) (found []ToolMatch) {
	for cat := range lists {
		for i := range cat.Tools {
			t := &cat.Tools[i]
			rank := t.rank(words)
			if rank == 0 || cat.Tool(t.Name) != t || !guard.MayEver(access.Question{By: by, Tool: t.Name, UserOnly: t.UserOnly}) {
				continue
			}
			m := ToolMatch{Tool: t, rank: rank}
			at, same := slices.BinarySearchFunc(found, m, ToolMatch.compare)
			if same || at == limit {
				continue
			}
			if len(found) == limit {
				found = found[:limit-1]
			}
			found = slices.Insert(found, at, m)
		}
	}
	return found
}

// compare puts the better match first; the same tool is equal.
func (m ToolMatch) compare(o ToolMatch) int {
	return cmp.Or(cmp.Compare(o.rank, m.rank), cmp.Compare(m.Tool.Name, o.Tool.Name), bytes.Compare(m.Tool.Raw, o.Tool.Raw))
}

// Ranks of matches.
const (
	rankDescription = 1 // a word stands in the description alone
	rankName        = 2 // all stand in the name
	rankLast        = 3 // they are the last part of the name
)

// rank tells how well a tool matches; 0: not at all.
func (t *Tool) rank(words [][]byte) int {
	rank := rankName
	var description []byte
	for _, word := range words {
		if containsFold(t.Name, word) {
			continue
		}
		if rank == rankName {
			description = jsonspan.Member(t.Raw, "description") // as sent; words have nothing to escape
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

// containsFold tells whether text contains word, which is in lower case, with
// the case of ASCII letters ignored.
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
