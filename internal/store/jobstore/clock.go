package jobstore

import (
	"context"
	"database/sql"
	"errors"
	"strconv"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/jobs"
	"fleetd/internal/store/database"
)

// The times of jobs are those of the database, on SQLite of the node. A measurement tells how far that clock is, and until the
// next one the monotonic clock of the process goes on from there.
//
// What people give (at, cron, window, until) is compared with that clock as it is. What lasts (rates, soaks, pauses before a
// repetition, phases of firmware tasks, bars) must not wait for a clock that is set back: whoever measures that the clock was stepped moves these times by as
// much, in the same transaction that adds the step to the row clockKey. A transaction of another process that has measured
// before the step begins again.

const (
	// clockKey is the key, in the table fleet, of the sum of the steps of the clock of Postgres, in microseconds.
	clockKey = "jobs_clock"
	// clockLock is the advisory lock that transactions share and a step takes alone.
	clockLock = 0x666c656574 // "fleet"
	// minStep is the smallest step: a clock that is corrected gradually makes none.
	minStep = time.Second
)

// notByItself is when a task is due that waits for its device's next start, which is no time that lasts.
var notByItself = strconv.FormatInt(clock.Micros(jobs.NotByItself), 10)

// measurement is the clock at one moment.
type measurement struct {
	clock time.Time     // of the database
	at    time.Time     // of this process, with its monotonic reading
	steps time.Duration // the sum of the steps until then
}

// errStepped is of a transaction that began with a measurement from before a step.
var errStepped = errors.New("the clock of the database was stepped")

// Now implements jobs.Store.
func (s *Store) Now() time.Time {
	now := s.wall()
	if m := s.measured.Load(); m != nil {
		now = m.clock.Add(time.Since(m.at))
	}
	return now.UTC().Truncate(time.Microsecond)
}

// measure reads the clock. The error is at most half of the time that the answer takes.
func (s *Store) measure(ctx context.Context) error {
	for {
		next, took, err := s.readClock(ctx)
		if err != nil {
			return err
		}
		last := s.measured.Load()
		// Who finds that a step was added since its last measurement takes that one's word: it may itself have started after the
		// clock was stepped, and would take the step back. So a second step between two measurements is followed only by a process
		// that had measured before both.
		if last != nil && next.steps == last.steps {
			step := (next.clock.Sub(last.clock) - next.at.Sub(last.at)).Truncate(time.Microsecond) // as the row has it
			if step.Abs() > minStep+took {
				switch done, err := s.addStep(ctx, next.steps, step); {
				case err != nil:
					return err
				case !done: // another process did
					continue
				}
				next.steps += step
				s.log.Warn("the clock that the times of jobs are compared with was stepped; rates, soaks and pauses go on as if it was not", "step", step.Round(time.Millisecond))
			}
		}
		if s.measured.CompareAndSwap(last, next) {
			return nil
		}
	}
}

// readClock reads the clock and the sum of its steps.
func (s *Store) readClock(ctx context.Context) (m *measurement, took time.Duration, err error) {
	before := time.Now()
	m = &measurement{clock: s.wall(), at: before}
	if !s.db.Postgres() {
		if last := s.measured.Load(); last != nil {
			m.steps = last.steps
		}
		return m, 0, nil
	}
	var us int64
	var steps sql.NullString
	if err := s.db.Read.QueryRowContext(ctx, `SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, (SELECT value FROM fleet WHERE key = $1)`, clockKey).Scan(&us, &steps); err != nil {
		return nil, 0, err
	}
	took = time.Since(before)
	m.clock, m.at, m.steps = clock.Instant(us), before.Add(took/2), stepsOf(steps.String)
	return m, took, nil
}

func stepsOf(text string) time.Duration {
	us, _ := strconv.ParseInt(text, 10, 64) // without a row there was none
	return time.Duration(us) * time.Microsecond
}

// addStep moves what lasts by a step, unless another process has added one to steps meanwhile.
func (s *Store) addStep(ctx context.Context, steps, step time.Duration) (done bool, err error) {
	err = s.try(ctx, "following a step of the clock", func(ctx context.Context, t *transaction) error {
		if t.db.Postgres() {
			if _, err := t.exec(ctx, `SELECT pg_advisory_xact_lock($1)`, int64(clockLock)); err != nil {
				return err
			}
			n, err := t.exec(ctx, database.SetFact+` WHERE fleet.value = $3`,
				clockKey, strconv.FormatInt((steps+step).Microseconds(), 10), strconv.FormatInt(steps.Microseconds(), 10))
			if err != nil || n == 0 {
				return err
			}
		}
		done = true
		for _, text := range []string{
			`UPDATE jobs SET tat = CASE WHEN tat = 0 THEN 0 ELSE tat + $1 END, stage_end = CASE WHEN stage_end = 0 THEN 0 ELSE stage_end + $1 END, ready_at = 0, version = version + 1 WHERE ended_at = 0`,
			`UPDATE tasks SET limit_at = CASE WHEN limit_at > 0 THEN limit_at + $1 ELSE 0 END, due_at = CASE WHEN due_at > 0 AND due_at < ` + notByItself + ` THEN due_at + $1 ELSE due_at END
 WHERE state = 'waiting' AND (due_at > 0 OR limit_at > 0) OR phase <> ''`,
			`UPDATE firmware_devices SET barred_until = barred_until + $1 WHERE barred_until > 0`,
			`UPDATE job_confirmations SET until = until + $1`,
		} {
			if _, err := t.exec(ctx, text, step.Microseconds()); err != nil {
				return err
			}
		}
		return nil
	})
	return done && err == nil, err
}

// checkClock returns errStepped if the transaction began with a measurement from before a step, and lets no step be added
// until it ends.
func (t *transaction) checkClock(ctx context.Context) error {
	if !t.db.Postgres() {
		return nil
	}
	if _, err := t.exec(ctx, `SELECT pg_advisory_xact_lock_shared($1)`, int64(clockLock)); err != nil {
		return err
	}
	steps, err := database.Fact(ctx, t.tx, clockKey)
	if err != nil {
		return err
	}
	if stepsOf(steps) != t.steps {
		return database.Rule(errStepped)
	}
	return nil
}
