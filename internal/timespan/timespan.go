// Package timespan parses and formats durations as people write them: a Go duration with optional days before
// it, such as 90s, 2h30m, 7d or 1d12h.
package timespan

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

const day = 24 * time.Hour

// maxDays avoids overflows.
const maxDays = 36500

// Parse parses a duration. A day has 24 hours. Negative durations have no days.
func Parse(text string) (time.Duration, error) {
	days, rest, found := strings.Cut(text, "d")
	if !found {
		return time.ParseDuration(text)
	}
	n, err := strconv.ParseUint(days, 10, 16)
	if err != nil || n > maxDays {
		return 0, fmt.Errorf("%q is not a duration such as 7d or 1d12h", text)
	}
	sum := time.Duration(n) * day
	if rest == "" {
		return sum, nil
	}
	d, err := time.ParseDuration(rest)
	if err != nil || d < 0 || d > maxDays*day {
		return 0, fmt.Errorf("%q is not a duration such as 7d or 1d12h", text)
	}
	return sum + d, nil
}

// Format formats a duration for [Parse], without units that are zero: 7d, 1d12h, 90s.
func Format(d time.Duration) string {
	days, rest := d/day, d%day
	text := rest.String()
	if short, ok := strings.CutSuffix(text, "m0s"); ok {
		text = short + "m"
	}
	if short, ok := strings.CutSuffix(text, "h0m"); ok {
		text = short + "h"
	}
	switch {
	case days == 0:
		return text
	case rest == 0:
		text = ""
	}
	return strconv.FormatInt(int64(days), 10) + "d" + text
}

// Moment parses a time: RFC 3339, or a duration before now, such as 1h or 7d. Empty text is the zero time. name is that of the
// parameter, for the error.
func Moment(name, text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at, nil
	}
	if d, err := Parse(text); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	return time.Time{}, fmt.Errorf("%s must be a time such as 2026-03-01T12:00:00Z, or a duration before now such as 1h or 7d", name)
}
