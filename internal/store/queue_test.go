package store

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
)

func TestHistoryQueueIsBounded(t *testing.T) {
	var stats Stats
	q := newQueue(&stats)
	for i := range MaxHistoryQueue {
		q.putHistory(historyRow{HistoryEntry: devices.HistoryEntry{Device: "x", Seq: int64(i)}})
	}
	taken := q.take() // on their way: they still count
	q.putHistory(historyRow{})
	if dropped, waiting := stats.DroppedHistory.Load(), stats.HistoryWaiting.Load(); dropped != 1 || waiting != MaxHistoryQueue {
		t.Errorf("%d dropped, %d wait; want 1 and %d", dropped, waiting, MaxHistoryQueue)
	}
	q.settle(&taken)
	q.putHistory(historyRow{})
	if dropped := stats.DroppedHistory.Load(); dropped != 1 {
		t.Errorf("%d dropped after room was made, want 1", dropped)
	}
}

func TestGroupsAreBoundedAndInOrder(t *testing.T) {
	q := newQueue(new(Stats))
	next := 0
	id := func(i int) devices.ID { return devices.ID(rune('一' + i)) }
	for i := range 2*GroupRows + 7 {
		q.putPresence(devices.Presence{Device: id(i), Epoch: 1})
	}
	q.putPresence(devices.Presence{Device: id(3), Epoch: 2}) // keeps its place
	for _, want := range []int{GroupRows, GroupRows, 7, 0} {
		g := q.take()
		if g.rows() != want {
			t.Fatalf("a group of %d, want %d", g.rows(), want)
		}
		for _, p := range g.presence {
			if p.Device != id(next) {
				t.Fatalf("row %d is of %s", next, p.Device)
			}
			next++
		}
	}
}

func TestWaitLingers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(new(Stats))
		begin := time.Now()
		took := func() time.Duration { d := time.Since(begin); begin = time.Now(); return d }
		go func() {
			time.Sleep(time.Hour) // the fake clock of synctest
			q.putFacts(devices.Check{Device: "x"})
		}()
		if !q.wait(t.Context()) || took() != time.Hour+Linger {
			t.Error("the first row does not linger")
		}
		for i := range GroupRows {
			q.putHistory(historyRow{HistoryEntry: devices.HistoryEntry{Seq: int64(i)}})
		}
		if !q.wait(t.Context()) || took() != 0 {
			t.Error("a whole group lingers")
		}
		q.take()
		q.putPresence(devices.Presence{})
		q.close()
		if !q.wait(t.Context()) || took() != 0 {
			t.Error("rows linger while closing")
		}
		q.take()
		if q.wait(t.Context()) {
			t.Error("an empty closed queue promises more")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if newQueue(new(Stats)).wait(ctx) || took() != time.Second {
			t.Error("wait outlives its context")
		}
	})
}

func TestSplitLosesNothing(t *testing.T) {
	var count func(g group) int
	count = func(g group) int {
		if g.rows() < 2 {
			return g.rows()
		}
		a, b := g.split()
		if a.rows() == 0 || b.rows() == 0 {
			t.Fatalf("%d rows were not split", g.rows())
		}
		n := count(a) + count(b)
		a.join(b)
		if a.rows() != g.rows() {
			t.Fatalf("%d rows joined, want %d", a.rows(), g.rows())
		}
		return n
	}
	for n := range 40 {
		g := group{facts: make([]devices.Check, n%5), presence: make([]devices.Presence, n/3), history: make([]historyRow, n%7)}
		if got := count(g); got != g.rows() {
			t.Errorf("%d single rows, want %d", got, g.rows())
		}
	}
}

// What a device says over MCP right after its first check does not take the image of that check away: it names the version alone.
func TestMergeKeepsTheImage(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	check := devices.Check{Device: "d", Facts: devices.Facts{Board: "b", Firmware: "2.4.2", ELF: "e", CheckedAt: at}, Details: `{"flash_size":1}`}
	initialized := devices.Check{Device: "d", Facts: devices.Facts{Board: "b", Firmware: "2.4.2", CheckedAt: at.Add(time.Second)}}
	if got := mergeFacts(check, initialized); got.ELF != "e" || got.Details != check.Details {
		t.Errorf("%+v", got)
	}
	initialized.Firmware = "2.5.0"
	if got := mergeFacts(check, initialized); got.ELF != "" || got.Firmware != "2.5.0" {
		t.Errorf("of another image: %+v", got)
	}
}
