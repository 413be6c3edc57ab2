package connlimit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// One caller's requests compute in its slots, whatever their number, and those of another
// caller do not wait for them; what waits too long is refused.
func TestSlotsOfOneCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := NewWork(), t.Context()
		const requests, computing = 20, 100 * time.Millisecond
		var mu sync.Mutex
		busy, most := 0, 0
		add := func(n int) {
			mu.Lock()
			defer mu.Unlock()
			busy += n
			most = max(most, busy)
		}
		done := make(chan struct{})
		for range requests {
			go func() {
				defer func() { done <- struct{}{} }()
				s, err := w.Compute(ctx, "greedy")
				if err != nil {
					t.Error(err)
					return
				}
				add(1)
				time.Sleep(computing)
				add(-1)
				s.Leave()
				s.Leave() // a second time changes nothing
			}()
		}
		synctest.Wait()
		begun := time.Now()
		// security: N43
		if s, err := w.Compute(ctx, "modest"); err != nil || time.Since(begun) != 0 {
			t.Errorf("another caller waits %v: %v", time.Since(begun), err)
		} else {
			s.Leave()
		}
		for range requests {
			<-done
		}
		// security: N43
		if most != slotsOfCaller() {
			t.Errorf("%d requests of one caller compute at once, want %d", most, slotsOfCaller())
		}
		if w.Waited.Load() == 0 || w.Refused.Load() != 0 {
			t.Errorf("%d waited, %d were refused", w.Waited.Load(), w.Refused.Load())
		}
	})
}

// A request that waits for its client has no slot meanwhile, and one that waits for a
// database that does not answer has it for a time.
func TestSlotsAreGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := NewWork(), t.Context()
		take := func() (s *Slot, waited time.Duration) {
			begun := time.Now()
			s, err := w.Compute(ctx, "a")
			if err != nil {
				t.Fatal(err)
			}
			return s, time.Since(begun)
		}
		var all []*Slot
		for range slotsOfCaller() {
			s, _ := take()
			all = append(all, s)
		}
		all[0].Pause(func() {
			s, waited := take()
			if waited != 0 {
				t.Errorf("a slot whose request waits for its client is free after %v", waited)
			}
			s.Leave()
		})
		late, waited := take()
		if waited != slotTime {
			t.Errorf("a slot that is held is free after %v, want %v", waited, slotTime)
		}
		for _, s := range append(all, late) {
			s.Leave()
		}
		if n := len(w.of("a").places); n != 0 {
			t.Errorf("%d slots are taken at the end", n)
		}
	})
}

// Others wait while all places are taken, until one is given back or was held for too long.
func TestPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		places, begun := make(Places, 2), time.Now()
		enter := func() (leave func(), waited time.Duration) {
			leave, err := places.Enter(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return leave, time.Since(begun)
		}
		first, _ := enter()
		second, _ := enter()
		time.AfterFunc(slotTime/2, first)
		third, waited := enter()
		// security: N47
		if waited != slotTime/2 {
			t.Errorf("a third request waits %v, want %v", waited, slotTime/2)
		}
		fourth, waited := enter()
		if waited != slotTime {
			t.Errorf("a fourth waits %v for a place that is held, want %v", waited, slotTime)
		}
		gone, end := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, end)
		if _, err := places.Enter(gone); !errors.Is(err, context.Canceled) {
			t.Errorf("a request whose client has gone: %v", err)
		}
		for _, leave := range []func(){first, second, third, fourth} {
			leave()
			leave()
		}
		if len(places) != 0 {
			t.Errorf("%d places are taken at the end", len(places))
		}
	})
}

// A request that finds no slot in time is refused, and counted.
func TestSlotsRefuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWork()
		w.wait = slotTime / 2
		for range slotsOfCaller() {
			s, err := w.Compute(t.Context(), "a")
			if err != nil {
				t.Fatal(err)
			}
			defer s.Leave()
		}
		// security: N43
		if _, err := w.Compute(t.Context(), "a"); !errors.Is(err, ErrTooMuchWork) || w.Refused.Load() != 1 {
			t.Errorf("%v, %d refused", err, w.Refused.Load())
		}
	})
}

// However many callers there are, their requests compute on a part of the threads, in the order in which they came, and one whose client
// goes leaves the queue.
func TestComputingOfAllCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWork()
		const callers, computing = 20, 100 * time.Millisecond
		gone, leave := context.WithCancel(t.Context())
		var mu sync.Mutex
		began := map[int]time.Time{} // those of one moment in any order
		var all sync.WaitGroup
		busy, most := 0, 0
		for n := range callers {
			ctx := t.Context()
			if n == callers/2 {
				ctx = gone
			}
			all.Go(func() {
				s, err := w.Compute(ctx, fmt.Sprint("key ", n))
				if n == callers/2 {
					if !errors.Is(err, context.Canceled) {
						t.Errorf("a request whose client has gone: %v", err)
					}
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				began[n] = time.Now()
				busy++
				most = max(most, busy)
				mu.Unlock()
				time.Sleep(computing)
				mu.Lock()
				busy--
				mu.Unlock()
				s.Leave()
			})
			synctest.Wait()
		}
		leave()
		all.Wait()
		// security: N43
		if most != cap(w.Computing) || most <= slotsOfCaller() {
			t.Errorf("%d requests compute at once, want %d, and more than the %d of one caller", most, cap(w.Computing), slotsOfCaller())
		}
		// security: N43
		if order := slices.Sorted(maps.Keys(began)); len(order) != callers-1 || !slices.IsSortedFunc(order, func(a, b int) int { return began[a].Compare(began[b]) }) {
			t.Errorf("the callers had their turns at %v", began)
		}
		if w.Refused.Load() != 0 || len(w.Computing) != 0 || len(w.of(fmt.Sprint("key ", callers/2)).places) != 0 {
			t.Errorf("%d were refused, %d places are taken at the end", w.Refused.Load(), len(w.Computing))
		}
	})
}

// A request whose client has gone while it was sent something ends without a slot, and needs no place to end.
func TestPauseOfALostClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWork()
		ctx, leave := context.WithCancel(t.Context())
		s, err := w.Compute(ctx, "a")
		if err != nil {
			t.Fatal(err)
		}
		s.Pause(func() {
			for range cap(w.Computing) {
				w.Computing <- struct{}{}
			}
			leave()
		})
		s.Pause(func() {})
		s.Leave()
		if len(w.of("a").places) != 0 || len(w.Computing) != cap(w.Computing) {
			t.Errorf("%d and %d places are taken", len(w.of("a").places), len(w.Computing))
		}
	})
}
