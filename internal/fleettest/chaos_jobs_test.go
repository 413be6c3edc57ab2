package fleettest

import (
	"context"
	"fmt"
	"sync"
	"time"

	"fleetd/internal/api"
)

// chaosTasks is how many devices each job of the chaos has.
const chaosTasks = 40

// jobWork creates jobs while things break, and pauses, resumes and advances them.
type jobWork struct {
	*jobAccount
	s       *storm
	stop    context.CancelFunc
	done    sync.WaitGroup
	pending api.NewJob // may have been created
	verbs   map[string]int
}

// work starts a job each second, through any node.
func (s *storm) work(seed uint64) *jobWork {
	ctx, stop := context.WithCancel(context.Background())
	w := &jobWork{jobAccount: newJobAccount(seed, s.Nodes, nil), s: s, stop: stop, verbs: map[string]int{}}
	w.pending = w.another()
	w.done.Go(func() {
		for ctx.Err() == nil {
			limited, cancel := context.WithTimeout(ctx, 5*time.Second)
			if _, err := w.try(limited, w.pending); err == nil {
				w.pending = w.another()
			}
			w.meddle(limited)
			cancel()
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	})
	s.t.Cleanup(w.end)
	return w
}

func (w *jobWork) end() {
	w.stop()
	w.done.Wait()
}

// another returns a job for some of the devices: at a rate, in stages, with a stop rule, with repeats, or without
// limits.
func (w *jobWork) another() api.NewJob {
	return w.next(func(j *api.NewJob) {
		for _, i := range w.random.Perm(len(w.s.ids))[:chaosTasks] {
			j.Devices = append(j.Devices, w.s.ids[i])
		}
		j.Action.Call.Timeout = "4s"
		if len(w.all)%6 == 5 {
			j.Stop, j.Pace.Concurrency = &api.JobStop{Failed: 2}, 5
		} else if change := w.variety(); change != nil {
			change(j)
		}
	})
}

// meddle does something to a job that was created, which its state may not permit.
func (w *jobWork) meddle(ctx context.Context) {
	for id := range w.open { // any
		verb := []string{"pause", "resume", "advance", "cancel"}[w.random.IntN(4)]
		if verb == "cancel" && w.random.IntN(4) != 0 {
			return // too many would leave little to do
		}
		if j, err := w.job(ctx, id); err != nil || j.State == "halted" && j.Spec.Stop != nil {
			return // its harm is counted
		}
		if _, err := w.nodes[w.random.IntN(len(w.nodes))].DoJob(ctx, id, verb); err == nil {
			w.verbs[verb]++
		}
		return
	}
}

// finished: every job ends once nothing is broken.
func (s *storm) finished() {
	s.jobs.insist(s.t, s.jobs.pending)
	s.eventually("every job has ended", func() string {
		if n := s.jobs.resume(s.t.Context()); n > 0 {
			return fmt.Sprintf("%d are open", n)
		}
		return ""
	})
	if open := s.jobs.openJobs(s.t); open != "" {
		s.t.Logf("open, and what they wait for: %s", open)
	}
}
