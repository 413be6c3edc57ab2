package store

import (
	"context"
	"encoding/json"
	"fmt"

	"fleetd/internal/access"
	"fleetd/internal/store/database"
)

// PolicyVersion returns a version of the policy, the newest for 0; the zero Policy if there is
// none.
func (s *Store) PolicyVersion(ctx context.Context, version int64) (p access.Policy, err error) {
	document, found, err := database.One(ctx, s, "reading the policy", database.Scalar[string], `SELECT document FROM policies WHERE version = $1 OR $1 = 0 ORDER BY version DESC LIMIT 1`, version)
	if err != nil || !found {
		return p, err
	}
	if err := json.Unmarshal([]byte(document), &p); err != nil {
		return access.Policy{}, fmt.Errorf("the stored policy cannot be read: %w", err)
	}
	return p, nil
}

// PolicyVersions returns at most limit versions below before, newest first; 0 starts with the
// newest. For a version that cannot be parsed only the number is set.
func (s *Store) PolicyVersions(ctx context.Context, before int64, limit int) ([]access.Policy, error) {
	return database.Read(ctx, s, "listing the versions of the policy", func(scan func(...any) error) (p access.Policy, err error) {
		var document string
		var version int64
		if err = scan(&version, &document); err == nil {
			_ = json.Unmarshal([]byte(document), &p)
			p.Version = version
		}
		return p, err
	}, `SELECT version, document FROM policies WHERE version < $1 OR $1 = 0 ORDER BY version DESC LIMIT $2`, before, int64(limit))
}
