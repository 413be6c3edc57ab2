package jobs

import (
	"strconv"
	"testing"
	"time"

	"fleetd/internal/api"
)

// A person who resumes a job that its stop rule halted lets it go on until one more fails.
func TestResumeAfterStop(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	j := job(t, now, 10, func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 2} })
	grant(j, now, 6)
	j.Record(&Task{}, Failed)
	j.Record(&Task{}, Failed)
	if j.State != Halted {
		t.Fatalf("after two failures: %s", j.State)
	}
	if err := j.Resume(now); err != nil {
		t.Fatal(err)
	}
	j.Record(&Task{}, OK)
	if j.State != Running {
		t.Errorf("after a success: %s", j.State)
	}
	j.Record(&Task{}, Failed)
	if j.State != Halted {
		t.Errorf("after one more failure: %s", j.State)
	}
}

// A job whose time ends while it is halted keeps the reason why its tasks were not sent, until they are repeated.
func TestReasonOutlivesTheDeadline(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	j := job(t, now, 3, func(s *api.JobSpec) { s.Stop = &api.JobStop{Failed: 1} })
	grant(j, now, 1)
	j.Record(&Task{}, Failed)
	now = j.Until
	for range 2 {
		j.RecordWaiting(&Task{Round: j.Round}, Expired)
	}
	if j.Settle(now); j.State != Done || j.Reason != ReasonStop {
		t.Errorf("after its end: %s %q", j.State, j.Reason)
	}
	if err := j.Reopen(now); err != nil || j.State != Running || j.Reason != "" {
		t.Errorf("with tasks to be repeated: %s %q, %v", j.State, j.Reason, err)
	}
}

// How many devices can come to harm: what the stop rule lets fail and what runs at once, and all if failures are repeated first.
func TestAtRisk(t *testing.T) {
	for name, c := range map[string]struct {
		stop  *api.JobStop
		retry *api.JobRetry
		want  int64
	}{"no rule": {nil, nil, 100}, "two": {&api.JobStop{Failed: 2}, nil, 12}, "a share": {&api.JobStop{Share: "5%", Of: 20}, nil, 30}, "two, repeated": {&api.JobStop{Failed: 2}, &api.JobRetry{Failed: 1}, 100}} {
		if got := AtRisk(&api.JobSpec{Pace: &api.JobPace{Concurrency: 10}, Stop: c.stop, Retry: c.retry}, 100); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

// A share that is a whole number of devices is not one more by the error of a fraction: 7 % of 100 are 7.
func TestWholeShares(t *testing.T) {
	for percent := 1; percent <= 100; percent++ {
		for of := 100; of <= 10_000; of += 100 {
			j := Job{RoundN: int64(of / 5)}
			j.Spec.Stages = []api.JobStage{{OK: api.Amount{Percent: float64(percent)}}}
			if got, want := j.wants(0), int64((of/5*percent+99)/100); got != want {
				t.Fatalf("%d %% of %d are %d, want %d", percent, of/5, got, want)
			}
			spec := api.JobSpec{Stop: &api.JobStop{Share: strconv.Itoa(percent) + "%", Of: 1}, Pace: &api.JobPace{}}
			if got, want := AtRisk(&spec, int64(of/5)), int64((of/5*percent+99)/100); got != want {
				t.Fatalf("%d %% of %d at risk are %d, want %d", percent, of/5, got, want)
			}
		}
	}
}

// The stop rule is applied while the next round is prepared.
func TestStopWhilePreparing(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 30, 0, time.UTC)
	spec := api.JobSpec{Action: api.JobAction{Restart: &api.JobRestart{}}, Select: "a", When: &api.JobWhen{Cron: "* * * * *"}, Stop: &api.JobStop{Failed: 1}}
	if err := Check(&spec, time.UTC, now); err != nil {
		t.Fatal(err)
	}
	j := New(spec, "k", "key", "", now)
	for round := range 2 {
		now = now.Add(time.Minute)
		if !j.Fire(now) {
			t.Fatalf("round %d: %+v", round+1, j)
		}
		if round == 0 {
			j.Added(2, nil, 0)
			j.Prepared(now)
			grant(&j, now, 2)
		}
	}
	j.Record(&Task{}, Failed)
	if j.State != Halted || j.Before != Preparing {
		t.Errorf("%s, before that %s", j.State, j.Before)
	}
}

// A job whose rows are not written at its deadline ends.
func TestDeadlineWhilePreparing(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	spec := api.JobSpec{Action: api.JobAction{Restart: &api.JobRestart{}}, Select: "a"}
	if err := Check(&spec, time.UTC, now); err != nil {
		t.Fatal(err)
	}
	j := New(spec, "k", "key", "", now)
	j.Fire(now)
	j.Added(1, nil, 0)
	now = now.Add(DefaultUntil)
	if j.Settle(now); j.State != Preparing {
		t.Fatalf("with a waiting task: %s", j.State)
	}
	j.RecordWaiting(&Task{}, Expired)
	if j.Settle(now); j.State != Done || !j.EndedAt.Equal(now) {
		t.Errorf("%s, ended %s", j.State, j.EndedAt)
	}
}

// Devices that come to match while a stage is open count for it, and it opens for them.
func TestFollowedDevicesInStages(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	j := job(t, now, 10, func(s *api.JobSpec) { s.Follow, s.Stages = true, []api.JobStage{{OK: api.Amount{Percent: 100}}} })
	grant(j, now, 9) // one is away
	for range 9 {
		j.Record(&Task{}, OK)
	}
	j.Settle(now)
	j.Added(1, nil, 0)
	grant(j, now, 1)
	j.Record(&Task{}, OK)
	if j.Settle(now); j.State != Running {
		t.Fatalf("after ten of eleven: %s %s", j.State, j.Reason)
	}
	grant(j, now, 1)
	j.Record(&Task{}, OK)
	if j.Settle(now); j.Stage != 1 {
		t.Errorf("after all: stage %d, %s %s", j.Stage, j.State, j.Reason)
	}
}

// Tasks that were refused when they began, and are repeated by a person, begin once more in a stage.
func TestRetryOfRefusedInStages(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	j := job(t, now, 2, func(s *api.JobSpec) { s.Stages = []api.JobStage{{OK: api.Amount{Percent: 100}}} })
	grant(j, now, 2)
	j.Record(&Task{}, OK)
	j.Record(&Task{}, Refused)
	j.Settle(now)
	if err := j.Reopen(now); err != nil {
		t.Fatal(err)
	}
	j.Again(&Task{Attempt: 1, Outcome: Refused})
	if j.Settle(now); j.State != Running || grant(j, now, 1) != 1 {
		t.Errorf("%s %s, %d of %d have begun", j.State, j.Reason, j.Started, j.Opened)
	}
}

// A task that is repeated after the end of a schedule does not begin the schedule again.
func TestRetryAfterTheLastRound(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 30, 0, time.UTC)
	spec := api.JobSpec{Action: api.JobAction{Restart: &api.JobRestart{}}, Select: "a", When: &api.JobWhen{Cron: "* * * * *", Until: api.At(now.Add(time.Minute))}}
	if err := Check(&spec, time.UTC, now); err != nil {
		t.Fatal(err)
	}
	j := New(spec, "k", "key", "", now)
	now = now.Add(30 * time.Second)
	j.Fire(now)
	j.Added(1, nil, 0)
	j.Prepared(now)
	grant(&j, now, 1)
	j.Record(&Task{}, Failed)
	now = now.Add(6 * time.Hour)
	if j.Settle(now); j.State != Done {
		t.Fatalf("after its end: %s", j.State)
	}
	if err := j.Reopen(now); err != nil {
		t.Fatal(err)
	}
	j.Again(&Task{Attempt: 1, Outcome: Failed, Round: j.Round})
	for later := time.Duration(0); later < DefaultUntil; later += time.Minute {
		if j.Due(now.Add(later)) {
			t.Fatalf("it fires %v after the retry", later)
		}
	}
	grant(&j, now, 1)
	j.Record(&Task{}, OK)
	if j.Settle(now); j.State != Done {
		t.Errorf("after the retry: %s, next %s, until %s", j.State, j.NextAt, j.Until)
	}
}
