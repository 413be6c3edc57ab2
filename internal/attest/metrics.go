package attest

import "fleetd/internal/counters"

// Metrics registers the metrics of proofs.
func (l *List) Metrics(r *counters.Registry) {
	counters.ByKey(r.Counter("attestation_proofs_total", "Activation requests of waiting devices: `admitted`, `none` (no proof in it), `unlisted`, `wrong`, `contested`, `stale` (challenge used or not this client's), `malformed`, `algorithm`, "+
		"`unavailable` (database), `busy` (32 are being judged), `unreadable` (imported under another secret), `revoked`, `not_bound`, `unknown`; [what they mean](../devices.md#chip-keys).", "outcome"), &l.Proofs)
}
