package attacks

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Bounds of a run. None of them is tight: a slow machine must not fail, a caller that gets nothing and what is never given back must.
const (
	// maxMemory is how much resident memory the node may have above what it had before the first attack.
	maxMemory = 512 << 20
	// maxHeap is how much heap may be in use after a collection, above idle, once an attack is over, beside what the
	// node may keep of catalogs and records.
	maxHeap = 64<<20 + catalogMemory + recorderMemory
	// maxP99 is how long a call of another device may take while others attack. An attack that has the processor
	// for itself makes it seconds.
	maxP99 = time.Second
	// settleLimit is how long after an attack goroutines, files and memory may stay: longer than the longest deadline of
	// what an attacker has left open, 30 s for an answer that nobody reads.
	settleLimit = time.Minute
	// slackGoroutines and slackFiles come and go by themselves: connections of the callers, the database's, a collection of metrics.
	slackGoroutines, slackFiles = 40, 30
	// window is how long calls are measured at once, before and during an attack.
	window = 3 * time.Second
	// warmUp is how long an attack goes on before it is measured.
	warmUp = time.Second
)

// attack is something that a client does to a node.
type attack struct {
	name    string
	limited string // which settings and limits it meets
	run     func(a *attacker)
}

// result is a row of the table.
type result struct {
	name, limited  string
	before, during time.Duration // median p99 of other calls
	burned         time.Duration // the same beside processes that only compute as much
	nodeCPU        float64       // share of its processor
	memory         int64         // most that was resident, bytes
	heap           int64         // in use after a collection when the attack is over, bytes above idle
	outcomes       string
}

// TestAttacks runs one attack after the other on a node whose devices are called at a steady rate, and checks that
// these calls do not fail, and that nothing is left of the attack afterwards. ATTACK_TIME is how long all attacks take
// together, ATTACK selects some by name.
func TestAttacks(t *testing.T) {
	if testing.Short() {
		t.Skip("IN VERIFY: takes minutes")
	}
	total := 3 * time.Minute
	if text := os.Getenv("ATTACK_TIME"); text != "" {
		var err error
		if total, err = time.ParseDuration(text); err != nil {
			t.Fatalf("ATTACK_TIME: %v", err)
		}
	}
	chosen := func(kind attack) bool {
		names := os.Getenv("ATTACK")
		return names == "" || slices.Contains(strings.Split(names, ","), kind.name)
	}
	count := 0
	for _, list := range [][]attack{attacks, tlsAttacks} {
		for _, kind := range list {
			if chosen(kind) {
				count++
			}
		}
	}
	if count == 0 {
		t.Fatalf("ATTACK=%s names no attack", os.Getenv("ATTACK"))
	}
	each := max(total/time.Duration(count), window+warmUp)
	var table []result
	for _, list := range [][]attack{attacks, tlsAttacks} {
		list = slices.DeleteFunc(slices.Clone(list), func(kind attack) bool { return !chosen(kind) })
		if len(list) == 0 {
			continue
		}
		t.Run(list[0].name, func(t *testing.T) {
			s := newStage(t, list[0].name == tlsAttacks[0].name)
			for _, kind := range list {
				table = append(table, s.measure(kind, each))
			}
			s.checkDevices()
		})
	}
	t.Log("\n" + markdown(table))
}

// measure runs one attack.
func (s *stage) measure(kind attack, duration time.Duration) result {
	s.Helper()
	r := result{name: kind.name, limited: kind.limited}
	quiet := s.usage()
	r.before = s.calls(window).P99
	quietNode, _ := s.usage().shares(quiet)
	ctx, stop := context.WithTimeout(s.Context(), duration+settleLimit)
	defer stop()
	a := &attacker{stage: s, ctx: ctx, outcomes: map[string]int{}}
	var running sync.WaitGroup
	running.Go(func() { kind.run(a) })
	begun := time.Now()
	time.Sleep(warmUp)
	saved := s.profile(kind.name)
	measured := s.usage()
	var p99s []time.Duration
	for len(p99s) == 0 || time.Since(begun) < duration-window/2 {
		c := s.calls(window)
		p99s = append(p99s, c.P99)
		if c.Failed > 0 {
			s.Errorf("%s: %d of %d other calls failed: %s", kind.name, c.Failed, c.Calls, c.Failure)
		}
		r.memory = max(r.memory, s.resident())
	}
	var attackers float64
	r.nodeCPU, attackers = s.usage().shares(measured)
	saved()
	stop()
	running.Wait()
	r.during, r.outcomes = median(p99s), a.summary()
	if r.during > maxP99 {
		s.Errorf("%s: the p99 of other calls is %v, at most %v are allowed", kind.name, r.during, maxP99)
	}
	if above := r.memory - s.idle.resident; above > maxMemory {
		s.Errorf("%s: the node has %d MiB more than idle, at most %d are allowed", kind.name, above>>20, maxMemory>>20)
	}
	s.revoke()
	r.heap = s.settle(kind.name)
	// Memory and caches of the node are as the attack left them; what is compared is before and during it.
	r.before = median([]time.Duration{r.before, s.calls(window).P99})
	r.burned = s.besideBurning(r.nodeCPU-quietNode, attackers, len(p99s))
	s.Logf("%-16s p99 %7.2f -> %7.2f ms (x%.1f; x%.1f of %.2f ms beside as much computing), node %3.0f %%, %d MiB resident, %+d MiB of heap left; %s", r.name, ms(r.before), ms(r.during), ratio(r.during, r.before),
		ratio(r.during, r.burned), ms(r.burned), 100*r.nodeCPU, r.memory>>20, r.heap>>20, r.outcomes)
	return r
}

// settle waits until nothing of an attack is left. The heap that is in use then is above idle by so many bytes.
func (s *stage) settle(name string) (heap int64) {
	s.Helper()
	deadline := time.Now().Add(settleLimit)
	for {
		now := s.held()
		if now.goroutines <= s.idle.goroutines+slackGoroutines && now.files <= s.idle.files+slackFiles {
			if now.heap = s.heap(); now.heap <= s.idle.heap+maxHeap {
				return now.heap - s.idle.heap
			}
		}
		if time.Now().After(deadline) {
			s.Errorf("%s: %v after its end the node has %d goroutines, %d files and %d MiB of heap in use; before it had %d, %d and %d", name, settleLimit,
				now.goroutines, now.files, now.heap>>20, s.idle.goroutines, s.idle.files, s.idle.heap>>20)
			s.save(name+"-goroutines", "/debug/pprof/goroutine?debug=1")
			s.save(name+"-heap", "/debug/pprof/heap")
			return now.heap - s.idle.heap
		}
		time.Sleep(time.Second)
	}
}

func median(list []time.Duration) time.Duration {
	list = slices.Sorted(slices.Values(list))
	return (list[(len(list)-1)/2] + list[len(list)/2]) / 2
}

func ratio(a, b time.Duration) float64 { return float64(a) / float64(max(b, 1)) }

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// markdown is the table of docs/benchmarks.md.
func markdown(table []result) string {
	var b strings.Builder
	b.WriteString("| attack | p99 before, ms | during | ratio | beside as much computing | ratio | CPU of the node | most resident, MiB | heap afterwards, MiB above idle | limited by |\n|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range table {
		fmt.Fprintf(&b, "| %s | %.2f | %.2f | %.1f | %.2f | %.1f | %.0f %% | %d | %d | %s |\n", r.name, ms(r.before), ms(r.during), ratio(r.during, r.before), ms(r.burned), ratio(r.during, r.burned), 100*r.nodeCPU, r.memory>>20, r.heap>>20, r.limited)
	}
	return b.String()
}

// attacker is one attack at work. Its methods are safe for concurrent use.
type attacker struct {
	*stage
	ctx context.Context // ends with the attack

	mu       sync.Mutex
	outcomes map[string]int
}

// workers repeat something until the attack ends; do returns what came of it.
func (a *attacker) workers(n int, do func(worker, round int) (outcome string)) {
	var all sync.WaitGroup
	for w := range n {
		all.Go(func() {
			for round := 0; a.ctx.Err() == nil; round++ {
				outcome := do(w, round)
				if a.ctx.Err() == nil {
					a.note(outcome)
				}
			}
		})
	}
	all.Wait()
}

func (a *attacker) note(outcome string) {
	a.mu.Lock()
	a.outcomes[outcome]++
	a.mu.Unlock()
}

// pause waits, or until the attack ends.
func (a *attacker) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-a.ctx.Done():
	}
}

// summary is what came of the attack, the most frequent first.
func (a *attacker) summary() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	type line struct {
		text string
		n    int
	}
	var lines []line
	for text, n := range a.outcomes {
		lines = append(lines, line{text, n})
	}
	slices.SortFunc(lines, func(x, y line) int { return cmp.Or(cmp.Compare(y.n, x.n), cmp.Compare(x.text, y.text)) })
	var parts []string
	for _, l := range lines[:min(5, len(lines))] {
		parts = append(parts, fmt.Sprintf("%d %s", l.n, l.text))
	}
	return strings.Join(parts, ", ")
}

// profileDir is where profiles of the node are kept; empty: none are made.
var profileDir = os.Getenv("ATTACK_PROFILE")

// profile begins to save a CPU profile of the node, and returns a function that waits for it.
func (s *stage) profile(name string) (wait func()) {
	if profileDir == "" {
		return func() {}
	}
	var saved sync.WaitGroup
	saved.Go(func() {
		s.save(name+".pprof", fmt.Sprintf("/debug/pprof/profile?seconds=%d", int(window.Seconds())))
	})
	return saved.Wait
}

// save keeps what the node answers as a file of profileDir.
func (s *stage) save(name, path string) {
	if profileDir == "" {
		return
	}
	if err := os.WriteFile(filepath.Join(profileDir, name), s.get(path), 0o600); err != nil {
		s.Error(err)
	}
}
