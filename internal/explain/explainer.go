// Package explain answers why a device is offline or a call failed. It merges what all
// nodes recorded with the state of the device, and applies an ordered table of rules: the
// first one that finds something decides.
package explain

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/counters"
	"fleetd/internal/devices"
)

// Question is the kind of the questions to other nodes.
const Question = "records"

// Limits of one answer.
const (
	maxSteps    = 200  // of one node, that rules look at
	maxOthers   = 50   // of those, besides, that proved nothing
	maxRecords  = 1000 // of one page of a device log
	eventTime   = 24 * time.Hour
	maxEvents   = 20
	missingDB   = "database"
	missingSeen = "events"
)

// Devices are the parts of the core that an Explainer needs.
type Devices interface {
	// Get returns the state of a device; an error with CodeDeviceUnknown if the fleet
	// does not have it.
	Get(ctx context.Context, id devices.ID) (devices.View, error)
	// Permit returns an error if the principal may not do this to a device.
	Permit(ctx context.Context, principal access.Principal, scope access.Scope, id devices.ID) error
	// List returns one page of devices, which may be short, and where the next one begins.
	List(ctx context.Context, q devices.ListQuery) (views []devices.View, next string, err error)
}

// Records are what this node recorded.
type Records interface {
	// Steps returns the steps of a device after a place in its log: those that were proven, or the others.
	Steps(id devices.ID, proven bool, kind devices.StepKind, after devices.LogPosition, limit int) []devices.Step
	Calls(id devices.ID, after devices.LogPosition, limit int) []devices.CallStep
	CallsOf(call string) []devices.CallStep
	Refusals() []devices.Step
	Reach(id devices.ID) time.Time
	// Ended counts the devices that had an end like it, and those of them from an address;
	// EndedOf counts some devices only.
	Ended(q devices.Ends, remote netip.Addr) (all, there int)
	EndedOf(ids []devices.ID, q devices.Ends, remote netip.Addr) (all, there int)
	// CallsOn returns the calls of some devices that had an outcome.
	CallsOn(ids []devices.ID, outcome string) []devices.CallStep
}

// Events reads the event stream.
type Events interface {
	Recent(ctx context.Context, q devices.EventQuery, limit int, keep func(*devices.StreamEvent) bool) ([]devices.StreamEvent, error)
}

// Options of an Explainer.
type Options struct {
	Devices Devices
	Records Records // nil with --recorder-memory 0
	Events  Events
	Node    string
	// Keepalive is that of devices: those that lose their network at once are found dead
	// within so long.
	Keepalive time.Duration
	// Nodes returns the names of the live nodes, this one included.
	Nodes  func() []string
	Gather devices.Gather
	// Compute waits for a place in which an answer to another node is computed, and returns what gives it back.
	Compute func(context.Context) (leave func(), err error)
}

// Explainer answers why. It is safe for concurrent use.
type Explainer struct {
	opt Options
	// Explained counts the explanations by cause.
	Explained counters.Map[string]
}

// New returns an Explainer.
func New(opt Options) *Explainer { return &Explainer{opt: opt} }

// Metrics registers the explainer's metrics.
func (x *Explainer) Metrics(r *counters.Registry) {
	counters.ByKey(r.Counter("explained_causes_total", "Explanations of devices and calls, by cause; docs/troubleshooting.md lists the causes.", "cause"), &x.Explained)
}

// question is what a node requests from another one; one of Device, Call, Refusals,
// Ended and Batch.
type question struct {
	Device devices.ID       `json:"device,omitempty"`
	Kind   devices.StepKind `json:"kind,omitempty"`
	// Before, Node and Seq are the place in the log of the device after which records are requested.
	Before time.Time `json:"before,omitzero"`
	Node   string    `json:"node,omitempty"`
	Seq    uint64    `json:"seq,omitempty"`
	Limit  int       `json:"limit,omitempty"`
	// Others limits the steps that proved nothing instead of Limit.
	Others   int           `json:"others,omitempty"`
	Call     string        `json:"call,omitempty"`
	Refusals bool          `json:"refusals,omitempty"`
	Ended    *endsQuestion `json:"ended,omitempty"`
	Batch    *batch        `json:"batch,omitempty"`
}

// records is the answer.
type records struct {
	Steps []devices.Step     `json:"steps,omitempty"`
	Calls []devices.CallStep `json:"calls,omitempty"`
	Since time.Time          `json:"since"`
	Ends  *endCounts         `json:"ends,omitempty"`
}

// Answer answers another node.
func (x *Explainer) Answer(ctx context.Context, data []byte) ([]byte, error) {
	var q question
	if err := json.Unmarshal(data, &q); err != nil {
		return nil, fmt.Errorf("read the question: %w", err)
	}
	leave, err := x.opt.Compute(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	content, err := json.Marshal(x.own(q))
	if err != nil || len(content) < compressFrom {
		return content, err
	}
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err = w.Write(content)
	if err = cmp.Or(err, w.Close()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

const (
	// compressFrom is from how many bytes an answer is compressed.
	compressFrom = 16 << 10
	// maxAnswer limits a decompressed answer, in bytes.
	maxAnswer = 16 << 20
)

// decode reads the answer of another node.
func decode(answer []byte) (r records, err error) {
	if bytes.HasPrefix(answer, []byte{0x1f, 0x8b}) { // gzip
		z, err := gzip.NewReader(bytes.NewReader(answer))
		if err != nil {
			return r, err
		}
		if answer, err = io.ReadAll(io.LimitReader(z, maxAnswer)); err != nil {
			return r, err
		}
	}
	err = json.Unmarshal(answer, &r)
	return r, err
}

// own returns the records of this node.
func (x *Explainer) own(q question) records {
	r := x.opt.Records
	switch {
	case r == nil:
		return records{}
	case q.Ended != nil:
		return records{Ends: x.countEnds(q.Ended)}
	case q.Batch != nil:
		return x.ofBatch(q.Batch)
	case q.Refusals:
		return records{Steps: r.Refusals()}
	case q.Call != "":
		return records{Calls: r.CallsOf(q.Call)}
	}
	limit := min(max(q.Limit, 1), maxRecords+1)
	after := devices.LogPosition{At: q.Before, Node: q.Node, Seq: q.Seq}
	out := records{Since: r.Reach(q.Device)}
	if q.Kind != kindCall {
		out.Steps = append(r.Steps(q.Device, true, q.Kind, after, limit), r.Steps(q.Device, false, q.Kind, after, min(limit, cmp.Or(max(q.Others, 0), limit)))...)
	}
	if q.Kind == "" || q.Kind == kindCall {
		out.Calls = r.Calls(q.Device, after, limit)
	}
	return out
}

// kindCall is the kind of calls in a device log.
const kindCall devices.StepKind = "call"

// gathered are the records of all nodes.
type gathered struct {
	steps   []devices.Step
	calls   []devices.CallStep
	reach   []api.Reach
	missing []string
	ends    map[string]endCounts // by node
}

// gather returns the records of all live nodes, newest first.
func (x *Explainer) gather(ctx context.Context, q question) (gathered, error) {
	a, err := x.ask(ctx, q)
	if err != nil {
		return gathered{}, err
	}
	return x.merge(q, a), nil
}

// answers are what other nodes answered, by node.
type answers struct {
	of      map[string][]byte
	missing []string
}

// ask sends the question to the other nodes, and waits for them.
func (x *Explainer) ask(ctx context.Context, q question) (a answers, err error) {
	data, err := json.Marshal(q)
	if err != nil {
		return a, err
	}
	a.of, a.missing = x.opt.Gather(ctx, Question, data, x.opt.Nodes())
	return a, nil
}

// merge joins the answers with the records of this node.
func (x *Explainer) merge(q question, a answers) (g gathered) {
	all := map[string]records{x.opt.Node: x.own(q)}
	g.missing = append([]string{}, a.missing...)
	for node, answer := range a.of {
		r, err := decode(answer)
		if err != nil {
			g.missing = append(g.missing, node)
			continue
		}
		all[node] = r
	}
	g.reach, g.ends = []api.Reach{}, map[string]endCounts{}
	for _, node := range slices.Sorted(maps.Keys(all)) {
		r := all[node]
		g.steps, g.calls = append(g.steps, r.Steps...), append(g.calls, r.Calls...)
		if r.Ends != nil {
			g.ends[node] = *r.Ends
		}
		if !r.Since.IsZero() {
			g.reach = append(g.reach, api.Reach{Node: node, Since: api.At(r.Since)})
		}
	}
	slices.SortStableFunc(g.steps, func(a, b devices.Step) int { return a.Position().Compare(b.Position()) })
	slices.SortStableFunc(g.calls, func(a, b devices.CallStep) int { return a.Position().Compare(b.Position()) })
	return g
}

// Device explains a device. The caller has checked that by may see it.
func (x *Explainer) Device(ctx context.Context, by access.Principal, id devices.ID) (api.Why, error) {
	g, err := x.gather(ctx, question{Device: id, Limit: maxSteps, Others: maxOthers})
	if err != nil {
		return api.Why{}, err
	}
	f := &facts{now: clock.Now(), steps: g.steps, calls: g.calls, found: true}
	f.view, err = x.opt.Devices.Get(ctx, id)
	state := string(f.view.State)
	switch {
	case err == nil:
		f.found = f.view.State != devices.StatePending || f.view.Device.Admission != ""
	case devices.AsError(err).Code == devices.CodeDeviceUnknown:
		f.found, state = false, "unknown"
		if refused, err := x.gather(ctx, question{Refusals: true}); err == nil {
			f.steps = append(f.steps, slices.DeleteFunc(refused.steps, func(s devices.Step) bool { return s.Device != id })...)
		}
	default: // neither the holder nor the database has its state
		state = "unknown"
		g.missing = append(g.missing, missingDB)
		f.view.Presence = f.recorded()
	}
	if p := f.view.Presence; err == nil && f.view.State == devices.StateOffline && p.Reason == devices.OfflineNodeLost && !slices.Contains(x.opt.Nodes(), p.Node) {
		g.missing = append(g.missing, p.Node) // nobody asks a node without a lease
	}
	for i := range f.calls { // what the rules ask of a tool shows in the cause alone
		if c := &f.calls[i]; !mayRead(by, c) && c.Tool != toolUpgrade && c.Tool != messageSystem {
			c.Tool = ""
		}
	}
	found := explainDevice(f)
	if err != nil && f.found {
		found.certain = false
	}
	e := api.Why{Device: string(id), State: state, Well: isWell(found.cause), Cause: string(found.cause), Sentence: found.sentence, Certain: found.certain,
		Evidence: []api.Evidence{}, Next: found.cause.next(string(id)), Reach: g.reach, Missing: g.missing}
	seen := x.mayWrite(ctx, by, id)
	if text, ok := x.common(ctx, by, f, found, seen); ok {
		e.Sentence += " " + text
		e.Next = append([]string{nextNetwork}, e.Next...)
	}
	for i := range f.steps[:min(len(f.steps), evidenceLength)] {
		e.Evidence = append(e.Evidence, evidenceOf(&f.steps[i], seen))
	}
	for i := range f.calls[:min(len(f.calls), evidenceLength)] {
		if c := shown(by, f.calls[i]); c.Outcome != outcomeOK && c.Outcome != outcomeSent || c.Late {
			e.Evidence = append(e.Evidence, evidenceOfCall(&c))
		}
	}
	if events, err := x.opt.Events.Recent(ctx, devices.EventQuery{Device: id, Since: f.now.Add(-eventTime)}, maxEvents, isPresence); err != nil {
		e.Missing = append(e.Missing, missingSeen)
	} else if len(f.steps) == 0 {
		for _, event := range events {
			e.Evidence = append(e.Evidence, evidenceOfEvent(event))
		}
	}
	slices.SortStableFunc(e.Evidence, func(a, b api.Evidence) int { return b.At.Compare(a.At.Time) })
	x.Explained.Add(e.Cause, 1)
	return e, nil
}

func lateText(late bool) string {
	if late {
		return ", late"
	}
	return ""
}

// mayRead reports whether the caller may read what is recorded of a call: of its own, and with the scope admin of any.
func mayRead(by access.Principal, c *devices.CallStep) bool {
	return by.Caller != nil && (by.Caller.Scopes.Has(access.ScopeAdmin) || c.Key == by.Key())
}

// shown returns a call as the caller may see it: of a call that it may not read, when it was made and how it ended.
func shown(by access.Principal, c devices.CallStep) devices.CallStep {
	if mayRead(by, &c) {
		return c
	}
	return devices.CallStep{Device: c.Device, At: c.At, Took: c.Took, Late: c.Late, Holder: c.Holder, Outcome: c.Outcome, Held: c.Held, Node: c.Node, Seq: c.Seq}
}

func evidenceOfCall(c *devices.CallStep) api.Evidence {
	what := "a call of another key"
	if c.Call != "" {
		what = c.Call + " " + c.Tool
	}
	return api.Evidence{At: api.At(c.At), Node: c.Node, Kind: string(kindCall), Text: what + ": " + c.Outcome + lateText(c.Late)}
}

// isPresence selects the events that show when the device was connected.
func isPresence(e *devices.StreamEvent) bool {
	return e.Kind == devices.EventOnline || e.Kind == devices.EventOffline
}

func evidenceOfEvent(e devices.StreamEvent) api.Evidence {
	var payload struct {
		Time      time.Time `json:"time"`
		Node      string    `json:"node"`
		Reason    string    `json:"reason"`
		Transport string    `json:"transport"`
	}
	_ = json.Unmarshal(e.Data, &payload) // what is missing is empty
	return api.Evidence{At: api.At(payload.Time), Node: payload.Node, Kind: string(e.Kind), Text: cmp.Or(payload.Reason, payload.Transport, string(e.Kind))}
}

// evidenceOf returns a step in words.
func evidenceOf(s *devices.Step, addresses bool) api.Evidence {
	var parts []string
	add := func(text string) {
		if text != "" {
			parts = append(parts, text)
		}
	}
	add(words(s.Cause))
	add(s.Text)
	add(string(s.Transport))
	if s.Took > 0 {
		add("after " + s.Took.Round(time.Millisecond).String())
	}
	if addresses && s.Remote.IsValid() {
		add("from " + s.Remote.String())
	}
	if s.Count > 1 {
		add(fmt.Sprintf("%d times", s.Count))
	}
	return api.Evidence{At: api.At(s.At), Node: s.Node, Kind: string(s.Kind), Text: cmp.Or(strings.Join(parts, " "), kindTexts[s.Kind])}
}

// kindTexts are the evidence of steps that have nothing to add to their kind.
var kindTexts = map[devices.StepKind]string{devices.StepCheck: "OTA check", devices.StepActivate: "requested its activation", devices.StepRefused: "refused",
	devices.StepConnected: "connected", devices.StepMCPFailed: "MCP failed", devices.StepCatalog: "its tools differ from before", devices.StepDeviation: "deviated from the protocol",
	devices.StepSilent: "a conversation is open and no audio arrives", devices.StepLimit: "exceeded a limit", devices.StepClosed: "the connection ended"}

// mayWrite reports whether the caller may see addresses.
func (x *Explainer) mayWrite(ctx context.Context, by access.Principal, id devices.ID) bool {
	return by.Caller != nil && by.Caller.Scopes.Has(access.ScopeWrite) && x.opt.Devices.Permit(ctx, by, access.ScopeWrite, id) == nil
}

// Log returns a page of what happened to a device after a place in its log, newest first, at most limit records; an
// empty kind selects all. NextCursor is the place after the page, as devices.ParseLogPosition reads it. The caller has
// checked that by may see the device.
func (x *Explainer) Log(ctx context.Context, by access.Principal, id devices.ID, kind devices.StepKind, after devices.LogPosition, limit int) (api.Log, error) {
	limit = min(max(limit, 1), maxRecords)
	g, err := x.gather(ctx, question{Device: id, Kind: kind, Before: after.At, Node: after.Node, Seq: after.Seq, Limit: limit + 1})
	if err != nil {
		return api.Log{}, err
	}
	type row struct {
		at     devices.LogPosition
		record api.Record
		hidden bool
	}
	rows := make([]row, 0, len(g.steps)+len(g.calls))
	addresses := x.mayWrite(ctx, by, id)
	for i := range g.steps {
		rows = append(rows, row{at: g.steps[i].Position(), record: recordOf(&g.steps[i], addresses)})
	}
	for i := range g.calls {
		c := shown(by, g.calls[i])
		rows = append(rows, row{c.Position(), recordOfCall(&c), !c.Holder && c.Held != ""}) // the holder's record has more
	}
	slices.SortFunc(rows, func(a, b row) int { return a.at.Compare(b.at) })
	out := api.Log{Items: []api.Record{}, Reach: g.reach, Missing: g.missing}
	if len(rows) > limit {
		rows = rows[:limit]
		out.NextCursor = rows[limit-1].at.String()
	}
	for i := range rows {
		if !rows[i].hidden {
			out.Items = append(out.Items, rows[i].record)
		}
	}
	return out, nil
}

func recordOfCall(c *devices.CallStep) api.Record {
	return api.Record{At: api.At(c.At), Node: c.Node, Kind: string(kindCall), Device: string(c.Device), Cause: c.Outcome, Text: strings.TrimPrefix(c.Detail+lateText(c.Late), ", "),
		DurationMS: c.Took.Milliseconds(), Count: 1, Call: c.Call, Tool: c.Tool}
}

func recordOf(s *devices.Step, addresses bool) api.Record {
	r := api.Record{At: api.At(s.At), Node: s.Node, Kind: string(s.Kind), Device: string(s.Device), Cause: string(s.Cause), Text: s.Text, Transport: string(s.Transport),
		Generation: s.Generation, DurationMS: s.Took.Milliseconds(), Calls: s.Calls, Count: s.Count}
	if addresses && s.Remote.IsValid() {
		r.Address = s.Remote.String()
	}
	return r
}

// Refusals returns a page of the OTA checks and connections of devices that are not members after a place among them,
// newest first, at most limit records; only for callers that are not limited to devices. NextCursor is as that of Log.
func (x *Explainer) Refusals(ctx context.Context, by access.Principal, after devices.LogPosition, limit int) (api.Log, error) {
	g, err := x.gather(ctx, question{Refusals: true})
	if err != nil {
		return api.Log{}, err
	}
	out := api.Log{Items: []api.Record{}, Reach: g.reach, Missing: g.missing}
	addresses := by.Caller.Scopes.Has(access.ScopeWrite)
	for i := range g.steps {
		switch step := &g.steps[i]; {
		case !after.Precedes(step.Position()):
		case len(out.Items) == limit:
			out.NextCursor = after.String()
			return out, nil
		default:
			out.Items, after = append(out.Items, recordOf(step, addresses)), step.Position()
		}
	}
	return out, nil
}

// callSteps returns what is recorded of a call that the caller may see.
func (x *Explainer) callSteps(ctx context.Context, by access.Principal, call string) ([]devices.CallStep, []string, error) {
	g, err := x.gather(ctx, question{Call: call})
	if err != nil {
		return nil, nil, err
	}
	unknown := &devices.Error{Code: devices.CodeNotFound, Detail: "no call with this id is recorded" + missingText(g.missing)}
	if len(g.calls) == 0 {
		return nil, nil, unknown
	}
	c := &g.calls[0]
	if !mayRead(by, c) || x.opt.Devices.Permit(ctx, by, access.ScopeEvents, c.Device) != nil {
		return nil, nil, unknown
	}
	slices.Reverse(g.calls)
	for i := range g.calls {
		if c := &g.calls[i]; c.Ahead != "" && !by.Caller.Scopes.Has(access.ScopeAdmin) {
			ahead, err := x.gather(ctx, question{Call: c.Ahead})
			if err != nil {
				return nil, nil, err
			}
			if len(ahead.calls) == 0 || !mayRead(by, &ahead.calls[0]) {
				c.Ahead = aheadOfOther
			}
		}
	}
	return g.calls, g.missing, nil
}

// aheadOfOther stands for the id of a call that the caller may not read.
const aheadOfOther = "of another key"

func missingText(missing []string) string {
	if len(missing) == 0 {
		return ""
	}
	return "; these nodes did not answer: " + strings.Join(missing, ", ")
}

// Call returns what is recorded of a call: of the caller's own, or any for admin. Other
// calls, and those of devices that the caller may not see, are not found.
func (x *Explainer) Call(ctx context.Context, by access.Principal, call string) (api.RecordedCall, error) {
	steps, missing, err := x.callSteps(ctx, by, call)
	if err != nil {
		return api.RecordedCall{}, err
	}
	first := steps[0]
	out := api.RecordedCall{Call: first.Call, Device: string(first.Device), Tool: first.Tool, Key: first.Key, Steps: []api.CallStep{}, Missing: missing}
	for _, s := range steps {
		if s.Ahead == aheadOfOther {
			s.Ahead = ""
		}
		out.Steps = append(out.Steps, api.CallStep{Node: s.Node, At: api.At(s.At), Holder: s.Holder, DurationMS: s.Took.Milliseconds(), WaitedMS: s.Waited.Milliseconds(), Ahead: s.Ahead,
			Sent: s.Sent, Late: s.Late, Outcome: s.Outcome, Rule: s.Rule, Detail: s.Detail, Bytes: s.Bytes})
	}
	return out, nil
}

// ExplainCall explains a call that Call would return.
func (x *Explainer) ExplainCall(ctx context.Context, by access.Principal, call string) (api.Why, error) {
	steps, missing, err := x.callSteps(ctx, by, call)
	if err != nil {
		return api.Why{}, err
	}
	m := mergeCall(steps)
	found := explainCall(&m)
	e := api.Why{Device: string(m.first.Device), Call: m.first.Call, State: m.first.Outcome, Well: found.cause == "well" || m.first.Outcome == outcomeOK || m.first.Outcome == outcomeRestarting, Cause: string(found.cause),
		Sentence: found.sentence, Certain: found.certain, Evidence: []api.Evidence{}, Next: found.cause.next(string(m.first.Device)), Reach: []api.Reach{}, Missing: missing}
	for i := len(steps) - 1; i >= 0; i-- {
		s := &steps[i]
		where := "received it"
		if s.Holder {
			where = "holds the device"
		}
		e.Evidence = append(e.Evidence, api.Evidence{At: api.At(s.At), Node: s.Node, Kind: string(kindCall),
			Text: fmt.Sprintf("%s: %s after %s%s%s (the node %s)", s.Tool, s.Outcome, seconds(s.Took), lateText(s.Late), detail(s.Detail), where)})
	}
	if found.cause == "device_offline" { // why it is
		if why, err := x.Device(ctx, by, m.first.Device); err == nil {
			e.Sentence += " Now: " + why.Sentence
			e.Evidence, e.Next, e.Reach = append(e.Evidence, why.Evidence...), append(e.Next, why.Next...), why.Reach
		}
	}
	x.Explained.Add(e.Cause, 1)
	return e, nil
}
