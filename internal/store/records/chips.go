package records

import (
	"context"

	"fleetd/internal/store/database"
)

// ResealAttestationKey replaces the sealed form of a key, if it still equals old: a key that was
// imported meanwhile is kept.
func (s *Records) ResealAttestationKey(ctx context.Context, serial, old, sealed string) error {
	ctx, cancel, err := s.host.BeginRead(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	if _, err := s.db.Admin.ExecContext(ctx, `UPDATE attestation_keys SET sealed = $3 WHERE serial = $1 AND sealed = $2`, database.Clean(serial), old, sealed); err != nil {
		return s.host.UseError(ctx, "resealing an attestation key", err)
	}
	return nil
}
