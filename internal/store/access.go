package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"fleetd/internal/access"
	"fleetd/internal/store/database"
)

// PolicyVersion returns a version of the policy, the newest for 0; the zero Policy if there is
// none.
func (s *Store) PolicyVersion(ctx context.Context, version int64) (p access.Policy, err error) {
	ctx, cancel, err := s.BeginRead(ctx)
	if err != nil {
		return p, err
	}
	defer cancel()
	var document string
	err = s.backend.Read.QueryRowContext(ctx, `SELECT document FROM policies WHERE version = $1 OR $1 = 0 ORDER BY version DESC LIMIT 1`, version).Scan(&document)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return p, nil
	case err != nil:
		return p, s.UseError(ctx, "reading the policy", err)
	}
	if err := json.Unmarshal([]byte(document), &p); err != nil {
		return access.Policy{}, fmt.Errorf("the stored policy cannot be read: %w", err)
	}
	return p, nil
}

// PolicyVersions returns at most limit versions below before, newest first; 0 starts with the
// newest. For a version that cannot be parsed only the number is set.
func (s *Store) PolicyVersions(ctx context.Context, before int64, limit int) ([]access.Policy, error) {
	ctx, cancel, err := s.BeginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	versions, err := database.Collect(ctx, s.backend.Read, func(scan func(...any) error) (p access.Policy, err error) {
		var document string
		var version int64
		if err = scan(&version, &document); err == nil {
			_ = json.Unmarshal([]byte(document), &p)
			p.Version = version
		}
		return p, err
	}, `SELECT version, document FROM policies WHERE version < $1 OR $1 = 0 ORDER BY version DESC LIMIT $2`, before, int64(limit))
	if err != nil {
		return nil, s.UseError(ctx, "listing the versions of the policy", err)
	}
	return versions, nil
}
