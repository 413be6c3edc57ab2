package connlimit

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"fleetd/internal/clock"
)

// What one caller may have the node do that needs no device, in units of work: a request is
// one, and each WorkBytes of its answer another.
const (
	WorkRate  = 200 // units a second
	WorkBurst = 1_000
	WorkBytes = 16 << 10
	// BodyWork is how many bytes of a body that is read as JSON count as one unit, and unknownBody
	// what one counts whose length is not announced.
	BodyWork    = 4 << 10
	unknownBody = 4
	// maxAnswer is the most that one answer counts, so that it alone has nobody refused.
	maxAnswer = 4 * WorkRate
	// WorkWait is the longest that a request waits; it is refused if it would wait longer.
	WorkWait = 5 * time.Second
	// refusalDelay is how long a refusal waits at least; at most twice as long. A caller that repeats it at once
	// would have the node refuse thousands a second, and requests that came together must not end together.
	refusalDelay = time.Second
	// maxWorkers are the callers remembered; beyond them those that rest are forgotten.
	maxWorkers = 1_000
)

// ErrTooMuchWork refuses a request whose caller has asked for more than it may, or that found no place to compute in time.
var ErrTooMuchWork = errors.New("too many requests of one caller, or of all callers together; try again later")

// Work bounds what each caller has the node do, so that none of them takes its processors
// from all others. It is safe for concurrent use.
type Work struct {
	rate  rate.Limit
	burst int
	wait  time.Duration
	// refusal is refusalDelay, but in tests.
	refusal time.Duration

	// Computing are the places of all slots, and of other work that computes for long.
	Computing Places

	mu      sync.Mutex
	callers map[string]worker

	// Waited counts requests that had to wait for their rate or a slot, Refused those that would have
	// waited too long.
	Waited, Refused atomic.Uint64
	// Streams counts those that were refused because their caller has as many as it may.
	Streams atomic.Uint64
}

// worker is a caller: its rate, and what of it computes now.
type worker struct {
	*rate.Limiter
	places Places
}

// NewWork returns Work with the limits above.
func NewWork() *Work {
	return &Work{rate: WorkRate, burst: WorkBurst, wait: WorkWait, refusal: refusalDelay, Computing: make(Places, max(2, runtime.GOMAXPROCS(0)/computingShare)), callers: map[string]worker{}}
}

// Begin returns when the caller may have a request worked on, or with ErrTooMuchWork or
// the error of ctx. A nil *Work bounds nothing.
func (w *Work) Begin(ctx context.Context, caller string) error {
	return w.BeginUnits(ctx, caller, 1)
}

// BeginUnits is Begin for a request of so many units, at most maxAnswer.
func (w *Work) BeginUnits(ctx context.Context, caller string, units int64) error {
	if w == nil || units <= 0 {
		return nil
	}
	place := w.of(caller).ReserveN(time.Now(), int(min(units, maxAnswer)))
	wait := place.Delay()
	switch {
	case wait == 0:
		return nil
	case wait > w.wait:
		place.Cancel()
		w.Refused.Add(1)
		return pause(ctx, w.refusal+time.Duration(rand.Float64()*float64(w.refusal)), ErrTooMuchWork)
	}
	w.Waited.Add(1)
	if err := pause(ctx, wait, nil); err != nil {
		place.Cancel()
		return err
	}
	return nil
}

// pause returns err after a while, or the error of ctx.
func pause(ctx context.Context, d time.Duration, err error) error {
	if !clock.Sleep(ctx, d) {
		return ctx.Err()
	}
	return err
}

// Charge adds the work of an answer of so many bytes.
func (w *Work) Charge(caller string, bytes int64) {
	if units := bytes / WorkBytes; w != nil && units > 0 {
		w.of(caller).ReserveN(time.Now(), int(min(units, maxAnswer)))
	}
}

// WorkOfBody is how much work it is to read the body of a request, of which at most so many
// bytes are read: nothing for one of usual size.
func WorkOfBody(r *http.Request, most int64) int64 {
	if r.ContentLength < 0 {
		return unknownBody
	}
	return min(r.ContentLength, most) / BodyWork
}

func (w *Work) of(caller string) worker {
	w.mu.Lock()
	defer w.mu.Unlock()
	l, known := w.callers[caller]
	if !known {
		if len(w.callers) >= maxWorkers {
			for name, other := range w.callers {
				if other.Tokens() >= float64(w.burst) && len(other.places) == 0 {
					delete(w.callers, name)
				}
			}
		}
		l = worker{rate.NewLimiter(w.rate, w.burst), make(Places, slotsOfCaller())}
		w.callers[caller] = l
	}
	return l
}
