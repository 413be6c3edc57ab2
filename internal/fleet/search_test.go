package fleet_test

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devicetest"
	"fleetd/internal/finder"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

// searched is a fleet with a few lists, read from the database.
func searched(t testing.TB, n int) *fleet.Service {
	t.Helper()
	return searchedPorts(t, n).Service(t, fleet.Config{})
}

func searchedPorts(t testing.TB, n int) *devicetest.Ports {
	t.Helper()
	ports := devicetest.New()
	var hashes []devices.Hash
	for _, list := range []string{
		`[` + devicetest.Volume + `,` + devicetest.Reboot + `]`,
		`[` + devicetest.Volume + `,{"name":"self.lamp.turn_on","description":"Turns the Lamp on.","inputSchema":{"type":"object","properties":{}}}]`,
		`[{"name":"self.lamp.turn_on","description":"Turns the other lamp on.","inputSchema":{"type":"object","properties":{}}}]`,
		`[{"name":"self.dog.walk","description":"Walks; turn the lamp off first.","inputSchema":{"type":"object","properties":{}}}]`,
	} {
		cat, err := catalog.New([]byte(list))
		if err != nil {
			t.Fatal(err)
		}
		hashes = append(hashes, cat.Hash)
		ports.KeepCatalog(devices.CatalogText{Hash: cat.Hash, Tools: cat.JSON, Count: len(cat.Tools)})
	}
	for i := range n {
		id := devices.ID(fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&255))
		ports.Put(devices.Member{ID: id, Labels: map[string]string{"room": []string{"lab", "hall"}[i%2]}})
		ports.SavePresence(devices.Presence{Device: id, Epoch: 1, Catalog: hashes[i%4], MCP: devices.MCPReady})
	}
	return ports
}

func principal(t testing.TB, scopes, selected string, tools ...string) access.Principal {
	t.Helper()
	s, err := access.ParseScopes([]string{"devices:read", scopes})
	if err != nil {
		t.Fatal(err)
	}
	d, err := selector.Parse(selected)
	if err != nil {
		t.Fatal(err)
	}
	return access.Principal{Caller: access.NewCaller("k", "k", s, d, tools), Via: access.ViaMCP}
}

// find searches for at most limit tools, with three devices each.
func find(t testing.TB, s *fleet.Service, principal access.Principal, query string, limit int) []fleet.ToolMatch {
	t.Helper()
	found, err := s.SearchTools(t.Context(), principal, finder.Rank(query), limit, 3)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestSearchTools(t *testing.T) {
	s := searched(t, 40)
	admin := devicetest.Admin
	for name, c := range map[string]struct {
		principal access.Principal
		query     string
		want      []string
	}{
		"name":            {admin, "set_volume", []string{"self.audio_speaker.set_volume 20"}},
		"case":            {admin, "SET_Volume", []string{"self.audio_speaker.set_volume 20"}},
		"description":     {admin, "lamp TURN", []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10"}},
		"best first":      {admin, "lamp walk", []string{"self.dog.walk 10", "self.lamp.turn_on 10", "self.lamp.turn_on 10"}},
		"accents":         {admin, "LÁMP", []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10", "self.dog.walk 10"}},
		"one word":        {admin, "teapot volume", []string{"self.audio_speaker.set_volume 20"}},
		"nothing":         {admin, "teapot", nil},
		"no words":        {admin, "  ", nil},
		"for people":      {admin, "reboot", []string{"self.reboot 10"}},
		"model":           {principal(t, "tools:call", ""), "reboot", nil},
		"person":          {principal(t, "tools:call:user", ""), "reboot", []string{"self.reboot 10"}},
		"of one room":     {principal(t, "tools:call", "room=hall"), "lamp", []string{"self.lamp.turn_on 10", "self.dog.walk 10"}},
		"of other rooms":  {principal(t, "tools:call", "room!=hall"), "lamp", []string{"self.lamp.turn_on 10"}},
		"only some tools": {principal(t, "tools:call", "", "*dog*"), "lamp", []string{"self.dog.walk 10"}},
		"nobody":          {access.Principal{}, "lamp", nil},
	} {
		var got []string
		for _, m := range find(t, s, c.principal, c.query, 10) {
			got = append(got, fmt.Sprintf("%s %d", m.Tool.Name, m.Count))
			if len(m.Devices) != 3 {
				t.Errorf("%s: devices %q", name, m.Devices)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, not %q", name, got, c.want)
		}
	}
	if got := find(t, s, admin, "turn", 1); len(got) != 1 || got[0].Tool.Name != "self.lamp.turn_on" {
		t.Errorf("%+v", got)
	}
}

// A search finds no tool that the rules deny. A tool that is denied everywhere does not
// use up the limit, and devices on which a tool is denied are not counted.
func TestSearchByRules(t *testing.T) {
	s := searched(t, 40)
	caller := principal(t, "tools:call", "")
	found := func(limit int) (got []string) {
		for _, m := range find(t, s, caller, "lamp", limit) {
			got = append(got, fmt.Sprintf("%s %d", m.Tool.Name, m.Count))
		}
		return got
	}
	deny := access.Rule{Name: "dark", Tools: []string{"*.lamp.*"}, Action: access.Deny}
	hall := access.Rule{Name: "hall", Tools: []string{"*.lamp.*"}, Devices: selector.FromMap(map[string]string{"room": "hall"}), Action: access.Allow}
	lab := access.Rule{Name: "lab", Tools: []string{"self.dog.walk"}, Devices: selector.FromMap(map[string]string{"room": "lab"}), Action: access.Deny}
	for name, c := range map[string]struct {
		rules []access.Rule
		want  []string
	}{
		"no rules":               {nil, []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10", "self.dog.walk 10"}},
		"denied everywhere":      {[]access.Rule{deny}, []string{"self.dog.walk 10"}},
		"but in the hall":        {[]access.Rule{hall, deny}, []string{"self.lamp.turn_on 10", "self.dog.walk 10"}},
		"elsewhere":              {[]access.Rule{lab}, []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10", "self.dog.walk 10"}},
		"over another interface": {[]access.Rule{{Name: "rest", Tools: deny.Tools, Via: []access.Via{access.ViaREST}, Action: access.Deny}}, []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10", "self.dog.walk 10"}},
		"for another key":        {[]access.Rule{{Name: "other", Tools: deny.Tools, Keys: []string{"other"}, Action: access.Deny}}, []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10", "self.dog.walk 10"}},
	} {
		devicetest.SetPolicy(t, s, access.Policy{Rules: c.rules})
		if got := found(10); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, not %q", name, got, c.want)
		}
	}
	devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{deny}})
	if got := found(1); !slices.Equal(got, []string{"self.dog.walk 10"}) {
		t.Errorf("the first of those that are allowed: %q", got)
	}
}

// endless is a database whose lists do not end: it repeats the devices of the ports, and
// counts the rows that it returned.
type endless struct {
	*devicetest.Ports
	rows atomic.Int64
}

func (e *endless) List(ctx context.Context, q devices.ListQuery) (devices.Page, error) {
	limit := q.Limit
	q.Limit, q.After = 1000, ""
	page, err := e.Ports.List(ctx, q)
	if err != nil || len(page.Rows) == 0 {
		return page, err
	}
	some := page.Rows
	for len(page.Rows) < limit {
		page.Rows = append(page.Rows, some...)
	}
	page.Rows = page.Rows[:limit]
	for i := range page.Rows {
		page.Rows[i].Device.ID = devices.ID(fmt.Sprintf("robot-%09d", e.rows.Add(1)))
	}
	page.Next = devices.Cursor{Sort: devices.SortID, ID: page.Rows[limit-1].Device.ID}.String()
	return page, nil
}

// A search reads a limited number of devices, however many there are and whatever the
// rules deny.
func TestSearchIsBounded(t *testing.T) {
	ports := searchedPorts(t, 40)
	records := &endless{Ports: ports}
	s := ports.ServiceOver(t, fleet.Config{}, func(p *fleet.Ports) { p.Records = records })
	anyRoom, err := selector.Parse("room")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		rules []access.Rule
		found int
	}{
		"no rules":        {nil, 1},
		"by labels":       {[]access.Rule{{Name: "some", Tools: []string{"*volume*"}, Devices: selector.FromMap(map[string]string{"room": "attic"}), Action: access.Deny}}, 1},
		"denied by label": {[]access.Rule{{Name: "all", Tools: []string{"*volume*"}, Devices: anyRoom, Action: access.Deny}}, 0},
	} {
		devicetest.SetPolicy(t, s, access.Policy{Rules: c.rules})
		before := records.rows.Load()
		if found := find(t, s, devicetest.Admin, "volume", 10); len(found) != c.found {
			t.Errorf("%s: %d tools", name, len(found))
		}
		if n := records.rows.Load() - before; n > 6000 {
			t.Errorf("%s: %d devices were read", name, n)
		}
	}
}
