package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

const attestationColumns = `serial, device, sealed, imported_at, bound_at FROM attestation_keys`

func scanAttestation(scan func(...any) error) (k devices.AttestationKey, err error) {
	var imported, bound int64
	err = scan(&k.Serial, &k.Device, &k.Sealed, &imported, &bound)
	k.ImportedAt, k.BoundAt = clock.Instant(imported), clock.Instant(bound)
	return k, err
}

// AttestationKey returns the key of one chip.
func (s *Store) AttestationKey(ctx context.Context, serial string) (devices.AttestationKey, error) {
	k, found, err := database.One(ctx, s, "reading an attestation key", scanAttestation, `SELECT `+attestationColumns+` WHERE serial = $1`, database.Clean(serial))
	if err == nil && !found {
		err = fmt.Errorf("attestation key %s: %w", serial, devices.ErrNotFound)
	}
	return k, err
}

// ProvenBy returns the serial number that is bound to a device.
func (s *Store) ProvenBy(ctx context.Context, id devices.ID) (serial string, err error) {
	serial, found, err := database.One(ctx, s, "reading an attestation key", database.Scalar[string], `SELECT serial FROM attestation_keys WHERE device = $1`, string(id))
	if err == nil && !found {
		err = fmt.Errorf("serial number of %s: %w", id, devices.ErrNotFound)
	}
	return serial, err
}

// AttestationKeys returns keys in byte order of their serial numbers.
func (s *Store) AttestationKeys(ctx context.Context, after string, limit int) ([]devices.AttestationKey, error) {
	return database.Read(ctx, s, "listing attestation keys", scanAttestation, `SELECT `+attestationColumns+` WHERE serial > $1 ORDER BY serial LIMIT $2`, database.Clean(after), limit)
}

// BindAttestationKey binds a serial number to a device, once: if two nodes try concurrently,
// only one succeeds.
func (s *Store) BindAttestationKey(ctx context.Context, serial string, id devices.ID, now time.Time) error {
	return s.changeKeys(ctx, "binding an attestation key", func(tx *sql.Tx) error {
		if err := proofOf(ctx, tx, serial, id); err != nil {
			return err
		}
		return found(database.Exec(ctx, tx, `UPDATE attestation_keys SET device = $2, bound_at = $3 WHERE serial = $1 AND (device = '' OR device = $2)`,
			database.Clean(serial), string(id), clock.Micros(now)))
	}, func() error {
		k, err := s.AttestationKey(ctx, serial)
		if err != nil {
			return err
		}
		return fmt.Errorf("serial number %s is bound to %s: %w", serial, k.Device, devices.ErrBound)
	})
}

// proofOf returns devices.ErrBound if another serial number is bound to the device.
func proofOf(ctx context.Context, tx *sql.Tx, serial string, id devices.ID) error {
	var other string
	err := tx.QueryRowContext(ctx, `SELECT serial FROM attestation_keys WHERE device = $1 AND serial <> $2`, string(id), database.Clean(serial)).Scan(&other)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("serial number %s is bound to %s: %w", other, id, devices.ErrBound)
}

// SaveAttestationKeys adds and replaces keys in one transaction.
func (s *Store) SaveAttestationKeys(ctx context.Context, keys []devices.AttestationKey) error {
	return s.changeKeys(ctx, "importing attestation keys", func(tx *sql.Tx) error {
		for _, k := range keys {
			if k.Device != "" {
				if err := proofOf(ctx, tx, k.Serial, k.Device); err != nil {
					return err
				}
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO attestation_keys (serial, device, sealed, imported_at, bound_at) VALUES ($1, $2, $3, $4, $5)
 ON CONFLICT (serial) DO UPDATE SET sealed = excluded.sealed, imported_at = excluded.imported_at,
 device = CASE WHEN excluded.device <> '' THEN excluded.device ELSE attestation_keys.device END,
 bound_at = CASE WHEN excluded.device <> '' THEN excluded.bound_at ELSE attestation_keys.bound_at END`,
				database.Clean(k.Serial), string(k.Device), k.Sealed, clock.Micros(k.ImportedAt), clock.Micros(k.BoundAt)); err != nil {
				return err
			}
		}
		return nil
	}, nil)
}

// RemoveAttestationKey removes one key.
func (s *Store) RemoveAttestationKey(ctx context.Context, serial string) error {
	return s.changeKeys(ctx, "removing an attestation key", func(tx *sql.Tx) error {
		return found(database.Exec(ctx, tx, `DELETE FROM attestation_keys WHERE serial = $1`, database.Clean(serial)))
	}, func() error { return fmt.Errorf("attestation key %s: %w", serial, devices.ErrNotFound) })
}

// errNoRow means that a statement changed no row.
var errNoRow = errors.New("no row changed")

func found(n int64, err error) error {
	if err == nil && n == 0 {
		return errNoRow
	}
	return err
}

// changeKeys runs do in a transaction. missing returns the error if no row changed; a
// constraint violation means that another serial number was bound to the device at the same
// time.
func (s *Store) changeKeys(ctx context.Context, doing string, do func(*sql.Tx) error, missing func() error) error {
	err := s.transactions.Run(ctx, doing, func(_ context.Context, tx *sql.Tx) error {
		switch err := do(tx); {
		case errors.Is(err, errNoRow), errors.Is(err, devices.ErrBound):
			return database.Rule(err)
		case err != nil && database.FaultOf(err) == database.FaultRow:
			return database.Rule(fmt.Errorf("another serial number is bound to the device: %w", devices.ErrBound))
		default:
			return err
		}
	})
	if errors.Is(err, errNoRow) {
		return missing()
	}
	return err
}
