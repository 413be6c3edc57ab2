package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
)

// The holder of the device of a waiting task is asked where nothing else holds the task up, or where it was declared lost; one
// that does not answer is not asked again for some time.
func TestReasonsOfHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// hold answers as the node of this name does: its devices begin with that name.
		hold := func(node string) func(devices.ID, bool) (jobs.Wait, bool) {
			return func(id devices.ID, idle bool) (jobs.Wait, bool) {
				switch name, what, _ := strings.Cut(string(id), "-"); {
				case name != node, what == "left":
					return "", false
				case node == "alone":
					return jobs.WaitDatabase, true
				case what == "busy", idle && (what == "talks" || what == "speaks"):
					return jobs.WaitBusy, true
				}
				return "", true
			}
		}
		asked, reachable := map[string]int{}, true
		m := &Manager{Options: Options{Node: "here", Log: slog.New(slog.DiscardHandler), Hold: hold("here"), IsConnected: func() bool { return reachable }}}
		m.Gather = func(_ context.Context, kind string, data []byte, nodes []string) (map[string][]byte, []string) {
			answers, missing := map[string][]byte{}, []string(nil)
			for _, node := range nodes {
				asked[node]++
				other := &Manager{Options: Options{Hold: hold(node)}}
				switch answer, err := other.Answer(t.Context(), data); {
				case node == "frozen", node == "gone":
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
		}
		cases := []struct {
			device string
			lost   bool
			idle   bool
			why    jobs.Wait
			want   string
			cut    string // what it is while this node reaches no other one
		}{
			{"here-free", false, false, "", "pace", "pace"},
			{"here-busy", false, false, "", "busy", "busy"},
			{"here-speaks", false, false, "", "pace", "pace"},
			{"here-talks", false, true, "", "busy", "busy"},
			{"well-free", false, false, "", "pace", "pace"},
			{"well-busy", false, false, "", "busy", "pace"},
			{"well-talks", false, true, "", "busy", "pace"},
			{"alone-held", false, false, "", "database", "pace"},
			{"alone-lost", true, false, jobs.WaitOffline, "database", "offline"},
			{"alone-lost", true, false, jobs.WaitAsleep, "database", string(jobs.WaitAsleep)},
			{"alone-left", false, false, jobs.WaitOffline, "offline", "offline"},
			{"alone-held", false, false, jobs.WaitPaused, "paused", "paused"},
			{"alone-held", false, false, jobs.WaitPace, "pace", "pace"},
			{"frozen-held", false, false, "", "node", "pace"},
			{"frozen-lost", true, false, jobs.WaitOffline, "offline", "offline"},
			{"well-lost", true, false, jobs.WaitOffline, "offline", "offline"},
			{"odd-held", false, false, "", "node", "pace"},
			{"gone-lost", true, false, jobs.WaitOffline, "offline", "offline"},
			{"well-left", false, false, "", "offline", "pace"},
		}
		explain := func() {
			t.Helper()
			var h holders
			var list []api.Task
			for i, c := range cases {
				id := devices.ID(c.device)
				node, _, _ := strings.Cut(c.device, "-")
				v := devices.View{Device: devices.Device{ID: id}, Presence: devices.Presence{Device: id, Node: node, Online: !c.lost}}
				if c.lost {
					v.Presence.Reason = devices.OfflineNodeLost
				}
				j := &jobs.Job{Action: "call"}
				if c.idle {
					j.Spec.Busy = "wait"
				}
				list = append(list, api.Task{Device: c.device, Reason: string(c.why)})
				h.add(i, j, c.why, &v)
			}
			if err := m.askHolders(t.Context(), h, list); err != nil {
				t.Fatal(err)
			}
			for i, c := range cases {
				want := c.want
				if !reachable {
					want = c.cut
				}
				if list[i].Reason != want {
					t.Errorf("reachable %t: %+v: %q, want %q", reachable, c, list[i].Reason, want)
				}
			}
		}
		explain()
		explain()
		if text := fmt.Sprint(asked); text != "map[alone:2 frozen:1 gone:1 odd:1 well:2]" {
			t.Errorf("asked %s", text)
		}
		time.Sleep(silentFor)
		explain()
		if text := fmt.Sprint(asked); text != "map[alone:3 frozen:2 gone:1 odd:2 well:3]" {
			t.Errorf("asked %s later", text)
		}
		// A client that leaves before the others have answered.
		m.silent = silentNodes{}
		left, leave := context.WithCancel(t.Context())
		leave()
		var h holders
		h.add(0, &jobs.Job{}, "", &devices.View{Device: devices.Device{ID: "frozen-held"}, Presence: devices.Presence{Node: "frozen"}})
		if err := m.askHolders(left, h, make([]api.Task, 1)); err != nil || m.silent.has("frozen", true) {
			t.Errorf("a node that had no time to answer counts as silent, %v", err)
		}
		reachable = false
		explain()
		if _, err := m.Answer(t.Context(), json.RawMessage(`[`)); err == nil {
			t.Error("a question that is no JSON was answered")
		}
	})
}

// The reasons of a device's tasks, as its connection was: the last transport counts, whatever its own setting.
func TestReasonsOfTheDevice(t *testing.T) {
	m := newManager(t)
	if _, _, err := m.Create(t.Context(), m.key(t, "jobs jobs:read tools:call", ""), callSpec("self.get", lamp), CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	by := m.key(t, "jobs jobs:read", "")
	for _, c := range []struct {
		transport devices.Transport
		epoch     devices.Epoch
		want      jobs.Wait
	}{
		{"", 0, jobs.WaitOffline},
		{devices.TransportWebSocket, 7, jobs.WaitAsleep},
		{devices.TransportMQTT, 8, jobs.WaitOffline},
	} {
		if c.epoch != 0 {
			m.ports.SavePresence(devices.Presence{Device: lamp, Epoch: c.epoch, Transport: c.transport, Reason: string(devices.CloseGone)})
		}
		list, err := m.Queue(t.Context(), by, lamp)
		if err != nil || len(list) != 1 || list[0].Reason != string(c.want) {
			t.Errorf("%+v: %+v, %v", c, list, err)
		}
		tasks, err := m.Tasks(t.Context(), by, TaskQuery{Job: list[0].Job, Reason: string(c.want)})
		if err != nil || len(tasks.Items) != 1 || !slices.Equal(tasks.Items, list) {
			t.Errorf("%+v: %+v, %v", c, tasks.Items, err)
		}
	}
}

// A holder that does not know the action, since the node that asks is newer, says that its tasks wait for another node.
func TestReasonOfAnOlderHolder(t *testing.T) {
	m := &Manager{Options: Options{Hold: func(id devices.ID, _ bool) (jobs.Wait, bool) { return jobs.WaitBusy, id != "away" }}}
	ids := []devices.ID{"here", "away"}
	for action, want := range map[string]jobs.Wait{"call": jobs.WaitBusy, "levitate": jobs.WaitNode} {
		got := m.reasonsOf(question{[]ask{{Action: action, Devices: ids}}})
		if len(got) != 1 || got["here"] != want {
			t.Errorf("%s: %v, want %s", action, got, want)
		}
	}
}
