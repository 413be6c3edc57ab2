// Package clock has the node's wall clock, which people, NTP and boards without a clock chip step at any time.
//
// What is stored, sent to other processes or shown to people is a time of Now. A duration follows no wall clock: it is the
// difference of two times of time.Now, which have the monotonic reading, or of two numbers of Reading.
package clock

import (
	"context"
	"fmt"
	"iter"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"fleetd/internal/timescale"
)

// start is long before this process, so that a reading is above zero, also of the times of tests.
var start = time.Now().Add(-100 * 365 * 24 * time.Hour)

// step is by how many nanoseconds the clock of this node is wrong, in programs that tests build.
var step atomic.Int64

// Now returns the time of the wall clock, in UTC and without a monotonic reading.
func Now() time.Time { return time.Now().Add(time.Duration(step.Load())).Round(0).UTC() }

// Reading returns a time that time.Now returned as nanoseconds of the monotonic clock, for atomic variables and compact
// structures. It is above zero.
func Reading(t time.Time) int64 { return int64(t.Sub(start)) }

// Sleep waits. It reports false if ctx ended first.
func Sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// Ticks yields the times of a ticker until ctx ends.
func Ticks(ctx context.Context, d time.Duration) iter.Seq[time.Time] {
	return func(yield func(time.Time) bool) {
		ticker := time.NewTicker(d)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-ticker.C:
				if !yield(now) {
					return
				}
			}
		}
	}
}

// Micros returns a time as it is stored: in microseconds since 1970; 0 is the zero time.
func Micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// Instant is the inverse of Micros, in UTC.
func Instant(micros int64) time.Time {
	if micros == 0 {
		return time.Time{}
	}
	return time.UnixMicro(micros).UTC()
}

// Variables of programs that tests build: the error of the node's clock, such as -2.5s, and a file with it, which is read
// again and again.
const (
	StepVariable = "FLEETD_TEST_CLOCK"
	FileVariable = "FLEETD_TEST_CLOCK_FILE"
	readEvery    = 20 * time.Millisecond
)

func init() {
	if !timescale.IsTested() {
		return
	}
	set(os.Getenv(StepVariable))
	if file := os.Getenv(FileVariable); file != "" {
		go func() {
			for ; ; time.Sleep(readEvery) {
				if text, err := os.ReadFile(file); err == nil {
					set(strings.TrimSpace(string(text)))
				}
			}
		}()
	}
}

func set(text string) {
	if text == "" {
		return
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", StepVariable, err))
	}
	step.Store(int64(d))
}
