package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"fleetd/internal/devices"
)

// rotationKey names, in the table fleet, the generation of the whole fleet.
const rotationKey = "rotation"

// LoadRotation returns the fleet's rotation, the zero one if there was none.
func (s *Store) LoadRotation(ctx context.Context) (r devices.Rotation, err error) {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return r, err
	}
	defer cancel()
	var text string
	err = s.backend.Read.QueryRowContext(ctx, `SELECT value FROM fleet WHERE key = $1`, rotationKey).Scan(&text)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return r, nil
	case err != nil:
		return r, s.useError(ctx, "reading the fleet's rotation", err)
	}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return r, fmt.Errorf("the fleet's rotation is stored as %.100q: %w", text, err)
	}
	return r, nil
}

// SwapRotation replaces the fleet's rotation if it is still the old one.
func (s *Store) SwapRotation(ctx context.Context, old, next devices.Rotation) error {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	before, err := json.Marshal(old)
	if err != nil {
		return fmt.Errorf("write the fleet's rotation: %w", err)
	}
	after, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("write the fleet's rotation: %w", err)
	}
	statement, args := `UPDATE fleet SET value = $2 WHERE key = $1 AND value = $3`, []any{rotationKey, string(after), string(before)}
	if old == (devices.Rotation{}) {
		statement, args = `INSERT INTO fleet (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING`, args[:2]
	}
	switch err := found(s.backend.Write.ExecContext(ctx, statement, args...)); {
	case errors.Is(err, errNoRow):
		return devices.ErrRotated
	case err != nil:
		return s.useError(ctx, "rotating the fleet", err)
	}
	return nil
}
