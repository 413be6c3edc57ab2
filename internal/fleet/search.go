package fleet

import (
	"bytes"
	"context"
	"slices"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/selector"
)

// ToolMatch is a tool that a search found; Count devices have exactly this tool.
type ToolMatch struct {
	Tool    *catalog.Tool
	Count   int
	Devices []devices.ID // some of them
}

// SearchTools finds tools that fit, as rank has it (0: not at all), among those that the caller's key and the rules allow. It returns at
// most limit tools, best first, each with up to examples devices.
//
// Devices with the same firmware share a list: the distinct lists are searched, and the
// database counts the devices of each.
func (s *Service) SearchTools(ctx context.Context, principal access.Principal, rank func(name, description string) int, limit, examples int) ([]ToolMatch, error) {
	if principal.Caller == nil || limit < 1 {
		return nil, nil
	}
	// Lists that none of the caller's devices has must not use up the limit.
	listed, err := s.ports.Records.CatalogsOf(ctx, principal.Caller.Devices)
	if err != nil {
		return nil, err
	}
	counts := map[*catalog.Catalog]devices.CatalogCount{}
	byHash := map[devices.Hash]*catalog.Catalog{}
	lists := map[*catalog.Catalog]struct{}{}
	for _, one := range listed {
		if cat, err := s.Catalog(ctx, one.Catalog); err == nil { // else it has just been pruned
			counts[cat], byHash[one.Catalog] = one, cat
			lists[cat] = struct{}{}
		}
	}
	guard := s.Guard()
	found := make([]ToolMatch, 0, limit)
	for _, tool := range catalog.Search(lists, rank, limit, func(t *catalog.Tool) bool {
		return guard.MayAllow(access.Query{By: principal, Tool: t.Name, UserOnly: t.UserOnly})
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
	// If rules depend on labels, devices are counted one by one.
	enough := examples
	if guard.NeedsLabels() {
		enough = maxExamined
	}
	for i := range found {
		m := &found[i]
		count, err := s.findExamples(ctx, principal, guard, m, byHash, examples, enough)
		if err != nil {
			return nil, err
		}
		if guard.NeedsLabels() {
			m.Count = count
		}
	}
	// Drop the tools that the rules deny on every device of the caller.
	return slices.DeleteFunc(found, func(m ToolMatch) bool { return m.Count == 0 }), nil
}

// maxExamined is how many devices a search examines if rules depend on labels; larger
// counts cover only these devices.
const maxExamined = 5000

// firstPage is how many devices are read at first; most examples are among them.
const firstPage = 16

// findExamples finds devices that have the tool of a match and on which the rules do
// not deny it: it records some of them as examples, and counts up to enough.
func (s *Service) findExamples(ctx context.Context, principal access.Principal, guard *access.Guard, m *ToolMatch, lists map[devices.Hash]*catalog.Catalog, examples, enough int) (count int, err error) {
	q := devices.ListQuery{Select: selector.And(principal.Caller.Devices, selector.In(selector.FieldTool, m.Tool.Name)), Limit: max(firstPage, examples), Members: principal.Caller.NeedsLabels()}
	for examined := 0; examined < maxExamined; {
		page, next, err := s.List(ctx, q)
		if err != nil {
			return count, err
		}
		examined += len(page)
		for _, v := range page {
			cat := lists[v.Presence.Catalog]
			if cat == nil {
				continue // it is newer than the lists
			}
			t := cat.Tool(m.Tool.Name)
			if t == nil || !bytes.Equal(t.Raw, m.Tool.Raw) ||
				guard.RuleAction(access.Query{By: principal, Device: string(v.Device.ID), Labels: v.Device.Labels, Tool: t.Name}) == access.Deny {
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
