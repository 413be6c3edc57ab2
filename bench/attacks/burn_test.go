package attacks

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"fleetd/bench/load"
)

// burnPeriod is how long a burning thread computes and rests together.
const burnPeriod = 10 * time.Millisecond

// burn computes for a share of the processors, 1.5 is one and a half, until the process is killed.
func burn(text string) error {
	share, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return err
	}
	threads := math.Ceil(share)
	busy := time.Duration(share / threads * float64(burnPeriod))
	var all sync.WaitGroup
	for range int(threads) {
		all.Go(func() {
			for {
				begun := time.Now()
				for time.Since(begun) < busy {
				}
				time.Sleep(burnPeriod - busy)
			}
		})
	}
	all.Wait()
	return nil
}

// besideBurning returns the median p99 of calls, measured so many times, beside processes that merely compute: as much as an attack cost the node, at the
// priority of the node, and as much as it cost the attackers, at theirs.
func (s *stage) besideBurning(node, attackers float64, times int) time.Duration {
	s.Helper()
	self, err := os.Executable()
	if err != nil {
		s.Fatal(err)
	}
	ctx, stop := context.WithCancel(s.Context())
	var all sync.WaitGroup
	for _, part := range []struct {
		priority []string
		share    float64
	}{{ofNode, node}, {ofAttackers, attackers}} {
		if part.share <= 0 {
			continue
		}
		command := prioritized(part.priority, self)
		process := exec.CommandContext(ctx, command[0], command[1:]...)
		process.Env = append(os.Environ(), fmt.Sprintf("%s=%f", envBurn, part.share))
		if err := process.Start(); err != nil {
			s.Fatal(err)
		}
		all.Go(func() { _ = process.Wait() }) // it is killed
	}
	time.Sleep(warmUp)
	var p99s []time.Duration
	for range times {
		p99s = append(p99s, s.calls(window).P99)
	}
	stop()
	all.Wait()
	return median(p99s)
}

// usage is the time of processors that the node and this process, which is the attackers, have used.
type usage struct {
	node, attackers time.Duration
	at              time.Time
}

func (s *stage) usage() (u usage) {
	s.Helper()
	var err error
	if u.node, err = load.ProcessCPU(fmt.Sprint(s.node.Info.PID), false); err == nil {
		u.attackers, err = load.ProcessCPU("self", false)
	}
	if err != nil {
		s.Fatal(err)
	}
	u.at = time.Now()
	return u
}

// shares are the parts of a processor that node and attackers have used since an earlier usage.
func (u usage) shares(earlier usage) (node, attackers float64) {
	seconds := u.at.Sub(earlier.at).Seconds()
	return (u.node - earlier.node).Seconds() / seconds, (u.attackers - earlier.attackers).Seconds() / seconds
}
