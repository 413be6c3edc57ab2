package restapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
)

// batch is the data of a `changes` event.
type batch struct {
	Events []struct {
		Type string
		Data struct{ N int }
	}
	Replaced, Omitted int
}

// collect adds events with their numbers as data, and returns the batch and its id.
func collect(t *testing.T, events []devices.StreamEvent) (b batch, id string) {
	t.Helper()
	w := httptest.NewRecorder()
	batches := &eventBatch{out: &eventStream{w: w, control: http.NewResponseController(deadlines{w})}}
	for i, e := range events {
		e.ID, e.Data = devices.EventPosition{uint64(i + 1)}, fmt.Appendf(nil, `{"n":%d}`, i)
		if err := batches.add(e); err != nil {
			t.Fatal(err)
		}
		if len(batches.rows) > 2*batchRows || len(batches.place) > batchRows {
			t.Fatalf("%d rows, %d places", len(batches.rows), len(batches.place))
		}
	}
	if err := batches.flush(); err != nil {
		t.Fatal(err)
	}
	text, found := strings.CutSuffix(w.Body.String(), "\n\n")
	id, text, _ = strings.Cut(strings.TrimPrefix(text, "id: "), "\nevent: changes\ndata: ")
	if err := json.Unmarshal([]byte(text), &b); !found || err != nil {
		t.Fatalf("%v in %.200q", err, w.Body)
	}
	if err := batches.flush(); err != nil || !strings.HasSuffix(w.Body.String(), text+"\n\n") {
		t.Error("an empty batch was written")
	}
	return b, id
}

// deadlines takes deadlines, which a recorder does not have.
type deadlines struct{ *httptest.ResponseRecorder }

func (deadlines) SetWriteDeadline(time.Time) error { return nil }

func TestBatchReplaces(t *testing.T) {
	b, id := collect(t, []devices.StreamEvent{
		{Kind: devices.EventOnline, Device: "a"}, {Kind: devices.EventOnline, Device: "b"}, {Kind: devices.EventCatalog, Device: "a"},
		{Kind: devices.EventNotification, Device: "a"}, {Kind: devices.EventOffline, Device: "a"}, {Kind: devices.EventNotification, Device: "a"},
		{Kind: devices.EventCatalog, Device: "a"}, {Kind: devices.EventJobHalted}, {Kind: devices.EventJobHalted},
	})
	var got []string
	for _, e := range b.Events {
		got = append(got, fmt.Sprint(e.Type, e.Data.N))
	}
	if want := []string{"online1", "notifications3", "offline4", "notifications5", "catalog6", "job.halted7", "job.halted8"}; !slices.Equal(got, want) || b.Replaced != 2 || b.Omitted != 0 || id != "9" {
		t.Errorf("%v, %+v, id %s", got, b, id)
	}
}

// Whatever comes, a batch and the memory for it are bounded, and the newest events are in it.
func TestBatchIsBounded(t *testing.T) {
	const devicesN, rounds = 3000, 4
	var events []devices.StreamEvent
	for range rounds {
		for i := range devicesN {
			events = append(events, devices.StreamEvent{Kind: devices.EventOnline, Device: devices.ID(fmt.Sprint(i))})
		}
	}
	b, _ := collect(t, events)
	if len(b.Events) != batchRows || b.Replaced+b.Omitted+batchRows != len(events) || b.Events[batchRows-1].Data.N != len(events)-1 || b.Events[0].Data.N != len(events)-batchRows {
		t.Errorf("%d events, %d replaced, %d omitted", len(b.Events), b.Replaced, b.Omitted)
	}
	flapping := make([]devices.StreamEvent, 10*batchRows)
	for i := range flapping {
		flapping[i] = devices.StreamEvent{Kind: []devices.EventKind{devices.EventOnline, devices.EventOffline}[i%2], Device: "one"}
	}
	if b, _ := collect(t, flapping); len(b.Events) != 1 || b.Events[0].Type != "offline" || b.Replaced != len(flapping)-1 {
		t.Errorf("one device: %d events, %d replaced", len(b.Events), b.Replaced)
	}
}

// Over HTTP: batches, a gap in its place, and wrong intervals.
func TestEventsInBatches(t *testing.T) {
	f := newFleet(t)
	f.events.queue = make(chan devices.StreamEvent, 8)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	f.events.queue <- devices.StreamEvent{ID: devices.EventPosition{1}, Kind: devices.EventOnline, Device: robot, Data: []byte(`{"a":1}`)}
	f.events.queue <- devices.StreamEvent{Gap: true, ID: devices.EventPosition{5}, Data: []byte(`{"from":2,"to":5}`)}
	f.events.queue <- devices.StreamEvent{ID: devices.EventPosition{6}, Kind: devices.EventOffline, Device: robot, Data: []byte(`{"a":2}`)}
	f.events.queue <- devices.StreamEvent{ID: devices.EventPosition{7}, Kind: devices.EventPhoto, Device: robot, Data: []byte(`{"a":3}`)}
	lines, _ := f.follow(t, ctx, "?batch=200ms")
	for _, want := range []string{
		"id: 1", "event: changes", `data: {"events":[{"type":"online","data":{"a":1}}],"replaced":0,"omitted":0}`, "",
		"id: 5", "event: gap", `data: {"from":2,"to":5}`, "",
		"id: 7", "event: changes", `data: {"events":[{"type":"offline","data":{"a":2}},{"type":"photo","data":{"a":3}}],"replaced":0,"omitted":0}`, "",
	} {
		for lines.Scan() && lines.Text() == ":" { // a heartbeat may come between
			lines.Scan()
		}
		if lines.Text() != want {
			t.Errorf("got %q, want %q", lines.Text(), want)
		}
	}
	for _, wrong := range []string{"1ms", "6s", "0", "-1s", "soon", "500"} {
		f.do(t, "GET", "/v1/events?batch="+wrong, "").problem(t, 400, devices.CodeBadRequest)
	}
}
