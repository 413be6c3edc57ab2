package mcpserver

import (
	"context"
	"strings"
	"testing"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// fakeExplainer answers with what it was asked.
type fakeExplainer struct{}

func (fakeExplainer) Device(_ context.Context, _ access.Principal, id devices.ID) (api.Why, error) {
	return api.Why{Device: string(id), Cause: "gone", Sentence: "It\x1b[31m left.", Evidence: []api.Evidence{{Text: "its\u202e words"}}}, nil
}

func (fakeExplainer) ExplainCall(_ context.Context, _ access.Principal, call string) (api.Why, error) {
	if call == "unknown" {
		return api.Why{}, devices.Errorf(devices.CodeNotFound, "no call with this id is recorded")
	}
	return api.Why{Call: call, Cause: "sent_no_answer"}, nil
}

// A host learns why, in clean words, and only about its own devices.
func TestExplainDevice(t *testing.T) {
	f := newFleet(t)
	f.connect(t, lamp, devicetest.NewScript())
	f.connect(t, "aa:bb:cc:dd:ee:02", devicetest.NewScript())
	s := f.host(t, PathMCP, "2025-11-25", admin, nil)
	for _, c := range []struct {
		args map[string]any
		want string
	}{
		{map[string]any{"device": string(lamp)}, `"cause":"gone"`},
		{map[string]any{"call": "abc"}, `"cause":"sent_no_answer"`},
		{map[string]any{"call": "unknown"}, `"code":"not_found"`},
		{map[string]any{}, "give device or call"},
		{map[string]any{"device": string(lamp), "call": "abc"}, "give device or call"},
	} {
		got := textOf(call(t, s, "explain_device", c.args))
		if !strings.Contains(got, c.want) || strings.ContainsAny(got, "\x1b\u202e") {
			t.Errorf("%v: %s", c.args, got)
		}
	}
}
