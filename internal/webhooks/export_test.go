package webhooks

import "time"

// Quicken shortens the intervals of a test, before its managers start: an hour of failures is some hundred attempts.
// A lease lasts long enough for a busy machine to renew it: otherwise another process delivers meanwhile, again.
func Quicken() {
	turnEvery, leaseLasts, scanEvery, saveEvery = 50*time.Millisecond, 3*time.Second, 50*time.Millisecond, 50*time.Millisecond
	retryFirst, retryMost, followPause = 2*time.Millisecond, 20*time.Millisecond, 20*time.Millisecond
}

// Kill ends the work of a manager as a killed process does: nothing is written, and its leases stay.
func (m *Manager) Kill(store interface{ Cut() }) {
	store.Cut()
	m.Close()
}

// SignatureOf is the signature that a receiver computes.
var SignatureOf = sign
