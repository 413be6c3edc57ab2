//go:build !timescale

// Package timescale shortens the intervals by which the nodes of a fleet watch
// each other (leases, beats, pings), so that tests of whole programs need not
// wait for them. All of them shrink by one factor, so that their order stays.
// Only programs built with the tag timescale read a factor.
package timescale

import "time"

// Of returns the interval unchanged.
func Of(d time.Duration) time.Duration { return d }

// Patience returns the time unchanged.
func Patience(d time.Duration) time.Duration { return d }

// Now is the time.
func Now() time.Time { return time.Now() }
