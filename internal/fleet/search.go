package fleet

import (
	"bytes"
	"context"
	"slices"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/selector"
)

// ToolMatch is a tool that a search found: Count devices have it word for word.
type ToolMatch struct {
	Tool    *catalog.Tool
	Count   int
	Devices []devices.ID // some of them
}

// SearchTools finds tools that have all words of the query in their name or
// description, whatever their case, among those that key and rules let the
// caller call. It returns at most limit, the best first, each with up to
// examples devices.
//
// Devices of one firmware share a list, so the distinct lists are searched, and the
// database counts the devices that have each.
func (s *Service) SearchTools(ctx context.Context, by access.By, query string, limit, examples int) ([]ToolMatch, error) {
	words := bytes.Fields([]byte(strings.ToLower(query)))
	if by.Who == nil || len(words) == 0 || limit < 1 {
		return nil, nil
	}
	// Lists that none of the caller's devices has must not take places.
	listed, err := s.ports.Records.CatalogsOf(ctx, by.Who.Devices)
	if err != nil {
		return nil, err
	}
	counts := map[*catalog.Catalog]devices.CatalogCount{}
	byHash := map[devices.Hash]*catalog.Catalog{}
	lists := map[*catalog.Catalog]struct{}{}
	for _, one := range listed {
		if cat, err := s.Catalog(ctx, one.Catalog); err == nil { // else it was pruned a moment ago
			counts[cat], byHash[one.Catalog] = one, cat
			lists[cat] = struct{}{}
		}
	}
	guard := s.Guard()
	found := make([]ToolMatch, 0, limit)
	for _, tool := range catalog.Search(lists, words, limit, func(t *catalog.Tool) bool {
		return guard.MayEver(access.Question{By: by, Tool: t.Name, UserOnly: t.UserOnly})
	}) {
		found = append(found, ToolMatch{Tool: tool})
	}
	for i := range found {
		m := &found[i]
		for cat, one := range counts {
			t := cat.Tool(m.Tool.Name)
			if t == nil || !bytes.Equal(t.Raw, m.Tool.Raw) {
				continue
			}
			m.Count += int(one.N)
		}
	}
	// Where rules go by labels, devices are counted one by one.
	enough := examples
	if guard.NeedsLabels() {
		enough = maxLooked
	}
	for i := range found {
		m := &found[i]
		count, err := s.lookFor(ctx, by, guard, m, byHash, examples, enough)
		if err != nil {
			return nil, err
		}
		if guard.NeedsLabels() {
			m.Count = count
		}
	}
	// What rules deny on each of these devices, and not on others, took a place.
	return slices.DeleteFunc(found, func(m ToolMatch) bool { return m.Count == 0 }), nil
}

// maxLooked is how many devices a search looks at whose rules go by labels; a
// count above that is of those alone.
const maxLooked = 5000

// firstLooked is how many devices are read at first: a few examples are among the
// first devices for the most part.
const firstLooked = 16

// lookFor finds devices that have the tool of a match and on which the rules do not
// deny it: it notes some of them as examples, and counts up to enough.
func (s *Service) lookFor(ctx context.Context, by access.By, guard *access.Guard, m *ToolMatch, lists map[devices.Hash]*catalog.Catalog, examples, enough int) (count int, err error) {
	q := devices.ListQuery{Select: selector.And(by.Who.Devices, selector.In(selector.FieldTool, m.Tool.Name)), Limit: max(firstLooked, examples), Members: by.Who.NeedsLabels()}
	for looked := 0; looked < maxLooked; {
		page, next, err := s.List(ctx, q)
		if err != nil {
			return count, err
		}
		looked += len(page)
		for _, v := range page {
			cat := lists[v.Presence.Catalog]
			if cat == nil {
				continue // it came since
			}
			t := cat.Tool(m.Tool.Name)
			if t == nil || !bytes.Equal(t.Raw, m.Tool.Raw) ||
				guard.RuleAction(access.Question{By: by, Device: string(v.Device.ID), Labels: v.Device.Labels, Tool: t.Name}) == access.Deny {
				continue
			}
			if len(m.Devices) < examples {
				m.Devices = append(m.Devices, v.Device.ID)
			}
			if count++; count >= enough {
				return count, nil
			}
		}
		if next == "" {
			break
		}
		q.After, q.Limit = next, min(4*q.Limit, eachPage)
	}
	return count, nil
}
