package events

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

const jobID = "06q0000000abcdefghjk"

func jobEvent(kind devices.EventKind, n int) devices.Event {
	return devices.Event{Kind: kind, Job: jobID, Seq: int64(n), Time: time.UnixMilli(1_800_000_000_123), MsgID: fmt.Sprintf("%s-%d", jobID, n),
		Fields: []byte(`"state":"running","owner":"kowner"`)}
}

func taskEvent(n int) devices.Event {
	return devices.Event{Kind: devices.EventTask, Device: dev, Job: jobID, Time: time.UnixMilli(1_800_000_000_123), MsgID: fmt.Sprintf("aabbccddeeff-%s-%d", jobID, n),
		Fields: []byte(`"job":"` + jobID + `","outcome":"ok"`)}
}

// Jobs and tasks have a stream of their own, and readers get all streams in order of time.
func TestJobsHaveTheirOwnStream(t *testing.T) {
	t.Parallel()
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	b := newBus(t, nc)
	js := streams(t, nc)
	stream, err := js.Stream(t.Context(), "TEST_V1_JOBS")
	if err != nil {
		t.Fatal(err)
	}
	cfg := stream.CachedInfo().Config
	if cfg.MaxBytes != 256<<20 || cfg.MaxAge != time.Hour || len(cfg.Subjects) != 8 || !slices.Contains(cfg.Subjects, "test.v1.jobs.*.task") || !slices.Contains(cfg.Subjects, "test.v1.jobs.*.halted") {
		t.Errorf("%+v", cfg)
	}
	watcher, err := nc.SubscribeSync("test.v1.jobs.>")
	if err != nil {
		t.Fatal(err)
	}
	stored := func() (n uint64) {
		for _, name := range []string{"EVENTS", "NOTIFICATIONS", "JOBS"} {
			stream, err := js.Stream(t.Context(), "TEST_V1_"+name)
			if err != nil {
				t.Fatal(err)
			}
			n += stream.CachedInfo().State.Msgs
		}
		return n
	}
	order := []devices.EventPosition{{1}, {1, 0, 1}, {1, 1, 1}, {1, 1, 2}, {2, 1, 2}, {2, 1, 3}}
	for n, e := range []devices.Event{numbered(1), jobEvent(devices.EventJobStarted, 1), notification(1), taskEvent(1), numbered(2), jobEvent(devices.EventJobDone, 2)} {
		b.Publish(e)
		devicetest.Eventually(t, "it is kept", func() bool { return stored() == uint64(n+1) })
	}
	want := nats.Msg{Subject: "test.v1.jobs." + jobID + ".started",
		Data: []byte(`{"job":"` + jobID + `","node":"n1","seq":1,"time":"2027-01-15T08:00:00.123Z","state":"running","owner":"kowner"}`)}
	if msg, err := watcher.NextMsg(5 * time.Second); err != nil || msg.Subject != want.Subject || string(msg.Data) != string(want.Data) {
		t.Errorf("%+v, %v", msg, err)
	}
	ids := func(q devices.EventQuery, n int) (got []devices.EventPosition) {
		for _, e := range follow(t, b, q, n) {
			if e.Gap {
				t.Errorf("%+v: a gap: %s", q, e.Data)
			}
			got = append(got, e.ID)
		}
		return got
	}
	if got := ids(devices.EventQuery{FromStart: true}, 6); !slices.Equal(got, order) {
		t.Errorf("%v, want %v", got, order)
	}
	for i := range order[:5] {
		if got := ids(devices.EventQuery{After: order[i]}, 5-i); !slices.Equal(got, order[i+1:]) {
			t.Errorf("after %v: %v, want %v", order[i], got, order[i+1:])
		}
	}
	// A position of a version with two streams is one in the third by its time.
	if got := ids(devices.EventQuery{After: devices.EventPosition{1, 1}}, 3); got[2] != (devices.EventPosition{2, 1, 3}) || got[0] != (devices.EventPosition{1, 1, 2}) {
		t.Errorf("after 1.1: %v", got)
	}
	all := follow(t, b, devices.EventQuery{FromStart: true}, 6)
	if e := all[1]; e.Kind != devices.EventJobStarted || e.Device != "" || e.Owner != "kowner" {
		t.Errorf("%+v", e)
	}
	if e := all[3]; e.Kind != devices.EventTask || e.Device != dev || e.Owner != "" {
		t.Errorf("%+v", e)
	}
	// A device's events are its tasks, too, but no jobs; a kind of jobs is in one stream.
	for _, c := range []struct {
		q    devices.EventQuery
		want []devices.EventPosition
	}{
		{devices.EventQuery{FromStart: true, Device: dev}, []devices.EventPosition{{1}, {1, 1}, {1, 1, 2}, {2, 1, 2}}},
		{devices.EventQuery{FromStart: true, Kind: devices.EventTask, Device: dev}, []devices.EventPosition{{0, 0, 2}}},
		{devices.EventQuery{FromStart: true, Kind: devices.EventJobDone}, []devices.EventPosition{{0, 0, 3}}},
		{devices.EventQuery{FromStart: true, NoJobs: true}, []devices.EventPosition{{1}, {1, 1}, {2, 1}}},
	} {
		if got := ids(c.q, len(c.want)); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.q, got, c.want)
		}
	}
	recent, err := b.Recent(t.Context(), devices.EventQuery{}, 2, func(*devices.StreamEvent) bool { return true })
	if err != nil || len(recent) != 2 || recent[1].Kind != devices.EventJobDone || recent[0].Kind != devices.EventOnline {
		t.Errorf("%+v, %v", recent, err)
	}
	// What is erased of a device is erased of its tasks.
	if err := b.Erase(t.Context(), dev); err != nil {
		t.Fatal(err)
	}
	if got := ids(devices.EventQuery{After: devices.EventPosition{2, 1, 1}}, 1); got[0] != (devices.EventPosition{2, 1, 3}) {
		t.Errorf("%v", got)
	}
}

// However many devices have a task of a job, their events have one subject: NATS has memory for each subject of a stream.
func TestTasksOfAJobHaveOneSubject(t *testing.T) {
	t.Parallel()
	nc := connect(t, natsServer(t, t.TempDir(), -1).ClientURL())
	b := newBus(t, nc)
	for n := range 50 {
		e := taskEvent(n)
		e.Device = devices.ID(fmt.Sprintf("aa:bb:cc:dd:ee:%02x", n))
		b.Publish(e)
	}
	const last = devices.ID("aa:bb:cc:dd:ee:31")
	got := follow(t, b, devices.EventQuery{FromStart: true, Device: last}, 1)
	if got[0].Kind != devices.EventTask || got[0].Device != last || got[0].Job != jobID || got[0].ID != (devices.EventPosition{0, 0, 50}) {
		t.Errorf("%+v", got[0])
	}
	recent, err := b.Recent(t.Context(), devices.EventQuery{Device: "aa:bb:cc:dd:ee:05"}, 5, func(*devices.StreamEvent) bool { return true })
	if err != nil || len(recent) != 1 || recent[0].Device != "aa:bb:cc:dd:ee:05" {
		t.Errorf("%+v, %v", recent, err)
	}
	stream, err := streams(t, nc).Stream(t.Context(), "TEST_V1_JOBS")
	if err != nil {
		t.Fatal(err)
	}
	info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter(">"))
	if err != nil || len(info.State.Subjects) != 1 || info.State.Subjects["test.v1.jobs."+jobID+".task"] != 50 {
		t.Errorf("%v, %v", info.State.Subjects, err)
	}
}

// The ends of a million tasks do not displace other events.
func TestTasksLeaveRoom(t *testing.T) {
	t.Parallel()
	b := &Bus{queue: make(chan queued, queueLimit)} // nothing is published
	for n := range queueLimit {
		b.Publish(taskEvent(n))
	}
	b.Publish(jobEvent(devices.EventJobHalted, 1))
	b.Publish(numbered(1))
	if dropped := b.Dropped.Get(DropQueue); dropped != queueLimit/2 {
		t.Errorf("%d events dropped", dropped)
	}
}
