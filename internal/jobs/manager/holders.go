package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/timescale"
)

// Question is the kind of questions that nodes ask each other about waiting tasks, as
// cluster.Link.Gather sends them.
const Question = "tasks"

// How long a node that did not answer is not asked again. Nobody may ever answer for devices that were declared lost with it.
var (
	silentFor = timescale.Of(10 * time.Second)
	lostFor   = timescale.Of(time.Minute)
)

// question is one to the holders of devices.
type question struct {
	Asks []ask `json:"asks"`
}

// ask is about devices with tasks alike.
type ask struct {
	Action  string       `json:"action"`
	Idle    bool         `json:"idle,omitempty"` // the tasks await the end of a conversation
	Devices []devices.ID `json:"devices"`
}

// reasons are the answer: of the devices that are connected to a node, what holds up their tasks.
type reasons map[devices.ID]jobs.Wait

// Answer answers another node.
func (m *Manager) Answer(_ context.Context, data []byte) ([]byte, error) {
	var q question
	if err := json.Unmarshal(data, &q); err != nil {
		return nil, fmt.Errorf("read the question: %w", err)
	}
	return json.Marshal(m.reasonsOf(q))
}

func (m *Manager) reasonsOf(q question) reasons {
	out := reasons{}
	for _, a := range q.Asks {
		for _, id := range a.Devices {
			why, here := m.Hold(id, a.Idle)
			if here && !jobs.IsAction(a.Action) { // the asking node has a newer version
				why = jobs.WaitNode
			}
			if here {
				out[id] = why
			}
		}
	}
	return out
}

// holders are the nodes to ask about waiting tasks.
type holders struct {
	at map[string][]heldTask // by node
	q  question
}

// isLost reports whether a node is asked only about devices that were declared lost with it.
func (h *holders) isLost(node string) bool {
	return !slices.ContainsFunc(h.at[node], func(t heldTask) bool { return !t.lost })
}

// heldTask is a task that nothing but its holder holds up, or whose holder was declared lost although it may run.
type heldTask struct {
	place  int // in the list
	device devices.ID
	lost   bool
}

// add notes a waiting task of the list, if its holder is to be asked.
func (h *holders) add(place int, j *jobs.Job, why jobs.Wait, v *devices.View) {
	lost := (why == jobs.WaitOffline || why == jobs.WaitAsleep) && v.Presence.Reason == devices.OfflineNodeLost
	if why != jobs.WaitNone && !lost {
		return
	}
	if h.at == nil {
		h.at = map[string][]heldTask{}
	}
	h.at[v.Presence.Node] = append(h.at[v.Presence.Node], heldTask{place, v.Device.ID, lost})
	i := slices.IndexFunc(h.q.Asks, func(a ask) bool { return a.Action == j.Action && a.Idle == j.AwaitsIdle() })
	if i < 0 {
		i = len(h.q.Asks)
		h.q.Asks = append(h.q.Asks, ask{Action: j.Action, Idle: j.AwaitsIdle()})
	}
	h.q.Asks[i].Devices = append(h.q.Asks[i].Devices, v.Device.ID)
}

// askHolders completes the reasons of the tasks of a list that were noted.
func (m *Manager) askHolders(ctx context.Context, h holders, list []api.Task) error {
	if len(h.at) == 0 {
		return nil
	}
	answers, err := m.ask(ctx, h)
	if err != nil {
		return err
	}
	for node, tasks := range h.at {
		answer, answered := answers[node]
		for _, t := range tasks {
			why, here := answer[t.device]
			switch {
			case t.lost && why != jobs.WaitDatabase:
				continue // it is away, whatever became of its node
			case answered && !here:
				why = jobs.WaitOffline // it has just left
			case !answered && m.IsConnected():
				why = jobs.WaitNode
			case why == jobs.WaitNone:
				why = jobs.WaitPace // it is about to begin
			}
			list[t.place].Reason = string(why)
		}
	}
	return nil
}

// ask returns what the nodes answer.
func (m *Manager) ask(ctx context.Context, h holders) (map[string]reasons, error) {
	out := map[string]reasons{}
	var others []string
	for node := range h.at {
		switch {
		case node == m.Node:
			out[node] = m.reasonsOf(h.q)
		case m.IsConnected() && !m.silent.has(node, h.isLost(node)):
			others = append(others, node)
		}
	}
	if len(others) == 0 {
		return out, nil
	}
	data, err := json.Marshal(h.q)
	if err != nil {
		return nil, err
	}
	answers, missing := m.Gather(ctx, Question, data, others)
	for node, answer := range answers {
		var r reasons
		if err := json.Unmarshal(answer, &r); err != nil {
			m.Log.Warn("another node's answer about waiting tasks cannot be read", "node", node, "error", err)
			missing = append(missing, node)
			continue
		}
		out[node] = r
	}
	if ctx.Err() == nil && m.IsConnected() { // else they had no time to answer
		m.silent.add(missing)
	}
	return out, nil
}

// silentNodes are those that have not answered lately: nobody waits for them again. It is safe for concurrent use.
type silentNodes struct {
	mu    sync.Mutex
	since map[string]time.Time
}

func (s *silentNodes) has(node string, lost bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	since, known := s.since[node]
	return known && (time.Since(since) < silentFor || lost && time.Since(since) < lostFor)
}

func (s *silentNodes) add(nodes []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.since, func(_ string, since time.Time) bool { return time.Since(since) >= lostFor })
	for _, node := range nodes {
		if s.since == nil {
			s.since = map[string]time.Time{}
		}
		s.since[node] = time.Now()
	}
}
