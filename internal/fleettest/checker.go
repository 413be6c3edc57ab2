package fleettest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// Checker makes decisions through the nodes of a cluster and keeps account of what
// was answered. Check compares that with the log, with the rows of the database,
// and with what every node has in memory. It is safe for concurrent use.
type Checker struct {
	c *Cluster
	t testing.TB

	mu      sync.Mutex
	count   int
	answers []Answer
}

// Answer is what a node answered to one decision.
type Answer struct {
	Via            int
	Device, Aspect string
	Value          string // of no other decision
	// Code is "ok", "unrecorded" for a revocation that is in force and not in the
	// database yet, else that of the problem; empty if there was no answer.
	Code       string
	Begun, End time.Time
}

func (a Answer) String() string {
	return fmt.Sprintf("%s of %s to %s through node-%d: %s", a.Aspect, a.Device, a.Value, a.Via, a.Code)
}

// made and refused tell what must have become of the decision. Neither holds for
// one without an answer, or with an answer that leaves it open.
func (a Answer) made() bool    { return a.Code == "ok" || a.Code == "unrecorded" }
func (a Answer) refused() bool { return a.Code != "" && !a.made() }

// NewChecker begins an account.
func (c *Cluster) NewChecker(t testing.TB) *Checker { return &Checker{c: c, t: t} }

// Edit sets a name or a label to a value that no other decision has.
func (k *Checker) Edit(via int, device, aspect string) Answer {
	k.mu.Lock()
	k.count++
	a := Answer{Via: via, Device: device, Aspect: aspect, Value: fmt.Sprint("v", k.count), Begun: time.Now()}
	k.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var err error
	if key, isLabel := strings.CutPrefix(aspect, "label:"); isLabel {
		_, err = k.c.Nodes[via].PatchSelected(ctx, "device="+device, api.SelectionEdit{Labels: map[string]*string{key: &a.Value}})
	} else {
		_, err = k.c.Nodes[via].Patch(ctx, device, api.DeviceEdit{Name: &a.Value}, 0)
	}
	return k.answered(a, "ok", err)
}

// Revoke ends the credentials of a device.
func (k *Checker) Revoke(via int, device string) Answer {
	a := Answer{Via: via, Device: device, Aspect: "admission", Value: "revoked", Begun: time.Now()}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	answer, err := k.c.Nodes[via].Revoke(ctx, device)
	code := "ok"
	if !answer.Recorded {
		code = "unrecorded"
	}
	return k.answered(a, code, err)
}

func (k *Checker) answered(a Answer, ok string, err error) Answer {
	a.End = time.Now()
	var problem *apiclient.Problem
	switch {
	case err == nil:
		a.Code = ok
	case errors.As(err, &problem) && !strings.Contains(problem.Detail, "check whether"):
		a.Code = problem.Code
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.answers = append(k.answers, a)
	return a
}

// Answers counts the answers by code.
func (k *Checker) Answers() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := map[string]int{}
	for _, a := range k.answers {
		n[a.Code]++
	}
	return n
}

// known is what the fleet has of one device, as one place has it.
type known struct {
	Admission, Name string
	Labels          map[string]string
	Revision        int64
}

func (a known) equal(b known) bool {
	return a.Admission == b.Admission && a.Name == b.Name && a.Revision == b.Revision && maps.Equal(a.Labels, b.Labels)
}

// Check waits until all agree, and reports what differs otherwise. It returns the
// log.
func (k *Checker) Check() []api.Change {
	k.t.Helper()
	var log []api.Change
	var differs string
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		if log, differs = k.compare(); differs == "" {
			break
		}
		if time.Now().After(deadline) {
			k.t.Error(differs)
			break
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, fault := range account(k.answers, log) {
		k.t.Error(fault)
	}
	return log
}

// account compares answers with the log.
func account(answers []Answer, log []api.Change) (faults []string) {
	type decided struct{ device, aspect, value string }
	at := map[decided][]int64{}
	for _, c := range log {
		var value string
		_ = json.Unmarshal(c.Value, &value) // no decision has another type
		x := decided{c.Device, c.Aspect, value}
		at[x] = append(at[x], c.Revision)
	}
	type part struct{ device, aspect string }
	last := map[part][]Answer{}
	for _, a := range answers {
		found := at[decided{a.Device, a.Aspect, a.Value}]
		switch {
		case a.made() && len(found) != 1:
			faults = append(faults, fmt.Sprintf("%v, and the log has it at %v", a, found))
		case a.refused() && a.Aspect != "admission" && len(found) != 0:
			faults = append(faults, fmt.Sprintf("%v, and the log has it at %v", a, found))
		}
		if a.Code == "ok" && len(found) == 1 {
			x := part{a.Device, a.Aspect}
			for _, b := range last[x] {
				its := at[decided{b.Device, b.Aspect, b.Value}][0]
				if b.End.Before(a.Begun) && its > found[0] || a.End.Before(b.Begun) && found[0] > its {
					faults = append(faults, fmt.Sprintf("%v at %d, and %v at %d: not in the order of their answers", b, its, a, found[0]))
				}
			}
			last[x] = append(last[x], a)
		}
	}
	return faults
}

// compare reads the log, the rows and every node, and returns the first difference.
func (k *Checker) compare() (log []api.Change, differs string) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for c, err := range apiclient.List[api.Change](ctx, k.c.Nodes[0].Client, nil, "changes") {
		if err != nil {
			return nil, fmt.Sprintf("reading the log: %v", err)
		}
		log = append(log, c)
	}
	want := map[string]known{}
	for i, c := range log {
		if c.Revision != log[0].Revision+int64(i) {
			return log, fmt.Sprintf("revision %d follows %d", c.Revision, log[i-1].Revision)
		}
		if c.Device != "" {
			want[c.Device] = fold(want[c.Device], c)
		}
	}
	if log[0].Revision != 1 {
		return log, fmt.Sprintf("the log begins at %d", log[0].Revision)
	}
	for id, x := range want {
		if x.Admission != "member" && x.Admission != "revoked" { // forgotten
			delete(want, id)
		}
	}
	rows, err := k.rows()
	if err != nil {
		return log, err.Error()
	}
	if d := difference("the rows", rows, want); d != "" {
		return log, d
	}
	head := log[len(log)-1].Revision
	for i, n := range k.c.Nodes {
		if at := int64(n.Metric(k.t, "fleetd_registry_revision")); at != head {
			return log, fmt.Sprintf("node-%d is at revision %d, the log at %d", i, at, head)
		}
		if members := int(n.Metric(k.t, "fleetd_members")); members != len(want) {
			return log, fmt.Sprintf("node-%d has %d members, the log %d", i, members, len(want))
		}
		got := map[string]known{}
		for id := range want { // one by one: from memory where the device is connected, or was asked for before
			d, err := n.Device(ctx, id)
			if err != nil {
				return log, fmt.Sprintf("node-%d: %s: %v", i, id, err)
			}
			got[id] = known{d.Admission, d.Name, d.Labels, d.Revision}
		}
		if d := difference(fmt.Sprint("node-", i), got, want); d != "" {
			return log, d
		}
	}
	return log, ""
}

func difference(where string, got, want map[string]known) string {
	for _, id := range slices.Sorted(maps.Keys(want)) {
		if x, ok := got[id]; !ok || !x.equal(want[id]) {
			return fmt.Sprintf("%s: %s is %+v, by the log %+v", where, id, x, want[id])
		}
	}
	if len(got) != len(want) {
		return fmt.Sprintf("%s: %d devices, by the log %d", where, len(got), len(want))
	}
	return ""
}

// fold is written here anew, so that it can disagree with fleetd's.
func fold(x known, c api.Change) known {
	var text string
	var object struct {
		Admission string             `json:"admission"`
		Name      *string            `json:"name"`
		Labels    map[string]*string `json:"labels"`
	}
	_ = json.Unmarshal(c.Value, &text) // an object, or null
	_ = json.Unmarshal(c.Value, &object)
	x.Revision, x.Labels = c.Revision, maps.Clone(x.Labels)
	if x.Labels == nil {
		x.Labels = map[string]string{}
	}
	label := func(key string, value *string) {
		delete(x.Labels, key)
		if value != nil {
			x.Labels[key] = *value
		}
	}
	key, isLabel := strings.CutPrefix(c.Aspect, "label:")
	switch {
	case isLabel && string(c.Value) == "null":
		label(key, nil)
	case isLabel:
		label(key, &text)
	case c.Aspect == "name":
		x.Name = text
	case c.Aspect == "admission":
		x.Admission = text
		if text != "member" && text != "revoked" {
			x.Name, x.Labels = "", map[string]string{}
		}
	case c.Aspect == "join":
		x = known{Admission: "member", Labels: map[string]string{}, Revision: c.Revision}
	case c.Aspect == "import":
		if object.Admission != "" {
			x.Admission = object.Admission
		}
		if object.Name != nil {
			x.Name = *object.Name
		}
		for key, value := range object.Labels {
			label(key, value)
		}
	}
	return x
}

// rows are the devices as the database has them.
func (k *Checker) rows() (map[string]known, error) {
	rows, err := k.c.DB.Raw.Query("SELECT device, admission, name, labels, revision FROM devices")
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	all := map[string]known{}
	for rows.Next() {
		var id, labels string
		var x known
		if err := rows.Scan(&id, &x.Admission, &x.Name, &labels, &x.Revision); err != nil {
			return nil, err
		}
		if err := json.Unmarshal([]byte(labels), &x.Labels); err != nil {
			return nil, fmt.Errorf("the labels of %s: %w", id, err)
		}
		all[id] = x
	}
	return all, rows.Err()
}
