package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs"
)

// Question is the kind of questions that nodes ask each other about waiting tasks, as
// cluster.Link.Gather sends them.
const Question = "tasks"

// question is one to the holders of devices.
type question struct {
	Devices []devices.ID `json:"devices"`
}

// Answer answers another node.
func (m *Manager) Answer(_ context.Context, data []byte) ([]byte, error) {
	var q question
	if err := json.Unmarshal(data, &q); err != nil {
		return nil, fmt.Errorf("read the question: %w", err)
	}
	return json.Marshal(m.Readiness(q.Devices))
}

// holders are the nodes that hold the devices of waiting tasks, during one request: each is
// awaited in vain at most once.
type holders struct {
	m      *Manager
	silent map[string]bool
}

func (m *Manager) newHolders() *holders { return &holders{m, map[string]bool{}} }

// explain completes the reasons of waiting tasks: nothing but their holder holds them up, or it was
// declared lost although it may run.
func (h *holders) explain(ctx context.Context, list []api.Task, known map[devices.ID]devices.View) error {
	var q question
	at := map[string][]*api.Task{} // by node
	for i := range list {
		t := &list[i]
		p := known[devices.ID(t.Device)].Presence
		switch jobs.Wait(t.Reason) {
		case jobs.WaitPace:
			q.Devices = append(q.Devices, p.Device)
		case jobs.WaitOffline, jobs.WaitAsleep:
			if p.Reason != devices.OfflineNodeLost {
				continue
			}
		default:
			continue
		}
		at[p.Node] = append(at[p.Node], t)
	}
	if len(at) == 0 {
		return nil
	}
	ready, err := h.ask(ctx, q, at)
	if err != nil {
		return err
	}
	for node, tasks := range at {
		s, answered := ready[node]
		for _, t := range tasks {
			switch held := t.Reason == string(jobs.WaitPace); {
			case answered && s.Blocked:
				t.Reason = string(jobs.WaitDatabase)
			case !answered && held:
				t.Reason = string(jobs.WaitNode)
			case held && slices.Contains(s.Busy, devices.ID(t.Device)):
				t.Reason = string(jobs.WaitBusy)
			}
		}
	}
	return nil
}

// ask returns what the nodes with these tasks answer.
func (h *holders) ask(ctx context.Context, q question, at map[string][]*api.Task) (map[string]jobs.Readiness, error) {
	out := map[string]jobs.Readiness{}
	var others []string
	for node := range at {
		switch {
		case node == h.m.Node:
			out[node] = h.m.Readiness(q.Devices)
		case !h.silent[node]:
			others = append(others, node)
		}
	}
	if len(others) == 0 {
		return out, nil
	}
	data, err := json.Marshal(q)
	if err != nil {
		return nil, err
	}
	answers, missing := h.m.Gather(ctx, Question, data, others)
	for _, node := range missing {
		h.silent[node] = true
	}
	for node, answer := range answers {
		var s jobs.Readiness
		if err := json.Unmarshal(answer, &s); err != nil {
			h.m.Log.Warn("another node's answer about waiting tasks cannot be read", "node", node, "error", err)
			h.silent[node] = true
			continue
		}
		out[node] = s
	}
	return out, nil
}
