package fleettest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/apiclient"
)

// Load calls tools of random devices through random nodes and keeps account.
type Load struct {
	cluster *Cluster
	ids     []string
	opt     LoadOptions
	stop    context.CancelFunc
	callers sync.WaitGroup

	mu       sync.Mutex
	random   *rand.Rand
	issued   map[string]int // calls by device, whatever became of them
	answered map[string]int // of those that succeeded
	outcomes map[string]int // by code, "ok", or "api" if a node's API did not answer
	slow     []string       // calls that did not end by their deadline
	wrong    []string       // answers that make no sense
	unfair   []*span        // when a node did not run, by number
}

// span is a time in which a node did not run.
type span struct {
	node     int
	from, to time.Time // to is zero while it lasts
}

// slack is what a call may take beyond its deadline: on the machine that runs
// the tests everything else runs too.
const slack = 3 * time.Second

// LoadOptions say how hard a Load calls.
type LoadOptions struct {
	Seed     uint64
	Callers  int
	Pause    time.Duration // of each caller between two calls
	Timeout  time.Duration // of each call
	Patience time.Duration // 0: the timeout and a little more; a call that takes longer counts as slow
}

// StartLoad starts the callers.
func (c *Cluster) StartLoad(t testing.TB, ids []string, o LoadOptions) *Load {
	ctx, stop := context.WithCancel(context.Background())
	if o.Patience == 0 {
		o.Patience = o.Timeout + slack
	}
	l := &Load{cluster: c, ids: ids, opt: o, stop: stop, random: rand.New(rand.NewPCG(o.Seed, 2)),
		issued: map[string]int{}, answered: map[string]int{}, outcomes: map[string]int{}}
	for range o.Callers {
		l.callers.Go(func() {
			for ctx.Err() == nil {
				l.call(ctx, t)
				select {
				case <-ctx.Done():
				case <-time.After(o.Pause):
				}
			}
		})
	}
	t.Cleanup(l.Stop)
	return l
}

// Stop ends the callers, and waits for their calls.
func (l *Load) Stop() {
	l.stop()
	l.callers.Wait()
}

func (l *Load) call(ctx context.Context, t testing.TB) {
	l.mu.Lock()
	id, via := l.ids[l.random.IntN(len(l.ids))], l.random.IntN(len(l.cluster.Nodes))
	if l.runs(via, time.Now()) {
		l.issued[id]++
	} else { // as a load balancer would, ask another
		l.mu.Unlock()
		return
	}
	l.mu.Unlock()
	begun := time.Now()
	// The context of the call is not the callers': what has begun is waited for.
	inTime, cancel := context.WithTimeout(context.Background(), l.opt.Timeout+30*time.Second)
	defer cancel()
	r, err := l.cluster.Nodes[via].Call(inTime, id, volume, apiclient.CallRequest{Arguments: []byte(`{"volume":9}`), Timeout: l.opt.Timeout})
	took := time.Since(begun)
	l.mu.Lock()
	defer l.mu.Unlock()
	outcome := problemCode(err)
	var problem *apiclient.Problem
	switch {
	case err == nil && !r.IsError && strings.HasPrefix(r.Node, "node-"):
		outcome = "ok"
		l.answered[id]++
	case err == nil:
		outcome = "wrong"
		l.wrong = append(l.wrong, fmt.Sprintf("%s via node-%d: %+v", id, via, r))
	case !errors.As(err, &problem):
		outcome = "api"
		if l.ran(via, begun, begun.Add(took)) {
			l.wrong = append(l.wrong, fmt.Sprintf("%s via node-%d, which ran: %v", id, via, err))
		}
	}
	l.outcomes[outcome]++
	if took > l.opt.Patience && l.ran(via, begun, begun.Add(took)) {
		l.slow = append(l.slow, fmt.Sprintf("%s via node-%d took %v: %s", id, via, took.Round(time.Millisecond), outcome))
	}
}

// count adds a call that somebody else made to the account.
func (l *Load) count(id string, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.issued[id]++
	if ok {
		l.answered[id]++
	}
}

// Down notes that a node does not run from now on, until up is called.
func (l *Load) Down(node int) (up func()) {
	span := &span{node: node, from: time.Now()}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unfair = append(l.unfair, span)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		span.to = time.Now()
	}
}

func (l *Load) runs(node int, at time.Time) bool { return l.ran(node, at, at) }

// ran reports whether the node ran from one time to another. The caller holds
// the lock.
func (l *Load) ran(node int, from, to time.Time) bool {
	return !slices.ContainsFunc(l.unfair, func(s *span) bool {
		return s.node == node && s.from.Before(to) && (s.to.IsZero() || s.to.After(from))
	})
}

// Outcomes counts the calls by what became of them.
func (l *Load) Outcomes() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.outcomes)
}

// problemCode is the code of a problem object, or the text of another error.
func problemCode(err error) string {
	if p, ok := errors.AsType[*apiclient.Problem](err); ok {
		return p.Code
	}
	return fmt.Sprint(err)
}
