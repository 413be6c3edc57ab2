package trace

import (
	"encoding/json"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/envelope"
	"fleetd/internal/jsonspan"
)

// Kinds of entries.
const (
	KindReceived = "received"
	KindSent     = "sent"
	KindRecord   = "record"
	KindCall     = "call"
)

// Message adds a message that the device sent, or that was sent to it. It does not keep msg, and
// never blocks.
func (t *Tracer) Message(device devices.ID, received bool, msg []byte) {
	x := t.targets()[device]
	if x == nil {
		return
	}
	kind := KindSent
	if received {
		kind = KindReceived
	}
	t.add(x, func(e *api.TraceEntry) {
		e.Kind, e.Bytes = kind, len(msg)
		m, err := envelope.Parse(msg)
		if err != nil {
			e.Text = err.Error()
		}
		e.Type = clean(string(m.Type))
		if m.Payload != nil {
			e.Method, _ = jsonspan.String(jsonspan.Member(m.Payload, "method"))
			e.Method = clean(e.Method)
			e.RPC = clean(string(jsonspan.Member(m.Payload, "id")))
		}
		if x.lease.Payload {
			e.Payload = payload(msg, err)
		}
	})
}

// payload returns the beginning of a message without secrets. In one that is not JSON secrets
// cannot be recognized: it has none.
func payload(msg []byte, err error) string {
	if err != nil {
		return ""
	}
	text := string(audit.Redact(nil, msg))
	return strings.ToValidUTF8(text[:min(len(text), MaxPayload)], "")
}

// maxWord is how many bytes an entry has of a device's type, method or id.
const maxWord = 64

func clean(text string) string { return strings.ToValidUTF8(text[:min(len(text), maxWord)], "\uFFFD") }

// add queues an entry that fill completes.
func (t *Tracer) add(x *target, fill func(e *api.TraceEntry)) {
	now := time.Now()
	if !x.rate.AllowN(now, 1) {
		t.drop(x)
		return
	}
	e := api.TraceEntry{At: api.At(now.UTC()), Node: t.opt.Node, Device: string(x.lease.Device), Trace: x.lease.ID, Dropped: x.dropped.Swap(0)}
	fill(&e)
	data, err := json.Marshal(e)
	if err != nil {
		t.opt.Log.Error("an entry of a trace cannot be encoded", "error", err)
		return
	}
	select {
	case x.queue <- data:
	default:
		x.dropped.Add(e.Dropped)
		t.drop(x)
	}
}

// Recorder returns a Recorder that passes on to next, and adds what it is given to traces.
func (t *Tracer) Recorder(next devices.Recorder) devices.Recorder { return &recorder{next, t} }

type recorder struct {
	next devices.Recorder
	t    *Tracer
}

// Step implements devices.Recorder.
func (r *recorder) Step(s devices.Step) {
	r.next.Step(s)
	if x := r.t.targets()[s.Device]; x != nil {
		r.t.add(x, func(e *api.TraceEntry) {
			e.Kind, e.Type, e.Cause, e.Text = KindRecord, string(s.Kind), string(s.Cause), s.Text
		})
	}
}

// Forget implements devices.Recorder.
func (r *recorder) Forget(id devices.ID) { r.next.Forget(id) }

// Call implements devices.Recorder.
func (r *recorder) Call(c devices.CallStep) {
	r.next.Call(c)
	if x := r.t.targets()[c.Device]; x != nil {
		r.t.add(x, func(e *api.TraceEntry) {
			e.Kind, e.Type, e.Cause, e.Text, e.Call = KindCall, c.Tool, c.Outcome, c.Detail, c.Call
			e.Key = c.Key
		})
	}
}
