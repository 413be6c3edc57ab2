//go:build !timescale

// Package timescale shortens the intervals at which the nodes of a fleet monitor each other (leases, beats,
// pings), for tests of whole programs. All intervals are scaled by one factor, which keeps their proportions.
// Only programs built with the tag timescale read the factor.
package timescale

import "time"

// Of returns the interval unchanged.
func Of(d time.Duration) time.Duration { return d }

// Patience returns the time unchanged.
func Patience(d time.Duration) time.Duration { return d }

// Now returns the current time.
func Now() time.Time { return time.Now() }
