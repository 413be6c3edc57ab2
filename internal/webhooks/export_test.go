package webhooks

import (
	"testing"
	"time"
)

// Lease is how long a lease of a test lasts.
const Lease = time.Hour

// Quicken shortens the intervals of a test, before its managers start: an hour of failures is some hundred attempts.
// It lengthens the times within which a process or a receiver must act, because a busy machine may stop both for
// seconds.
func Quicken() {
	turnEvery, scanEvery, saveEvery = 50*time.Millisecond, 50*time.Millisecond, 50*time.Millisecond
	retryFirst, retryMost, followPause = 2*time.Millisecond, 20*time.Millisecond, 20*time.Millisecond
	leaseLasts, sendTimeout, stopTime, recordPause = Lease, time.Hour, time.Minute, 10*time.Millisecond
}

// Turn is the interval of the turns of a manager.
func Turn() time.Duration { return turnEvery }

// RetryAsEver sets the pauses after failures to those of a node until the test ends.
func RetryAsEver(t *testing.T) {
	first, most := retryFirst, retryMost
	retryFirst, retryMost = 10*time.Millisecond, time.Minute
	t.Cleanup(func() { retryFirst, retryMost = first, most })
}

// Kill ends the work of a manager as a killed process does: nothing is written, and its leases stay.
func (m *Manager) Kill(store interface{ Cut() }) {
	store.Cut()
	m.Close()
}

// SignatureOf is the signature that a receiver computes.
var SignatureOf = sign
