package background

import (
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("fleetd/internal/background.(*Threads).serve")) // kept for idleTime
}

// Work is done before Run returns, and what panics does so where it was brought from.
func TestRun(t *testing.T) {
	threads := New()
	for range 100 {
		done := false
		threads.Run(func() { done = true })
		if !done {
			t.Fatal("Run returned before its work was done")
		}
	}
	if n := threads.count.Load(); supported && n > 2 {
		t.Errorf("%d threads for work that came one after the other", n)
	}
	var none *Threads
	done := false
	none.Run(func() { done = true })
	if !done {
		t.Error("without threads nothing was done")
	}
}

func TestPanic(t *testing.T) {
	threads := New()
	panicOf := func(value any) (got any) {
		defer func() { got = recover() }()
		threads.Run(func() { panic(value) })
		return nil
	}
	if got, _ := panicOf(http.ErrAbortHandler).(error); !errors.Is(got, http.ErrAbortHandler) {
		t.Errorf("net/http would not recognize %v", got)
	}
	if got, _ := panicOf("index out of range").(string); supported && (!strings.HasPrefix(got, "index out of range") || !strings.Contains(got, "TestPanic.func1")) {
		t.Errorf("the panic is %q; want its value and the stack of the work", got)
	}
	threads.Run(func() {}) // the threads go on
}

// Work beyond the number of threads is done by those who bring it.
func TestBounded(t *testing.T) {
	threads := New()
	var all sync.WaitGroup
	release, begun := make(chan struct{}), make(chan struct{})
	const more = 5
	for range MaxThreads + more {
		all.Go(func() {
			threads.Run(func() {
				begun <- struct{}{}
				<-release
			})
		})
	}
	for range MaxThreads + more {
		<-begun
	}
	if n, direct := threads.count.Load(), threads.Direct.Load(); supported && (n != MaxThreads || direct != more) {
		t.Errorf("%d threads and %d directly, want %d and %d", n, direct, MaxThreads, more)
	}
	close(release)
	all.Wait()
}

func BenchmarkYield(b *testing.B) {
	for b.Loop() {
		Yield()
	}
}
