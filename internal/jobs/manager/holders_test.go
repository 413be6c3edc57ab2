package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
)

// The holder of the device of a waiting task is asked once per request, and only where nothing else holds it up.
func TestReasonsOfHolders(t *testing.T) {
	ready := map[string]jobs.Readiness{
		"here":  {Busy: []devices.ID{"here-busy"}},
		"well":  {Busy: []devices.ID{"well-busy"}},
		"alone": {Blocked: true},
		"old":   {},
	}
	asked := map[string]int{}
	m := &Manager{Options: Options{Node: "here", Log: slog.New(slog.DiscardHandler),
		Readiness: func([]devices.ID) jobs.Readiness { return ready["here"] },
		Gather: func(_ context.Context, kind string, data []byte, nodes []string) (map[string][]byte, []string) {
			answers, missing := map[string][]byte{}, []string(nil)
			for _, node := range nodes {
				asked[node]++
				other := &Manager{Options: Options{Readiness: func([]devices.ID) jobs.Readiness { return ready[node] }}}
				switch answer, err := other.Answer(t.Context(), data); {
				case node == "frozen":
					missing = append(missing, node)
				case node == "odd":
					answers[node] = []byte("[]")
				case err != nil || kind != Question:
					t.Errorf("question %s: %v", kind, err)
				default:
					answers[node] = answer
				}
			}
			return answers, missing
		}}}
	known := map[devices.ID]devices.View{}
	var list []api.Task
	var want []string
	for _, c := range []struct{ device, node, lost, reason, want string }{
		{"here-free", "here", "", "pace", "pace"},
		{"here-busy", "here", "", "pace", "busy"},
		{"well-free", "well", "", "pace", "pace"},
		{"well-busy", "well", "", "pace", "busy"},
		{"alone-held", "alone", "", "pace", "database"},
		{"alone-lost", "alone", "node_lost", "offline", "database"},
		{"alone-slept", "alone", "node_lost", string(jobs.WaitAsleep), "database"},
		{"alone-left", "alone", "gone", "offline", "offline"},
		{"alone-paused", "alone", "", "paused", "paused"},
		{"frozen-held", "frozen", "", "pace", "node"},
		{"frozen-lost", "frozen", "node_lost", "offline", "offline"},
		{"old-lost", "old", "node_lost", "offline", "offline"},
		{"odd-held", "odd", "", "pace", "node"},
		{"unknown", "", "", "offline", "offline"},
	} {
		known[devices.ID(c.device)] = devices.View{Presence: devices.Presence{Device: devices.ID(c.device), Node: c.node, Online: c.lost == "", Reason: c.lost}}
		list, want = append(list, api.Task{Device: c.device, Reason: c.reason}), append(want, c.want)
	}
	delete(known, "unknown")
	h := m.newHolders()
	for page := range 2 {
		got := slices.Clone(list)
		if err := h.explain(t.Context(), got, known); err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if got[i].Reason != want[i] {
				t.Errorf("page %d: %s: %s, want %s", page, got[i].Device, got[i].Reason, want[i])
			}
		}
	}
	if text := fmt.Sprint(asked); text != "map[alone:2 frozen:1 odd:1 old:2 well:2]" {
		t.Errorf("asked %s", text)
	}
	if _, err := m.Answer(t.Context(), json.RawMessage(`[`)); err == nil {
		t.Error("a question that is no JSON was answered")
	}
}
