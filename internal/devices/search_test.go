package devices_test

import (
	"fmt"
	"slices"
	"testing"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// searched is a fleet with a few lists, read from the database.
func searched(t testing.TB, n int) *devices.Service {
	t.Helper()
	ports := devicetest.New()
	var hashes []devices.Hash
	for _, list := range []string{
		`[` + devicetest.Volume + `,` + devicetest.Reboot + `]`,
		`[` + devicetest.Volume + `,{"name":"self.lamp.turn_on","description":"Turns the Lamp on.","inputSchema":{"type":"object","properties":{}}}]`,
		`[{"name":"self.lamp.turn_on","description":"Turns the other lamp on.","inputSchema":{"type":"object","properties":{}}}]`,
		`[{"name":"self.dog.walk","description":"Walks; turn the lamp off first.","inputSchema":{"type":"object","properties":{}}}]`,
	} {
		cat, err := devices.NewCatalog([]byte(list))
		if err != nil {
			t.Fatal(err)
		}
		hashes = append(hashes, cat.Hash)
		ports.KeepCatalog(devices.CatalogText{Hash: cat.Hash, Tools: cat.JSON, Count: len(cat.Tools)})
	}
	for i := range n {
		id := devices.ID(fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&255))
		ports.SaveDevice(devices.Device{ID: id, Admission: devices.AdmissionMember, Labels: map[string]string{"room": []string{"lab", "hall"}[i%2]}})
		ports.SavePresence(devices.Presence{Device: id, Epoch: 1, Catalog: hashes[i%4], MCP: devices.MCPReady})
	}
	s := ports.Service(t, devices.Config{})
	for _, h := range hashes { // what devices have is in memory once it was asked for
		if _, err := s.Catalog(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func by(t testing.TB, scopes string, selector access.Selector, tools ...string) access.By {
	t.Helper()
	s, err := access.ParseScopes([]string{"devices:read", scopes})
	if err != nil {
		t.Fatal(err)
	}
	return access.By{Who: access.NewCaller("k", "k", s, selector, tools), Via: access.ViaMCP}
}

func TestSearchTools(t *testing.T) {
	s := searched(t, 40)
	admin := devicetest.Admin
	for name, c := range map[string]struct {
		by    access.By
		query string
		want  []string
	}{
		"name":            {admin, "set_volume", []string{"self.audio_speaker.set_volume 20"}},
		"case":            {admin, "SET_Volume", []string{"self.audio_speaker.set_volume 20"}},
		"description":     {admin, "lamp TURN", []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10", "self.dog.walk 10"}},
		"all words":       {admin, "lamp walk", []string{"self.dog.walk 10"}},
		"nothing":         {admin, "teapot", nil},
		"no words":        {admin, "  ", nil},
		"for people":      {admin, "reboot", []string{"self.reboot 10"}},
		"model":           {by(t, "tools:call", nil), "reboot", nil},
		"person":          {by(t, "tools:call:user", nil), "reboot", []string{"self.reboot 10"}},
		"of one room":     {by(t, "tools:call", access.Selector{"room": "hall"}), "lamp", []string{"self.lamp.turn_on 10", "self.dog.walk 10"}},
		"only some tools": {by(t, "tools:call", nil, "*dog*"), "lamp", []string{"self.dog.walk 10"}},
		"nobody":          {access.By{}, "lamp", nil},
	} {
		var got []string
		for _, m := range s.SearchTools(c.by, c.query, 10, 3) {
			got = append(got, fmt.Sprintf("%s %d", m.Tool.Name, m.Count))
			if len(m.Devices) != 3 {
				t.Errorf("%s: devices %q", name, m.Devices)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, not %q", name, got, c.want)
		}
	}
	if got := s.SearchTools(admin, "turn", 1, 3); len(got) != 1 || got[0].Tool.Name != "self.lamp.turn_on" {
		t.Errorf("%+v", got)
	}
}

// What rules deny is not found: what they deny everywhere takes no place from
// what they do not, and devices on which they deny a tool are not counted.
func TestSearchByRules(t *testing.T) {
	s := searched(t, 40)
	caller := by(t, "tools:call", nil)
	found := func(limit int) (got []string) {
		for _, m := range s.SearchTools(caller, "lamp", limit, 3) {
			got = append(got, fmt.Sprintf("%s %d", m.Tool.Name, m.Count))
		}
		return got
	}
	deny := access.Rule{Name: "dark", Tools: []string{"*.lamp.*"}, Action: access.Deny}
	hall := access.Rule{Name: "hall", Tools: []string{"*.lamp.*"}, Devices: access.Selector{"room": "hall"}, Action: access.Allow}
	lab := access.Rule{Name: "lab", Tools: []string{"self.dog.walk"}, Devices: access.Selector{"room": "lab"}, Action: access.Deny}
	for name, c := range map[string]struct {
		rules []access.Rule
		want  []string
	}{
		"no rules":          {nil, []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10", "self.dog.walk 10"}},
		"denied everywhere": {[]access.Rule{deny}, []string{"self.dog.walk 10"}},
		"but in the hall":   {[]access.Rule{hall, deny}, []string{"self.lamp.turn_on 10", "self.dog.walk 10"}},
		"elsewhere":         {[]access.Rule{lab}, []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10", "self.dog.walk 10"}},
		"over another way":  {[]access.Rule{{Name: "rest", Tools: deny.Tools, Via: []access.Via{access.ViaREST}, Action: access.Deny}}, []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10", "self.dog.walk 10"}},
		"for another key":   {[]access.Rule{{Name: "other", Tools: deny.Tools, Keys: []string{"other"}, Action: access.Deny}}, []string{"self.lamp.turn_on 10", "self.lamp.turn_on 10", "self.dog.walk 10"}},
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

// A search allocates for its answer, however many devices there are.
func TestSearchAllocations(t *testing.T) {
	var perSearch []float64
	for _, n := range []int{100, 5000} {
		s := searched(t, n)
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "some", Tools: []string{"*lamp*"}, Devices: access.Selector{"device": "02:00:00:00:00:03"}, Action: access.Deny}}})
		limited := by(t, "tools:call", access.Selector{"room": "hall"})
		perSearch = append(perSearch, testing.AllocsPerRun(20, func() {
			if len(s.SearchTools(limited, "lamp", 10, 3)) != 2 {
				t.Error("nothing is found")
			}
		}))
	}
	if perSearch[1] > perSearch[0]+2 || perSearch[1] > 30 {
		t.Errorf("a search makes %v allocations in the small fleet, %v in the large one", perSearch[0], perSearch[1])
	}
}
