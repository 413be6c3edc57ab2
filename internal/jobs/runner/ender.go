package runner

import (
	"context"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/jobs"
	"fleetd/internal/tasks"
)

// ender records how tasks ended, in groups. What the database does not accept is kept, and
// nothing begins meanwhile, so that it holds at most maxRunning tasks and the late answers
// of the connections.
type ender struct {
	r    *Runner
	done sync.WaitGroup
	wake chan struct{} // capacity 1

	mu      sync.Mutex
	list    []jobs.End
	blocked bool // the last group was not accepted
	// uncertain is the length of the start of list that has ends of tasks that perhaps did not begin.
	uncertain int
	closed    bool
}

func newEnder(r *Runner) *ender {
	e := &ender{r: r, wake: make(chan struct{}, 1)}
	e.done.Go(e.run)
	return e
}

func (e *ender) add(end jobs.End) {
	e.mu.Lock()
	if !end.Late || len(e.list) < 2*maxRunning { // a late answer is not worth the memory
		e.list = append(e.list, end)
	}
	e.mu.Unlock()
	tasks.Signal(e.wake)
}

// addUncertain adds the ends of tasks that perhaps did not begin. Until they are written nothing else begins: a task of these, begun
// once more by then, would be taken for the one that did not begin, and be sent twice.
func (e *ender) addUncertain(begun []jobs.Task) {
	if len(begun) == 0 {
		return
	}
	e.mu.Lock()
	for i := range begun {
		e.list = append(e.list, notSent(&begun[i], time.Time{}))
	}
	e.uncertain = len(e.list)
	e.mu.Unlock()
	tasks.Signal(e.wake)
}

// isBlocked reports whether outcomes wait for the database that must be written before anything begins.
func (e *ender) isBlocked() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.isBlockedLocked()
}

func (e *ender) isBlockedLocked() bool { return e.blocked || e.uncertain > 0 }

// close writes what is left, if the database accepts it, and ends.
func (e *ender) close() {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	tasks.Signal(e.wake)
	e.done.Wait()
}

// group returns the next group, in which every task is once.
func (e *ender) group() (list []jobs.End, closed bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	seen := map[key]bool{}
	for i := range e.list {
		k := key{e.list[i].Job, e.list[i].Round, e.list[i].Device}
		if seen[k] || i >= jobs.BeginBatch {
			break
		}
		seen[k] = true
		list = e.list[:i+1]
	}
	return list, e.closed
}

func (e *ender) run() {
	for range e.wake {
		time.Sleep(endWait) // others end at about the same time
		for {
			list, closed := e.group()
			if len(list) == 0 {
				if closed {
					return
				}
				break
			}
			ok := e.write(list)
			if e.wrote(len(list), ok) {
				tasks.Signal(e.r.wake)
			}
			switch {
			case ok:
			case closed:
				e.r.Log.Error("jobs: the outcomes of tasks could not be recorded; they count as unknown", "tasks", len(list))
				return
			default:
				time.Sleep(againAfter)
			}
		}
	}
}

// wrote notes whether the first n ends were accepted, and reports whether others may begin again since then.
func (e *ender) wrote(n int, ok bool) (free bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	wasBlocked := e.isBlockedLocked()
	if e.blocked = !ok; ok {
		e.list = append([]jobs.End(nil), e.list[n:]...)
		e.uncertain = max(0, e.uncertain-n)
	}
	return wasBlocked && !e.isBlockedLocked()
}

// write records one group, and lets the devices go on.
func (e *ender) write(list []jobs.End) bool {
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	ended, _, err := e.r.Store.End(ctx, e.r.Instance, list)
	if err != nil {
		e.r.Log.Warn("jobs: the outcomes of tasks cannot be recorded; nothing begins meanwhile", "tasks", len(list), "error", err)
		return false
	}
	ids := make([]devices.ID, 0, len(list))
	now := e.r.Store.Now()
	for i := range list {
		if pause := max(list[i].Again.Sub(now), list[i].Pause); pause > 0 {
			e.r.lookAt(list[i].Device, pause)
		} else {
			ids = append(ids, list[i].Device)
		}
	}
	for i := range ended {
		if t := &ended[i]; t.State == jobs.TaskWaiting && t.DueAt.After(now) {
			e.r.lookAt(t.Device, t.DueAt.Sub(now))
		}
	}
	e.r.Look(ids...)
	return true
}
