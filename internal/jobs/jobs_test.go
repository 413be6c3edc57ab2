package jobs

import (
	"errors"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
)

func at(t *testing.T, text, zone string) time.Time {
	t.Helper()
	where, err := time.LoadLocation(zone)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := time.ParseInLocation("2006-01-02 15:04:05", text, where)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

// Ticks that summer time skips come at the next instant, those whose time comes twice once.
func TestSchedule(t *testing.T) {
	const berlin = "Europe/Berlin"
	zone, _ := time.LoadLocation(berlin)
	for _, c := range []struct{ expression, after, want string }{
		{"0 7 * * 1-5", "2026-11-20 07:00:00", "2026-11-23T06:00:00Z"},  // Friday to Monday
		{"30 2 * * *", "2026-03-28 12:00:00", "2026-03-29T01:00:00Z"},   // 02:30 does not exist: 03:00 summer time
		{"30 2 * * *", "2026-03-29 03:00:00", "2026-03-30T00:30:00Z"},   // and not a second time
		{"30 2 * * *", "2026-10-24 12:00:00", "2026-10-25T00:30:00Z"},   // the first 02:30
		{"*/20 * * * *", "2026-03-29 01:45:00", "2026-03-29T01:00:00Z"}, // the skipped ones are one
		{"0 0 29 2 *", "2026-03-01 00:00:00", "2028-02-28T23:00:00Z"},
	} {
		s, err := ParseSchedule(c.expression, zone, at(t, c.after, berlin))
		if err != nil {
			t.Fatal(err)
		}
		next, err := s.Next(at(t, c.after, berlin))
		if got := next.UTC().Format(time.RFC3339); err != nil || got != c.want {
			t.Errorf("%s after %s: %s, %v, want %s", c.expression, c.after, got, err, c.want)
		}
	}
	// 02:30 comes twice; after the first one, the next is a day later.
	s := Schedule{"30 2 * * *", zone}
	first, _ := s.Next(at(t, "2026-10-24 12:00:00", berlin))
	if second, _ := s.Next(first); !second.Equal(at(t, "2026-10-26 02:30:00", berlin)) {
		t.Errorf("a time that comes twice fires at %s and %s", first, second)
	}
	for _, wrong := range []string{"", "* * * *", "* * * * * *", "0 0 30 2 *", "60 * * * *", "@daily", "hello"} {
		if _, err := ParseSchedule(wrong, zone, time.Now()); err == nil {
			t.Errorf("%q is taken", wrong)
		}
	}
}

func TestWindow(t *testing.T) {
	zone, _ := time.LoadLocation("Europe/Berlin")
	w := Window{Schedule{"0 2 * * *", zone}, 3 * time.Hour}
	for text, want := range map[string]bool{"2026-11-23 01:59:59": false, "2026-11-23 02:00:00": true, "2026-11-23 04:59:59": true, "2026-11-23 05:00:00": false} {
		open, next := w.Open(at(t, text, "Europe/Berlin"))
		if open != want || !open && !next.After(at(t, text, "Europe/Berlin")) {
			t.Errorf("%s: %t, next %s", text, open, next)
		}
	}
}

// In the night in which clocks go back a window that opens within the repeated hour stays open in its second pass.
func TestWindowWhenClocksGoBack(t *testing.T) {
	for name, zone := range map[string]struct {
		cron, opens string
	}{"Europe/Berlin": {"30 2 * * *", "2026-10-25T00:30:00Z"}, "America/New_York": {"30 1 * * *", "2026-11-01T05:30:00Z"}} {
		place, err := time.LoadLocation(name)
		if err != nil {
			t.Fatal(err)
		}
		opens, err := time.Parse(time.RFC3339, zone.opens)
		if err != nil {
			t.Fatal(err)
		}
		w := Window{Schedule{zone.cron, place}, 3 * time.Hour}
		for after, want := range map[time.Duration]bool{-time.Minute: false, 0: true, 29 * time.Minute: true, 31 * time.Minute: true, 59 * time.Minute: true, 61 * time.Minute: true,
			3*time.Hour - time.Minute: true, 3 * time.Hour: false} {
			if open, _ := w.Open(opens.Add(after)); open != want {
				t.Errorf("%s: open %v after the tick: %t", name, after, open)
			}
		}
	}
}

func TestCheck(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	spec, err := ParseNew([]byte(`{"action":{"call":{"tool":"self.reboot"}},"select":"room=lab"}`))
	if err != nil {
		t.Fatal(err)
	}
	if err := Check(&spec.JobSpec, time.UTC, now); err != nil {
		t.Fatal(err)
	}
	if spec.Pace.Rate != DefaultRate || spec.Pace.Concurrency != DefaultTogether || !spec.When.Until.Equal(now.Add(DefaultUntil)) {
		t.Errorf("defaults: %+v %+v", spec.Pace, spec.When)
	}
	bad, err := ParseNew([]byte(`{"action":{"restart":{}},"select":"a=("}`))
	if err != nil {
		t.Fatal(err)
	}
	if err := Check(&bad.JobSpec, time.UTC, now); devices.AsError(err).Code != devices.CodeBadRequest {
		t.Errorf("a select that cannot be read: %v", err)
	}
	for body, pointer := range map[string]string{
		`{"action":{},"select":"a"}`:                                                             "/action",
		`{"action":{"call":{"tool":"x"},"restart":{}},"select":"a"}`:                             "/action",
		`{"action":{"call":{"tool":""}},"select":"a"}`:                                           "/action/call/tool",
		`{"action":{"call":{"tool":"x","arguments":[]}},"select":"a"}`:                           "/action/call/arguments",
		`{"action":{"call":{"tool":"x","arguments":{"a":"\u0000"}}},"select":"a"}`:               "/action/call/arguments/a",
		`{"action":{"call":{"tool":"x","timeout":"301s"}},"select":"a"}`:                         "/action/call/timeout",
		`{"action":{"restart":{"when":"soon"}},"select":"a"}`:                                    "/action/restart/when",
		`{"action":{"restart":{}}}`:                                                              "/select",
		`{"action":{"restart":{}},"select":"a","devices":["x"]}`:                                 "/select",
		`{"action":{"call":{"tool":"a\u0000b"}},"select":"a"}`:                                   "/action/call/tool",
		`{"action":{"restart":{}},"devices":["!"]}`:                                              "/devices/0",
		`{"action":{"restart":{}},"select":"a","pace":{"rate":"0/s"}}`:                           "/pace/rate",
		`{"action":{"restart":{}},"select":"a","stop":{}}`:                                       "/stop",
		`{"action":{"restart":{}},"select":"a","stop":{"share":"5"}}`:                            "/stop/share",
		`{"action":{"restart":{}},"select":"a","when":{"cron":"61 * * * *"}}`:                    "/when/cron",
		`{"action":{"restart":{}},"select":"a","when":{"timezone":"Nowhere"}}`:                   "/when/timezone",
		`{"action":{"restart":{}},"select":"a","when":{"until":"2026-11-23T11:00:00Z"}}`:         "/when/until",
		`{"action":{"restart":{}},"select":"a","when":{"until":"2027-11-23T11:00:00Z"}}`:         "/when/until",
		`{"action":{"restart":{}},"select":"a","when":{"window":{"cron":"0 2 * * *"}}}`:          "/when/window/for",
		`{"action":{"restart":{}},"select":"a","when":{"cron":"0 2 * * *"},"stages":[{"ok":1}]}`: "/stages",
		`{"action":{"restart":{}},"select":"a","retry":{"failed":11}}`:                           "/retry/failed",
		`{"action":{"restart":{}},"select":"a","busy":"maybe"}`:                                  "/busy",
	} {
		spec, err := ParseNew([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", body, err)
			continue
		}
		var e *devices.Error
		if err := Check(&spec.JobSpec, time.UTC, now); !errors.As(err, &e) || e.Code != devices.CodeInvalidArguments || e.Faults[0].Pointer != pointer {
			t.Errorf("%s: %+v", body, err)
		}
	}
	for _, body := range []string{`{"action":{"restart":{}},"select":"a","extra":1}`, `[]`, `{} {}`, strings.Repeat(" ", maxSpecBytes+1)} {
		if _, err := ParseNew([]byte(body)); err == nil {
			t.Errorf("%.40q is taken", body)
		}
	}
}

// job returns a running job with n tasks.
func job(t *testing.T, now time.Time, n int, change func(*api.JobSpec)) *Job {
	t.Helper()
	spec := api.JobSpec{Action: api.JobAction{Restart: &api.JobRestart{}}, Select: "a", Pace: &api.JobPace{Rate: RateUnlimited, Concurrency: 1000}}
	if change != nil {
		change(&spec)
	}
	if err := Check(&spec, time.UTC, now); err != nil {
		t.Fatal(err)
	}
	j := New(spec, "k", "key", "", now)
	if !j.Fire(now) {
		t.Fatal("it does not begin")
	}
	j.Added(n, nil, 0)
	j.Prepared(now)
	return &j
}

// grant lets as many of want waiting tasks begin as there is room for, those that are to be repeated first.
func grant(j *Job, now time.Time, want int) (n int) {
	for room := j.Room(now); n < want && room.Has(j.Held > 0); n++ {
		task := Task{Round: j.Round, Attempt: int(min(j.Held, 1))}
		room.Take(j.Held > 0)
		j.Start(now, &task)
	}
	return n
}

// The rate holds on average, with a burst of one second's worth.
func TestRate(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	j := job(t, now, 1000, func(s *api.JobSpec) { s.Pace.Rate = "20/s" })
	begun := 0
	for i := range 100 {
		begun += grant(j, now.Add(time.Duration(i)*100*time.Millisecond), 100)
	}
	if begun < 198+20 || begun > 200+20 {
		t.Errorf("%d of a rate of 20/s in 10 s", begun)
	}
	j = job(t, now, 10, func(s *api.JobSpec) { s.Pace.Rate = "30/m" })
	if n := grant(j, now, 10); n != 1 {
		t.Errorf("30/m begins with %d", n)
	}
	if wait, next := j.Gate(now); wait != WaitPace || next.Sub(now) != 2*time.Second {
		t.Errorf("%s until %s", wait, next)
	}
	j.Return(&Task{})
	if n := grant(j, now, 10); n != 1 {
		t.Errorf("what was given back: %d", n)
	}
}

// A rate that is raised applies at once.
func TestRateIsChanged(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	j := job(t, now, 1000, func(s *api.JobSpec) { s.Pace.Rate = "1/h" })
	if n := grant(j, now, 100) + grant(j, now.Add(time.Minute), 100); n != 1 {
		t.Fatalf("%d begin at one an hour", n)
	}
	j.SetPace(&api.JobPace{Rate: "20/s", Concurrency: 1000})
	if n := grant(j, now.Add(time.Minute), 100); n != 20 {
		t.Errorf("%d begin after the rate was raised to 20 a second, want the first second's", n)
	}
}

func TestConcurrency(t *testing.T) {
	now := time.Now()
	j := job(t, now, 100, func(s *api.JobSpec) { s.Pace.Concurrency = 3 })
	if n := grant(j, now, 100); n != 3 {
		t.Fatal(n)
	}
	j.Record(&Task{}, OK)
	if n := grant(j, now, 100); n != 1 || j.Counts.Running != 3 {
		t.Fatal(n)
	}
}

// A stage opens as many beginnings as it wants successes, and passes with them and its soak.
func TestStages(t *testing.T) {
	now := time.Now()
	stages := func(s *api.JobSpec) {
		s.Stages = []api.JobStage{{OK: api.Amount{Number: 1}, Soak: "30m"}, {OK: api.Amount{Percent: 5}}, {OK: api.Amount{Percent: 100}}}
	}
	j := job(t, now, 100, stages)
	if n := grant(j, now, 100); n != 1 {
		t.Fatalf("the first stage begins with %d", n)
	}
	j.Record(&Task{}, OK)
	j.Settle(now)
	if wait, next := j.Gate(now); wait != WaitStage || !next.Equal(now.Add(30*time.Minute)) {
		t.Fatalf("%s until %s", wait, next)
	}
	now = now.Add(31 * time.Minute)
	j.Settle(now)
	if n := grant(j, now, 100); n != 4 {
		t.Fatalf("5 %% of 100 are 4 more, not %d", n)
	}
	for range 3 {
		j.Record(&Task{}, OK)
	}
	j.Record(&Task{}, Failed)
	j.Settle(now)
	if j.State != Halted || j.Reason != ReasonStage {
		t.Fatalf("a stage with too few successes: %s %s", j.State, j.Reason)
	}
	if err := j.Resume(now); err != nil || grant(j, now, 100) != 1 {
		t.Fatalf("resumed, it opens what is missing: %v %+v", err, j)
	}
	j.Record(&Task{}, OK)
	j.Settle(now)
	if n := grant(j, now, 100); n != 94 {
		t.Fatalf("the last stage: %d", n)
	}
	for range 94 {
		j.Record(&Task{}, Failed)
	}
	j.Settle(now)
	if j.State != Done || j.Counts.Total() != 100 {
		t.Fatalf("%s %+v", j.State, j.Counts)
	}
}

func TestHoldAndAdvance(t *testing.T) {
	now := time.Now()
	j := job(t, now, 10, func(s *api.JobSpec) {
		s.Stages = []api.JobStage{{OK: api.Amount{Number: 1}, Hold: true}, {OK: api.Amount{Percent: 100}}}
	})
	grant(j, now, 10)
	j.Record(&Task{}, OK)
	j.Settle(now.Add(time.Hour))
	if j.Stage != 0 {
		t.Fatal("a stage that a person holds has passed by itself")
	}
	if err := j.Advance(now); err != nil || j.Stage != 1 || grant(j, now, 10) != 9 {
		t.Fatalf("%v %+v", err, j)
	}
}

// The stop rule halts the job in the transaction that records the failure.
func TestStop(t *testing.T) {
	now := time.Now()
	j := job(t, now, 100, func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 2} })
	grant(j, now, 10)
	j.Record(&Task{}, Failed)
	if j.State != Running {
		t.Fatal("halted by one failure")
	}
	j.Record(&Task{}, Unknown)
	if j.State != Halted || j.Reason != ReasonStop || grant(j, now, 10) != 0 {
		t.Fatalf("%s %s", j.State, j.Reason)
	}
	j.Correct(&Task{Outcome: Unknown}, OK)
	if j.State != Halted {
		t.Fatal("a late answer continued it")
	}
	j = job(t, now, 100, func(s *api.JobSpec) { s.Stop = &api.JobStop{Share: "20%", Of: 10} })
	grant(j, now, 100)
	j.Record(&Task{}, Failed)
	for range 8 {
		j.Record(&Task{}, OK)
	}
	if j.State != Running {
		t.Fatal("halted before so many have ended")
	}
	j.Record(&Task{}, Failed)
	if j.State != Halted {
		t.Fatal("2 of 10 are 20 %")
	}
}

// A minute job whose device is away for a day fires, and counts what was missed.
func TestRounds(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 30, 0, time.UTC)
	spec := api.JobSpec{Action: api.JobAction{Restart: &api.JobRestart{}}, Select: "a", When: &api.JobWhen{Cron: "* * * * *"}}
	if err := Check(&spec, time.UTC, now); err != nil {
		t.Fatal(err)
	}
	j := New(spec, "k", "key", "", now)
	if j.State != Scheduled || !j.NextAt.Equal(now.Add(30*time.Second)) || j.Due(now) {
		t.Fatalf("%+v", j)
	}
	now = now.Add(time.Minute)
	if !j.Fire(now) || j.Round != 1 || j.State != Preparing {
		t.Fatalf("%+v", j)
	}
	j.Added(1, nil, 0)
	j.Prepared(now)
	grant(&j, now, 1)
	j.Record(&Task{}, OK)
	j.Settle(now)
	if j.State != Scheduled {
		t.Fatalf("after its round: %s", j.State)
	}
	// The newest firing is not too late; those before it are missed, each.
	now = now.Add(time.Hour)
	if !j.Fire(now) || j.Round != 2 || j.Missed != 59 || !j.NextAt.After(now) || j.NextAt.Sub(now) > time.Minute {
		t.Fatalf("an hour late: %+v", j)
	}
	daily := Job{State: Scheduled, Until: now.Add(1000 * time.Hour), NextAt: now.Add(-72 * time.Hour).Truncate(24 * time.Hour).Add(7 * time.Hour),
		Spec: api.JobSpec{When: &api.JobWhen{Cron: "0 7 * * *", Timezone: "UTC"}, Pace: &api.JobPace{}}}
	if daily.Fire(now) || daily.Round != 0 || daily.Missed != 4 || daily.State != Scheduled || !daily.NextAt.After(now) {
		t.Fatalf("three days late: %+v", daily)
	}
	// Years of a minute job are not counted one by one, since its row is locked.
	j.State, j.Missed, j.NextAt = Scheduled, 0, now.Add(-10000*time.Hour)
	if begun := time.Now(); !j.Fire(now) || j.Missed != maxMissed || time.Since(begun) > 10*time.Second {
		t.Errorf("%d missed, after %v", j.Missed, time.Since(begun))
	}
}

// A job that halts at so many failures begins no more than that at once, unless it says how many.
func TestStopLimitsConcurrency(t *testing.T) {
	for _, c := range []struct{ failed, given, want int }{{2, 0, 2}, {2, 10, 10}, {1000, 0, DefaultTogether}, {0, 0, DefaultTogether}} {
		spec := api.JobSpec{Action: api.JobAction{Restart: &api.JobRestart{}}, Select: "a"}
		if c.failed > 0 {
			spec.Stop = &api.JobStop{Failed: c.failed}
		}
		if c.given > 0 {
			spec.Pace = &api.JobPace{Concurrency: c.given}
		}
		if err := Check(&spec, time.UTC, time.Now()); err != nil || spec.Pace.Concurrency != c.want || spec.Pace.Rate != DefaultRate {
			t.Errorf("stop at %d, %d given: %+v, %v", c.failed, c.given, spec.Pace, err)
		}
	}
}

// A stage that has passed and waits for a person says so.
func TestAStageOnHold(t *testing.T) {
	now := time.Now()
	j := job(t, now, 10, func(s *api.JobSpec) {
		s.Stages = []api.JobStage{{OK: api.Amount{Number: 1}, Hold: true}, {OK: api.Amount{Percent: 100}}}
	})
	grant(j, now, 1)
	if j.IsOnHold() {
		t.Error("before the stage has passed")
	}
	j.Record(&Task{}, OK)
	if j.Settle(now); !j.IsOnHold() {
		t.Error("after the stage has passed")
	}
	if err := j.Advance(now); err != nil || j.IsOnHold() {
		t.Errorf("advanced: %v", err)
	}
}

func TestVerbs(t *testing.T) {
	now := time.Now()
	j := job(t, now, 3, nil)
	for name, step := range map[string]func() error{"resume": func() error { return j.Resume(now) }, "advance": func() error { return j.Advance(now) }} {
		var e *devices.Error
		if err := step(); !errors.As(err, &e) || e.Code != devices.CodeConflict {
			t.Errorf("%s of a running job: %v", name, err)
		}
	}
	if err := j.Pause("lunch"); err != nil || grant(j, now, 3) != 0 {
		t.Fatal(err)
	}
	if err := j.Resume(now); err != nil || grant(j, now, 3) != 3 {
		t.Fatal(err)
	}
	if err := j.Cancel(now); err != nil || j.State != Cancelled || !j.EndedAt.IsZero() {
		t.Fatalf("%v; a cancelled job has ended only with its last task: %+v", err, j)
	}
	for range 3 {
		j.Record(&Task{}, OK)
	}
	if j.Settle(now); j.EndedAt.IsZero() {
		t.Fatal("its last task has ended, and it has not")
	}
	if j.Cancel(now) == nil || j.Pause("") == nil {
		t.Error("a cancelled job can be cancelled or paused")
	}
}

func TestIDs(t *testing.T) {
	now := time.Now()
	a, b := NewID(now), NewID(now.Add(time.Millisecond))
	if a >= b || !IsID(a) || IsID("x") || IsID(strings.ToUpper(a)) {
		t.Errorf("%s %s", a, b)
	}
	if Spread(a, "x") == Spread(a, "y") || Spread(a, "x") < 0 {
		t.Error("devices have one place")
	}
}

// A job whose deadline has passed begins nothing, and returned tasks of an older round do not
// close the gate of a job without stages.
func TestGateOfDeadlineAndOldRounds(t *testing.T) {
	now := time.Now()
	j := job(t, now, 3, nil)
	j.Started = -1
	if n := grant(j, now, 3); n != 3 {
		t.Errorf("with a negative number of started tasks %d begin, want 3", n)
	}
	j = job(t, now, 3, nil)
	if n := grant(j, j.Until, 3); n != 0 {
		t.Errorf("%d begin after the deadline", n)
	}
}

// A repeating job fires although a device of its last round is away.
func TestARepeatingJobFiresWhileItsLastRoundGoesOn(t *testing.T) {
	now := time.Date(2026, 3, 2, 7, 0, 30, 0, time.UTC)
	j := Job{State: Running, Spec: api.JobSpec{When: &api.JobWhen{Cron: "* * * * *", Timezone: "UTC"}, Pace: &api.JobPace{}},
		Round: 1, NextAt: now.Truncate(time.Minute), Until: now.Add(time.Hour), Counts: Counts{Waiting: 1}}
	if !j.Due(now) || !j.Fire(now) || j.State != Preparing || j.Round != 2 {
		t.Fatalf("the job did not fire: %+v", j)
	}
	if want := now.Truncate(time.Minute).Add(time.Minute); !j.NextAt.Equal(want) {
		t.Errorf("it fires next at %v, want %v", j.NextAt, want)
	}
}
