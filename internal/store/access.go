package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// LoadKeys returns all keys. One that cannot be read is logged and left out: it
// opens nothing then.
func (s *Store) LoadKeys(ctx context.Context) ([]access.Key, error) {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	keys, err := database.Collect(ctx, s.backend.Read, func(scan func(...any) error) (k access.Key, err error) {
		var document string
		var revoked int64
		if err = scan(&document, &revoked); err != nil {
			return k, err
		}
		if fault := json.Unmarshal([]byte(document), &k); fault != nil {
			s.log.Error("a stored API key cannot be read", "error", fault)
			return access.Key{}, nil
		}
		k.Revoked = database.Instant(revoked)
		return k, nil
	}, `SELECT document, revoked_at FROM api_keys ORDER BY id`)
	if err != nil {
		return nil, s.useError(ctx, "reading the API keys", err)
	}
	readable := keys[:0]
	for _, k := range keys {
		if k.ID != "" {
			readable = append(readable, k)
		}
	}
	return readable, nil
}

// SaveKey writes a new key, or the end of a stored one: the first end counts.
func (s *Store) SaveKey(ctx context.Context, k access.Key) error {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	revoked := database.Micros(k.Revoked)
	document, err := json.Marshal(k)
	if err != nil {
		return fmt.Errorf("encode key %s: %w", k.ID, err)
	}
	_, err = s.backend.Write.ExecContext(ctx, `INSERT INTO api_keys (id, document, revoked_at) VALUES ($1, $2, $3)
 ON CONFLICT (id) DO UPDATE SET revoked_at = excluded.revoked_at WHERE api_keys.revoked_at = 0 AND excluded.revoked_at <> 0`,
		k.ID, database.Clean(string(document)), revoked)
	if err != nil {
		return s.useError(ctx, "writing an API key", err)
	}
	return nil
}

// LoadPolicy returns the newest version, or the zero Policy.
func (s *Store) LoadPolicy(ctx context.Context) (access.Policy, error) {
	return s.PolicyVersion(ctx, 0)
}

// PolicyVersion returns one version, the newest if it is 0, or the zero Policy.
func (s *Store) PolicyVersion(ctx context.Context, version int64) (p access.Policy, err error) {
	ctx, cancel, err := s.reading(ctx)
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
		return p, s.useError(ctx, "reading the policy", err)
	}
	if err := json.Unmarshal([]byte(document), &p); err != nil {
		return access.Policy{}, fmt.Errorf("the stored policy cannot be read: %w", err)
	}
	return p, nil
}

// PolicyVersions returns at most limit versions below one, newest first, or the
// newest if that is 0. One that cannot be read has its version alone.
func (s *Store) PolicyVersions(ctx context.Context, before int64, limit int) ([]access.Policy, error) {
	ctx, cancel, err := s.reading(ctx)
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
		return nil, s.useError(ctx, "listing the versions of the policy", err)
	}
	return versions, nil
}

// SavePolicy stores a version beside the older ones, or fails with ErrConflict.
func (s *Store) SavePolicy(ctx context.Context, p access.Policy) error {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	document, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode the policy: %w", err)
	}
	result, err := s.backend.Write.ExecContext(ctx, `INSERT INTO policies (version, document, at, author) VALUES ($1, $2, $3, $4) ON CONFLICT (version) DO NOTHING`,
		p.Version, database.Clean(string(document)), database.Micros(p.Changed), database.Clean(p.By))
	if err != nil {
		return s.useError(ctx, "writing the policy", err)
	}
	if n, err := result.RowsAffected(); err != nil || n == 0 {
		return errors.Join(err, devices.ErrConflict)
	}
	return nil
}
