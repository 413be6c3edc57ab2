package jobs

import (
	"fmt"
	"strings"
	"time"

	"github.com/adhocore/gronx"
)

// Schedule is a cron expression of five fields in a timezone. Ticks are found on the wall
// clock: a tick that summer time skips comes at the next instant, one whose time comes twice
// comes once, at the first.
type Schedule struct {
	expression string
	zone       *time.Location
}

// ParseSchedule parses a cron expression; one without a tick within five years is an error.
func ParseSchedule(expression string, zone *time.Location, now time.Time) (Schedule, error) {
	segments, err := gronx.Segments(expression)
	if err != nil || len(segments) != 6 && len(segments) != 7 || !gronx.New().IsValid(expression) {
		return Schedule{}, fmt.Errorf("%q is not a cron expression; write five fields, minute hour day month weekday, such as 0 7 * * 1-5", expression)
	}
	if len(strings.FieldsFunc(expression, func(r rune) bool { return r == ' ' || r == '\t' })) != 5 {
		return Schedule{}, fmt.Errorf("%q must have five fields: minute hour day month weekday, such as 0 7 * * 1-5", expression)
	}
	s := Schedule{expression, zone}
	next, err := s.Next(now)
	if err != nil || next.Sub(now) > 5*366*24*time.Hour {
		return Schedule{}, fmt.Errorf("%q never fires within five years", expression)
	}
	return s, nil
}

// Next returns the first tick after t.
func (s Schedule) Next(t time.Time) (time.Time, error) {
	wall := onWall(t, s.zone)
	for {
		next, err := gronx.NextTickAfter(s.expression, wall, false)
		if err != nil {
			return time.Time{}, err
		}
		if at := instantOf(next, s.zone); at.After(t) {
			return at, nil
		}
		wall = next // the time came a second time
	}
}

// Last returns the last tick at or before t.
func (s Schedule) Last(t time.Time) (time.Time, error) {
	wall := onWall(t, s.zone).Truncate(time.Minute)
	// After the clock was set back, readings that are later than this one were there before it.
	if from, _ := t.In(s.zone).ZoneBounds(); !from.IsZero() {
		if shown := onWall(from.Add(-time.Minute), s.zone).Truncate(time.Minute); shown.After(wall) {
			wall = shown
		}
	}
	for inclusive := true; ; inclusive = false {
		last, err := gronx.PrevTickBefore(s.expression, wall, inclusive)
		if err != nil {
			return time.Time{}, err
		}
		if at := instantOf(last, s.zone); !at.After(t) {
			return at, nil
		}
		wall = last
	}
}

// count returns how many ticks there are from the tick first to an instant, at most limit.
func (s Schedule) count(first, until time.Time, limit int64) (n int64) {
	for at := first; !at.After(until) && n < limit; n++ {
		next, err := s.Next(at)
		if err != nil {
			return n + 1
		}
		at = next
	}
	return n
}

// onWall returns the reading of a wall clock, as a time in UTC.
func onWall(t time.Time, zone *time.Location) time.Time {
	t = t.In(zone)
	return time.Date(t.Year(), t.Month(), t.Day(), t.Hour(), t.Minute(), t.Second(), t.Nanosecond(), time.UTC)
}

// instantOf returns when a wall clock first has this reading, or, if it never has, the moment
// at which it is set forward past it.
func instantOf(wall time.Time, zone *time.Location) time.Time {
	t := time.Date(wall.Year(), wall.Month(), wall.Day(), wall.Hour(), wall.Minute(), 0, 0, zone)
	from, to := t.ZoneBounds()
	switch shown := onWall(t, zone); {
	case shown.After(wall):
		return from
	case shown.Before(wall):
		return to
	}
	if from.IsZero() {
		return t
	}
	_, offset := t.Zone()
	_, before := from.Add(-time.Nanosecond).Zone()
	if first := t.Add(time.Duration(offset-before) * time.Second); first.Before(from) {
		return first
	}
	return t
}

// Window is a time that repeats, inside which tasks may begin.
type Window struct {
	starts Schedule
	lasts  time.Duration
}

// Open reports whether the window is open at t; next is when it opens again, if it is not.
func (w Window) Open(t time.Time) (open bool, next time.Time) {
	if last, err := w.starts.Last(t); err == nil && t.Before(last.Add(w.lasts)) {
		return true, time.Time{}
	}
	next, _ = w.starts.Next(t) // ParseSchedule has found one
	return false, next
}
