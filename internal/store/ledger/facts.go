package ledger

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// rotationKey is the key of the fleet's rotation in the table fleet.
const rotationKey = "rotation"

// SaveKey implements registry.Ledger.
func (l *Ledger) SaveKey(ctx context.Context, who, id string, k access.Key) ([]devices.Change, error) {
	return l.fact(ctx, who, id, devices.AspectKey, func(ctx context.Context, t *transaction) (any, error) {
		document, err := json.Marshal(k)
		if err != nil {
			return nil, database.Rule(fmt.Errorf("encode key %s: %w", k.ID, err))
		}
		var consoleUntil int64
		if k.Parent.Key != "" && k.Grant == nil {
			consoleUntil = clock.Micros(k.Expires)
		}
		n, err := t.exec(ctx, `INSERT INTO api_keys (id, document, revoked_at, console_until) VALUES ($1, $2, $3, $4)
 ON CONFLICT (id) DO UPDATE SET revoked_at = excluded.revoked_at WHERE api_keys.revoked_at = 0 AND excluded.revoked_at <> 0`,
			k.ID, database.Clean(string(document)), clock.Micros(k.Revoked), consoleUntil)
		if err != nil || n == 0 {
			return nil, err
		}
		return k, nil
	})
}

// SaveCode implements fleet.Codes.
func (l *Ledger) SaveCode(ctx context.Context, hash string, document []byte, expires time.Time) error {
	return l.do(ctx, func(ctx context.Context, t *transaction) error {
		n, err := t.exec(ctx, `INSERT INTO console_codes (hash, document, expires_at) VALUES ($1, $2, $3) ON CONFLICT (hash) DO NOTHING`,
			hash, database.Clean(string(document)), clock.Micros(expires))
		if err == nil && n == 0 {
			err = database.Rule(devices.ErrConflict)
		}
		return err
	})
}

// ReadCode implements fleet.Codes.
func (l *Ledger) ReadCode(ctx context.Context, hash string, now time.Time) (document []byte, err error) {
	return l.code(ctx, `SELECT document, expires_at FROM console_codes WHERE hash = $1`, hash, now)
}

// TakeCode implements fleet.Codes.
func (l *Ledger) TakeCode(ctx context.Context, hash string, now time.Time) (document []byte, err error) {
	return l.code(ctx, `DELETE FROM console_codes WHERE hash = $1 RETURNING document, expires_at`, hash, now)
}

// code returns what the code of a statement gives.
func (l *Ledger) code(ctx context.Context, statement, hash string, now time.Time) (document []byte, err error) {
	var text string
	var expires int64
	err = l.do(ctx, func(ctx context.Context, t *transaction) error {
		err := t.tx.QueryRowContext(ctx, statement, hash).Scan(&text, &expires)
		if isNoRows(err) {
			return database.Rule(devices.ErrNotFound)
		}
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case !now.Before(clock.Instant(expires)):
		return nil, devices.ErrNotFound
	}
	return []byte(text), nil
}

// SaveGrant implements fleet.Grants.
func (l *Ledger) SaveGrant(ctx context.Context, use access.GrantUse) error {
	return l.do(ctx, func(ctx context.Context, t *transaction) error {
		_, err := t.exec(ctx, `INSERT INTO oauth_grants (id, refresh, previous, rotated_at, used_at, address) VALUES ($1, $2, '', $3, $3, $4)`,
			use.ID, use.Refresh, clock.Micros(use.Used), database.Clean(use.Address))
		return err
	})
}

const grantColumns = `id, refresh, previous, rotated_at, used_at, address`

func scanGrant(scan func(...any) error) (use access.GrantUse, err error) {
	var rotated, used int64
	err = scan(&use.ID, &use.Refresh, &use.Previous, &rotated, &used, &use.Address)
	use.Rotated, use.Used = clock.Instant(rotated), clock.Instant(used)
	return use, err
}

// RotateGrant implements fleet.Grants.
func (l *Ledger) RotateGrant(ctx context.Context, old string, next access.GrantUse) (use access.GrantUse, moved bool, err error) {
	err = l.do(ctx, func(ctx context.Context, t *transaction) error {
		n, err := t.exec(ctx, `UPDATE oauth_grants SET previous = refresh, refresh = $3, rotated_at = $4, used_at = $4, address = $5 WHERE id = $1 AND refresh = $2 AND used_at > $6`,
			next.ID, old, next.Refresh, clock.Micros(next.Used), database.Clean(next.Address), clock.Micros(next.Used.Add(-access.GrantIdle)))
		if err != nil {
			return err
		}
		moved = n == 1
		use, err = scanGrant(t.tx.QueryRowContext(ctx, `SELECT `+grantColumns+` FROM oauth_grants WHERE id = $1`, next.ID).Scan)
		if isNoRows(err) {
			return database.Rule(devices.ErrNotFound)
		}
		return err
	})
	return use, moved, err
}

// GrantUses implements fleet.Grants.
func (l *Ledger) GrantUses(ctx context.Context) ([]access.GrantUse, error) {
	return database.Read(ctx, l.host, "reading the last use of grants", scanGrant, `SELECT `+grantColumns+` FROM oauth_grants`)
}

// SavePolicy implements registry.Ledger.
func (l *Ledger) SavePolicy(ctx context.Context, who string, p access.Policy) ([]devices.Change, error) {
	return l.fact(ctx, who, newLineage(), devices.AspectPolicy, func(ctx context.Context, t *transaction) (any, error) {
		document, err := json.Marshal(p)
		if err != nil {
			return nil, database.Rule(fmt.Errorf("encode the policy: %w", err))
		}
		n, err := t.exec(ctx, `INSERT INTO policies (version, document, at, author) VALUES ($1, $2, $3, $4) ON CONFLICT (version) DO NOTHING`,
			p.Version, database.Clean(string(document)), clock.Micros(p.Changed), database.Clean(p.By))
		if err == nil && n == 0 {
			err = database.Rule(devices.ErrConflict)
		}
		return p, err
	})
}

// Rotate implements registry.Ledger.
func (l *Ledger) Rotate(ctx context.Context, who string, decide func(old devices.Rotation, highest int64) (devices.Rotation, error)) ([]devices.Change, error) {
	return l.fact(ctx, who, newLineage(), devices.AspectRotation, func(ctx context.Context, t *transaction) (any, error) {
		old, err := t.lockRotation(ctx, t.db.Lock("FOR UPDATE"))
		if err != nil {
			return nil, err
		}
		var highest int64
		if err := t.tx.QueryRowContext(ctx, `SELECT COALESCE(max(generation), 0) FROM credential_exceptions`).Scan(&highest); err != nil {
			return nil, err
		}
		next, err := decide(old, highest)
		if err != nil {
			return nil, database.Rule(err)
		}
		document, err := json.Marshal(next)
		if err != nil {
			return nil, database.Rule(fmt.Errorf("encode the fleet's rotation: %w", err))
		}
		_, err = t.exec(ctx, `UPDATE fleet SET value = $2 WHERE key = $1`, rotationKey, string(document))
		return next, err
	})
}

// fleetRotation returns the rotation of the fleet, which cannot change until the end of the
// transaction.
func (t *transaction) fleetRotation(ctx context.Context) (devices.Rotation, error) {
	if t.rotation == nil {
		r, err := t.lockRotation(ctx, t.db.Lock("FOR SHARE"))
		if err != nil {
			return devices.Rotation{}, err
		}
		t.rotation = &r
	}
	return *t.rotation, nil
}

// lockRotation reads and locks the rotation of the fleet. It creates the row if necessary, to have
// one to lock.
func (t *transaction) lockRotation(ctx context.Context, lock string) (r devices.Rotation, err error) {
	if _, err := t.exec(ctx, `INSERT INTO fleet (key, value) VALUES ($1, '{}') ON CONFLICT (key) DO NOTHING`, rotationKey); err != nil {
		return r, err
	}
	var text string
	if err := t.tx.QueryRowContext(ctx, `SELECT value FROM fleet WHERE key = $1`+lock, rotationKey).Scan(&text); err != nil {
		return r, err
	}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return r, database.Rule(fmt.Errorf("the stored rotation of the fleet is invalid: %.100q: %w", text, err))
	}
	return r, nil
}

// fact writes a fact of the fleet with its change. write returns the value of the change, nil if
// nothing changes.
func (l *Ledger) fact(ctx context.Context, who, id string, aspect devices.Aspect, write func(ctx context.Context, t *transaction) (any, error)) ([]devices.Change, error) {
	var list []devices.Change
	err := l.wait(ctx, &request{ctx: ctx, changes: func() []devices.Change { return list }, run: func(ctx context.Context, t *transaction) error {
		value, err := write(ctx, t)
		if err != nil {
			return err
		}
		if value == nil {
			return database.Rule(nil)
		}
		text, err := json.Marshal(value)
		if err != nil {
			return database.Rule(fmt.Errorf("encode a change: %w", err))
		}
		c := devices.Change{Revision: pending + 1, ID: id, Aspect: aspect, Value: text, Who: database.Clean(who), At: t.now().UTC().Truncate(time.Microsecond)}
		base, err := t.finish(ctx, nil, nil, []devices.Change{c})
		if err != nil {
			return err
		}
		c.Revision = base + 1
		t.committed = func() { list = []devices.Change{c} }
		return nil
	}})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// exec runs one statement and returns the number of changed rows.
func (t *transaction) exec(ctx context.Context, text string, args ...any) (int, error) {
	n, err := database.Exec(ctx, t.tx, text, args...)
	return int(n), err
}

// SetLineage sets and returns a new lineage: nodes with the old one must read everything again.
func (l *Ledger) SetLineage(ctx context.Context) (string, error) {
	name := newLineage()
	return name, l.do(ctx, func(ctx context.Context, t *transaction) error {
		_, err := t.exec(ctx, `UPDATE fleet_revision SET lineage = $1`, name)
		return err
	})
}

// Times after which a device expires that joined by itself and never connected.
const (
	ExpireMQTT      = 24 * time.Hour
	ExpireWebSocket = 30 * 24 * time.Hour
)

// Expired returns at most limit devices that joined by themselves, never connected and have
// expired, oldest first.
func (l *Ledger) Expired(ctx context.Context, now time.Time, limit int) ([]devices.ID, error) {
	return database.Read(ctx, l.host, "looking for expired devices", database.Scalar[devices.ID],
		`SELECT d.device FROM devices d WHERE d.joined <> '' AND d.first_seen < $1 AND (d.joined = $2 OR d.first_seen < $3)
 AND EXISTS (SELECT 1 FROM presence p WHERE p.device = d.device AND p.epoch = 0) ORDER BY d.first_seen, d.device LIMIT $4`,
		clock.Micros(now.Add(-ExpireMQTT)), string(devices.TransportMQTT), clock.Micros(now.Add(-ExpireWebSocket)), int64(limit))
}

// ClearJoined marks at most 500 devices as connected, so that they do not expire, and returns how
// many.
func (l *Ledger) ClearJoined(ctx context.Context) (n int, err error) {
	err = l.do(ctx, func(ctx context.Context, t *transaction) error {
		n, err = t.exec(ctx, `UPDATE devices SET joined = '' WHERE device IN (SELECT d.device FROM devices d WHERE d.joined <> ''
 AND EXISTS (SELECT 1 FROM presence p WHERE p.device = d.device AND p.epoch > 0) ORDER BY d.device LIMIT 500`+t.db.Lock("FOR UPDATE")+`)`)
		return err
	})
	return n, err
}

func isNoRows(err error) bool { return errors.Is(err, sql.ErrNoRows) }
