package records

import (
	"context"

	"fleetd/internal/store/database"
)

// ResealAttestationKey replaces how a key is sealed, if it still is as old says: a key
// that was imported meanwhile stays.
func (s *Records) ResealAttestationKey(ctx context.Context, serial, old, sealed string) error {
	ctx, cancel, err := s.host.Reading(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	if _, err := s.db.Admin.ExecContext(ctx, `UPDATE attestation_keys SET sealed = $3 WHERE serial = $1 AND sealed = $2`, database.Clean(serial), old, sealed); err != nil {
		return s.host.UseError(ctx, "sealing an attestation key anew", err)
	}
	return nil
}
