package connlimit

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Connections above the rate wait; those that find the queue full or wait too long get an error.
func TestAdmissionQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewAdmissionQueue(QueueLimits{Rate: 10, Burst: 5, Waiting: 100, MaxWait: 2050 * time.Millisecond})
		var mu sync.Mutex
		let, refused := map[int]int{}, 0
		begun := time.Now()
		for range 200 {
			go func() {
				err := r.Enter(t.Context())
				mu.Lock()
				defer mu.Unlock()
				if errors.Is(err, ErrFull) {
					refused++
				} else {
					let[int(time.Since(begun)/time.Second)]++
				}
			}()
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if all := let[0] + let[1] + let[2]; let[0] < 14 || let[0] > 15 || let[1] != 10 || all != 25 || refused != 175 { // 5 at once, 10 a second for 2 s
			t.Errorf("admitted by second %v, refused %d", let, refused)
		}
		if err := r.Enter(t.Context()); err != nil {
			t.Errorf("after the crowd: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 10 {
			_ = r.Enter(ctx) // some are admitted
		}
		if n := r.waiting.Load(); n != 0 {
			t.Errorf("%d still wait", n)
		}
	})
}

func TestList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l List[int]
		for n := range 5 {
			if !l.Add(n) {
				t.Fatal("refused")
			}
		}
		if even := l.Append(nil, func(n int) bool { return n%2 == 0 }); len(even) != 3 || l.Len() != 5 {
			t.Errorf("%v of %d", even, l.Len())
		}
		l.Go(func() { time.Sleep(time.Second) })
		l.Close()
		if l.Add(9) {
			t.Error("a closed list accepts connections")
		}
		go func() {
			for n := range 5 {
				time.Sleep(time.Minute)
				l.Remove(n)
			}
		}()
		begun := time.Now()
		l.Wait()
		if took := time.Since(begun); took != 5*time.Minute || l.Len() != 0 {
			t.Errorf("waited %v, %d left", took, l.Len())
		}
	})
}
