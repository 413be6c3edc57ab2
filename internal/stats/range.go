package stats

import (
	"errors"
	"fmt"
	"time"
)

const (
	// MaxPoints is how many points a series of an answer may have.
	MaxPoints = 1500
	// usualPoints is at most how many points an answer has if its query has no step.
	usualPoints = 300
	// clockSlack is how much longer than FineSpan a query may go back with steps that are not multiples of Coarse: the
	// clock of its client may be another one.
	clockSlack = time.Minute
)

// Mistakes in a query.
var (
	errOrder  = errors.New("since must be before until, and in the past")
	errOld    = errors.New("until is more than 7 days ago; samples are kept for 7 days")
	errStep   = errors.New("step must be a multiple of 10s; of 5m if since is more than 24 hours ago")
	errPoints = fmt.Errorf("the answer would have more than %d points; use a larger step or a shorter time", MaxPoints)
)

// Range is a time with a step. Both are whole multiples of Interval; of Coarse if it begins more than FineSpan ago.
type Range struct {
	From  int64 `json:"from"` // seconds since 1970, a multiple of Step
	Step  int64 `json:"step"` // seconds
	Steps int   `json:"steps"`
}

// Since is the beginning of the range.
func (q Range) Since() time.Time { return time.Unix(q.From, 0).UTC() }

// Until is the end of the range.
func (q Range) Until() time.Time { return time.Unix(q.From+q.Step*int64(q.Steps), 0).UTC() }

// usualSteps are those of queries without one.
var usualSteps = []time.Duration{Interval, 30 * time.Second, time.Minute, 2 * time.Minute, Coarse, 10 * time.Minute, 30 * time.Minute, time.Hour}

// NewRange returns the range of a query, from the step in which since is to that in which until is, at most Span back;
// a zero step is chosen. The error names what is wrong in the query.
func NewRange(since, until, now time.Time, step time.Duration) (Range, error) {
	if until.After(now) {
		until = now
	}
	if !since.Before(until) {
		return Range{}, errOrder
	}
	if first := now.Add(-Span); since.Before(first) {
		if since = first; !since.Before(until) {
			return Range{}, errOld
		}
	}
	unit := Interval
	if since.Before(now.Add(-FineSpan - clockSlack)) {
		unit = Coarse
	}
	for i := 0; step == 0 && i < len(usualSteps); i++ {
		if s := usualSteps[i]; s >= unit && until.Sub(since) <= usualPoints*s {
			step = s
		}
	}
	if step < unit || step%unit != 0 {
		return Range{}, errStep
	}
	seconds := int64(step / time.Second)
	q := Range{From: since.Unix() / seconds * seconds, Step: seconds}
	if points := (until.Sub(q.Since()) + step - 1) / step; points > MaxPoints {
		return Range{}, errPoints
	} else {
		q.Steps = max(int(points), 1)
	}
	return q, nil
}

// isCoarse reports whether the range takes the samples of Coarse.
func (q Range) isCoarse(now time.Time) bool {
	coarse := int64(Coarse / time.Second)
	return q.Step%coarse == 0 && q.From < now.Add(-FineSpan).Unix()
}

// valid checks a range of another node.
func (q Range) valid() error {
	if q.Step < int64(Interval/time.Second) || q.Step > int64(Span/time.Second) || q.From < 0 || q.Steps < 1 || q.Steps > MaxPoints {
		return fmt.Errorf("the range %+v is not valid", q)
	}
	return nil
}
