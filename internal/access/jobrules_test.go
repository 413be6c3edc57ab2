package access

import (
	"slices"
	"testing"

	"fleetd/internal/selector"
)

// A job cannot be the way around a rule of the interface over which it is created.
func TestJobRules(t *testing.T) {
	lab, err := selector.Parse("room=lab")
	if err != nil {
		t.Fatal(err)
	}
	g, err := Compile(Policy{Rules: []Rule{
		{Name: "no reset", Tools: []string{"self.reset"}, Action: Deny},
		{Name: "models do not dim", Tools: []string{"self.dim"}, Via: []Via{ViaMCP}, Devices: lab, Action: Deny},
		{Name: "lab confirms", Tools: []string{"self.move"}, Devices: lab, Action: Confirm},
		{Name: "lab is closed", Tools: []string{"self.wave"}, Devices: lab, Action: Deny},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		via     Via
		tool    string
		confirm []string
		refused bool
	}{
		{ViaREST, "self.reset", nil, true},
		{ViaREST, "self.dim", nil, false},
		{ViaMCP, "self.dim", nil, true},
		{ViaREST, "self.move", []string{"policy:lab confirms"}, false},
		{ViaREST, "self.wave", nil, false}, // decided for each device
		{ViaREST, "self.reboot", nil, false},
		{ViaMCP, "self.reboot", []string{RuleConfirm}, false},
	} {
		confirm, no := g.JobRules(Query{By: Principal{Caller: Admin, Via: c.via}, Tool: c.tool})
		if !slices.Equal(confirm, c.confirm) || (no != nil) != c.refused {
			t.Errorf("%s via %s: %v, %v", c.tool, c.via, confirm, no)
		}
	}
	few := NewCaller("k", "k", mustScopes(ScopeJobs, ScopeCall), selector.Selector{}, []string{"self.move"})
	for _, tool := range []string{"self.dim", "self.reboot"} {
		if _, no := g.JobRules(Query{By: Principal{Caller: few, Via: ViaREST}, Tool: tool}); no == nil {
			t.Errorf("a key for another tool may make jobs that call %s", tool)
		}
	}
	jobsOnly := NewCaller("k", "k", mustScopes(ScopeJobs), selector.Selector{}, nil)
	if _, no := g.JobRules(Query{By: Principal{Caller: jobsOnly, Via: ViaREST}, Tool: "self.dim"}); no == nil {
		t.Error("a key without tools:call may make jobs that call tools")
	}
}
