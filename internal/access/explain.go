package access

import (
	"encoding/json"
	"strings"
)

// Verdicts of a Step.
const (
	Decided    = "decided"     // this step decides
	Passed     = "passed"      // this step allows the call, or does not apply
	NotReached = "not reached" // an earlier step has decided
)

// Step is one check of a call.
type Step struct {
	Rule    string `json:"rule"`
	Action  Action `json:"action,omitempty"` // of a rule
	Verdict string `json:"verdict"`
	Why     string `json:"why,omitempty"`
}

// Explanation is a Decision with all checks, in order.
type Explanation struct {
	Action Action `json:"action"`
	Rule   string `json:"rule"`
	Detail string `json:"detail,omitempty"`
	Steps  []Step `json:"steps"`
	// Shared means that concurrent identical calls share one result; TTL is for how long
	// it is reused.
	Shared bool   `json:"shared"`
	TTL    string `json:"ttl,omitempty"`
}

// Explain returns how a call would be decided, and why: by Decide, and then by CheckURL.
func (g *Guard) Explain(q Query, arguments json.RawMessage) Explanation {
	d := g.Decide(q)
	final := d
	urls := g.CheckURL(q.Tool, arguments)
	if d.Refusal == nil && urls != nil {
		final = denied(urls)
	}
	x := Explanation{Action: final.Action, Rule: final.Rule}
	if final.Refusal != nil {
		x.Detail = final.Refusal.Detail
	}
	reached := true
	step := func(rule string, action Action, why string) {
		s := Step{Rule: rule, Action: action, Verdict: Passed, Why: why}
		switch {
		case !reached:
			s.Verdict, s.Why = NotReached, ""
		case rule == d.Rule:
			reached = false
			if s.Why = "its action is " + string(d.Action); final.Rule == rule {
				s.Verdict, s.Why = Decided, x.Detail
			}
		}
		x.Steps = append(x.Steps, s)
	}
	step(RuleCaller, "", "the request has an authenticated caller")
	who := q.By.Caller
	if who == nil {
		return x
	}
	step(RuleScope, "", "the key has the scopes "+strings.Join(who.Scopes.Names(), ", "))
	step(RuleDevices, "", "the key covers the device")
	step(RuleTools, "", "the key covers the tool")
	step(RuleUserOnly, "", "the tool is for language models too, or the key has the scope "+string(ScopeUser))
	step(RuleUnlisted, "", "the device has listed the tool, or the key has the scope "+string(ScopeUser))
	for i := range g.policy.Rules {
		r := &g.policy.Rules[i]
		step(rulePolicy+r.Name, r.Action, r.mismatch(&q))
	}
	for i := range builtin {
		step(builtin[i].Name, builtin[i].Action, builtin[i].mismatch(&q))
	}
	step(RuleDefault, Allow, "")
	if g.TakesURL(q.Tool) && d.Refusal == nil {
		s := Step{Rule: RuleURL, Verdict: Passed, Why: "the URL is on the allow-list, or there is none"}
		if urls != nil {
			s.Verdict, s.Why = Decided, urls.Detail
		}
		x.Steps = append(x.Steps, s)
	}
	ttl, shared := g.Shared(q.Device, q.Labels, q.Tool)
	if x.Shared = shared; ttl > 0 {
		x.TTL = ttl.String()
	}
	return x
}
