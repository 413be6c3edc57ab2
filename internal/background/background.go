// Package background runs work that computes for long on threads of a lower
// priority, which yield, so that a thread which was woken for a call gets a processor soon
// and not after a turn of the kernel's scheduler. Go has no priorities of
// goroutines, and threads of one priority that compute make each other wait for
// milliseconds.
package background

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"fleetd/internal/counters"
)

const (
	// MaxThreads are the threads that exist at once at most. Work beyond them runs on
	// the goroutine that brings it.
	MaxThreads = 64
	// idleTime is how long a thread without work is kept.
	idleTime = 10 * time.Second
	// niceness is added to the priority of a thread (nice(2)). The thread has a third of the share of
	// another one while all processors are busy: with 10 it had a tenth, and lists of 10,000 devices took minutes
	// beside other programs, without calls being faster for it.
	niceness = 5
)

// Threads run work. A nil *Threads runs it on the goroutine that brings it. It is safe
// for concurrent use.
type Threads struct {
	work  chan *job
	count atomic.Int32
	// Direct counts work for which there was no thread.
	Direct atomic.Uint64
}

// New returns Threads that are started when there is work.
func New() *Threads { return &Threads{work: make(chan *job)} }

// job is a function, and what it panicked with.
type job struct {
	f        func()
	done     chan struct{}
	panicked any
}

// Metrics adds work for which there was no thread.
func (t *Threads) Metrics(r *counters.Registry) {
	counters.Value(r.Counter("background_direct_total", "Requests of lists, searches and the like that were worked on at the priority of calls, because all threads of a lower one had work."), t.Direct.Load)
}

// Run runs f on a thread of a lower priority and returns when f has returned. A panic of f
// is one of Run.
func (t *Threads) Run(f func()) {
	if t == nil || !supported {
		f()
		return
	}
	j := &job{f: f, done: make(chan struct{})}
	if !t.give(j) {
		t.Direct.Add(1)
		f()
		return
	}
	<-j.done
	if j.panicked != nil {
		panic(j.panicked)
	}
}

// give passes a job to a thread; false: there are as many as there may be, and all have work.
func (t *Threads) give(j *job) bool {
	select {
	case t.work <- j:
		return true
	default:
	}
	if t.count.Add(1) > MaxThreads {
		t.count.Add(-1)
		return false
	}
	go t.serve(j)
	return true
}

// serve is a thread: it does a job, and those that come within idleTime of the one before.
func (t *Threads) serve(j *job) {
	defer t.count.Add(-1)
	// It is never unlocked: the thread ends with the goroutine, since its priority
	// cannot be raised again.
	runtime.LockOSThread()
	lowerPriority()
	idle := time.NewTimer(idleTime)
	defer idle.Stop()
	for {
		j.run()
		idle.Reset(idleTime)
		select {
		case j = <-t.work:
		case <-idle.C:
			return
		}
	}
}

func (j *job) run() {
	defer close(j.done)
	defer func() {
		v := recover()
		_, isError := v.(error)
		if _, isBug := v.(runtime.Error); isBug || v != nil && !isError { // errors such as http.ErrAbortHandler are known by identity
			v = fmt.Sprintf("%v\n\n%s", v, debug.Stack()) // the stack of the caller has nothing of f
		}
		j.panicked = v
	}()
	j.f()
}
