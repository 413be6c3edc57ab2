package records

import (
	"context"

	"fleetd/internal/store/database"
)

// ResealAttestationKey replaces the sealed form of a key, if it still equals old: a key that was
// imported meanwhile is kept.
func (s *Records) ResealAttestationKey(ctx context.Context, serial, old, sealed string) error {
	_, err := database.Change(ctx, s.host, s.db.Admin, "resealing an attestation key", `UPDATE attestation_keys SET sealed = $3 WHERE serial = $1 AND sealed = $2`, database.Clean(serial), old, sealed)
	return err
}
