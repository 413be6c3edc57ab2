package connlimit

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// A caller over its rate waits, up to a limit, and costs no other caller anything.
func TestWorkOfOneCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := NewWork(), t.Context()
		begun := time.Now()
		const more = 1_000
		for range WorkBurst + more {
			if err := w.Begin(ctx, "greedy"); err != nil {
				t.Fatal(err)
			}
		}
		// security: N43
		if took, want := time.Since(begun), more*time.Second/WorkRate; took < want*9/10 || took > want*11/10 {
			t.Errorf("%d requests over the burst take %v, want %v", more, took, want)
		}
		if w.Waited.Load() < more*9/10 || w.Refused.Load() != 0 {
			t.Errorf("%d waited, %d were refused", w.Waited.Load(), w.Refused.Load())
		}
		begun = time.Now()
		// security: N43
		if err := w.Begin(ctx, "modest"); err != nil || time.Since(begun) != 0 {
			t.Errorf("another caller waits %v: %v", time.Since(begun), err)
		}
	})
}

// Large answers count more, though one alone has nobody refused; who would have to wait
// too long is refused at once.
func TestWorkOfLargeAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := NewWork(), t.Context()
		for range WorkBurst {
			if err := w.Begin(ctx, "greedy"); err != nil {
				t.Fatal(err)
			}
		}
		w.Charge("greedy", 1<<40)
		begun := time.Now()
		if err := w.Begin(ctx, "greedy"); err != nil || time.Since(begun) < WorkWait/2 {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		w.Charge("greedy", 1<<40)
		w.Charge("greedy", 1<<40)
		begun = time.Now()
		// security: N43
		if err := w.Begin(ctx, "greedy"); !errors.Is(err, ErrTooMuchWork) || w.Refused.Load() != 1 || time.Since(begun) != refusalDelay {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		time.Sleep(2 * WorkWait)
		begun = time.Now()
		if err := w.Begin(ctx, "greedy"); err != nil || time.Since(begun) != 0 {
			t.Errorf("the caller does not come back: %v after %v", err, time.Since(begun))
		}
	})
}

// A request whose client has gone gives its place back.
func TestWorkOfClientsThatLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWork()
		for range WorkBurst {
			if err := w.Begin(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
		}
		for range 10 * WorkRate {
			ctx, cancel := context.WithTimeout(t.Context(), time.Microsecond)
			if err := w.Begin(ctx, "a"); !errors.Is(err, context.DeadlineExceeded) && err != nil {
				t.Fatal(err)
			}
			cancel()
		}
		if err := w.Begin(t.Context(), "a"); err != nil {
			t.Error(err)
		}
	})
}

// Callers that rest are forgotten.
func TestWorkForgets(t *testing.T) {
	w := NewWork()
	for i := range 3 * maxWorkers {
		_ = w.of(fmt.Sprint(i)) // has its whole burst
	}
	if len(w.callers) > maxWorkers {
		t.Errorf("%d callers are remembered", len(w.callers))
	}
}
