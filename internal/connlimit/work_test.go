package connlimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
		if err := w.Begin(ctx, "greedy"); !errors.Is(err, ErrTooMuchWork) || w.Refused.Load() != 1 || time.Since(begun) < refusalDelay {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		time.Sleep(2 * WorkWait)
		begun = time.Now()
		if err := w.Begin(ctx, "greedy"); err != nil || time.Since(begun) != 0 {
			t.Errorf("the caller does not come back: %v after %v", err, time.Since(begun))
		}
	})
}

// Requests that came together are not refused together: a thousand goroutines that go on in one moment delay
// everybody else.
func TestRefusalsAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWork()
		for w.of("a").Tokens() > -2*WorkRate*WorkWait.Seconds() {
			w.Charge("a", maxAnswer*WorkBytes)
		}
		const requests = 1_000
		begun, ends := time.Now(), make(chan time.Duration, requests)
		for range requests {
			go func() {
				if err := w.Begin(t.Context(), "a"); !errors.Is(err, ErrTooMuchWork) {
					t.Error(err)
				}
				ends <- time.Since(begun)
			}()
		}
		const steps = 10
		var at [steps]int
		for range requests {
			end := <-ends
			if end < refusalDelay || end >= 2*refusalDelay {
				t.Fatalf("a refusal after %v, want %v to %v", end, refusalDelay, 2*refusalDelay)
			}
			at[(end-refusalDelay)*steps/refusalDelay]++
		}
		// security: N43
		if most := slices.Max(at[:]); most > 2*requests/steps {
			t.Errorf("%d of %d requests are refused within a tenth of %v: %d", most, requests, refusalDelay, at)
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
