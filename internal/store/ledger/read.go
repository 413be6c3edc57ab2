package ledger

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/stdlib"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/store/database"
)

var _ registry.Ledger = (*Ledger)(nil)

// maxChanges is how many changes one page has at most.
const maxChanges = 10_000

// headQuery contains f.one = 1 although there is only one row: otherwise Postgres may assume a long
// table, and read all changes to join them.
const headQuery = `SELECT f.lineage, f.n, COALESCE(c.id, '') FROM fleet_revision f LEFT JOIN changes c ON c.revision = f.n WHERE f.one = 1`

// Head implements registry.Ledger.
func (l *Ledger) Head(ctx context.Context) (p devices.Position, err error) {
	ctx, cancel, err := l.host.BeginRead(ctx)
	if err != nil {
		return p, err
	}
	defer cancel()
	read := func() error {
		return l.db.Read.QueryRowContext(ctx, headQuery).Scan(&p.Lineage, &p.Revision, &p.ID)
	}
	if err = read(); err == nil && p.Lineage == "" {
		name := newLineage()
		err = l.do(ctx, func(ctx context.Context, t *transaction) error {
			_, err := t.exec(ctx, `UPDATE fleet_revision SET lineage = $1 WHERE lineage = ''`, name)
			return err
		})
		if err != nil {
			return p, err
		}
		err = read()
	}
	if err != nil {
		return p, l.host.UseError(ctx, "reading the revision", err)
	}
	return p, nil
}

const changeColumns = `revision, id, device, aspect, value, who, at FROM changes`

func scanChange(scan func(...any) error) (c devices.Change, err error) {
	var value string
	var at int64
	err = scan(&c.Revision, &c.ID, &c.Device, &c.Aspect, &value, &c.Who, &at)
	c.Value, c.At = json.RawMessage(value), clock.Instant(at)
	return c, err
}

// Changes implements registry.Ledger.
func (l *Ledger) Changes(ctx context.Context, from int64, limit int) ([]devices.Change, error) {
	from = max(from, 1)
	list, err := l.changes(ctx, `SELECT `+changeColumns+` WHERE revision >= $1 ORDER BY revision LIMIT $2`, from, pageOf(limit))
	if err != nil {
		return nil, err
	}
	for i := range list {
		if list[i].Revision != from+int64(i) {
			return nil, fmt.Errorf("change %d: %w", from+int64(i), devices.ErrPruned)
		}
	}
	return list, nil
}

// DeviceChanges returns at most limit changes of a device with revisions below before, newest first;
// 0 starts with the newest.
func (l *Ledger) DeviceChanges(ctx context.Context, id devices.ID, before int64, limit int) ([]devices.Change, error) {
	if before <= 0 {
		before = math.MaxInt64
	}
	return l.changes(ctx, `SELECT `+changeColumns+` WHERE device = $1 AND revision < $2 ORDER BY revision DESC LIMIT $3`, string(id), before, pageOf(limit))
}

// ChangesSince returns at most limit changes with revisions above after, made at since or later
// unless that is zero, in order. Deleted changes are left out.
func (l *Ledger) ChangesSince(ctx context.Context, since time.Time, after int64, limit int) ([]devices.Change, error) {
	if !since.IsZero() {
		first, err := l.firstSince(ctx, since.Add(-skew))
		if err != nil {
			return nil, err
		}
		after = max(after, first-1)
	}
	return l.changes(ctx, `SELECT `+changeColumns+` WHERE revision > $1 AND at >= $2 ORDER BY revision LIMIT $3`, after, clock.Micros(since), pageOf(limit))
}

// skew is how far the clocks of two nodes may differ for ChangesSince.
const skew = time.Minute

// firstSince finds the first revision of about this time: times are in the order of revisions,
// except for the differences of clocks.
func (l *Ledger) firstSince(ctx context.Context, since time.Time) (int64, error) {
	ctx, cancel, err := l.host.BeginRead(ctx)
	if err != nil {
		return 0, err
	}
	defer cancel()
	var low, high int64 // the change at low is older, the one at high is not
	err = l.db.Read.QueryRowContext(ctx, `SELECT COALESCE((SELECT min(revision) FROM changes), 1) - 1, COALESCE((SELECT max(revision) FROM changes), 0) + 1`).Scan(&low, &high)
	for err == nil && high-low > 1 {
		middle := low + (high-low)/2
		var revision, at int64
		err = l.db.Read.QueryRowContext(ctx, `SELECT revision, at FROM changes WHERE revision >= $1 ORDER BY revision LIMIT 1`, middle).Scan(&revision, &at)
		switch {
		case isNoRows(err):
			high, err = middle, nil
		case err != nil:
		case revision >= high || at >= clock.Micros(since):
			high = middle
		default:
			low = revision
		}
	}
	if err != nil {
		return 0, l.host.UseError(ctx, "looking for a time in the changes", err)
	}
	return high, nil
}

func pageOf(limit int) int64 {
	if limit < 1 || limit > maxChanges {
		return maxChanges
	}
	return int64(limit)
}

func (l *Ledger) changes(ctx context.Context, query string, args ...any) ([]devices.Change, error) {
	return database.Read(ctx, l.host, "reading changes", scanChange, query, args...)
}

// snapshotTimeout limits a snapshot.
const snapshotTimeout = 2 * time.Minute

// Snapshot implements registry.Ledger. Members have their id, admission, client, preferred transport
// and JoinTransport.
func (l *Ledger) Snapshot(ctx context.Context, member func(m devices.Member)) (registry.Snapshot, error) {
	if err := l.host.Usable(); err != nil {
		return registry.Snapshot{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, snapshotTimeout)
	defer cancel()
	snapshot, err := l.snapshot(ctx, member)
	if err != nil {
		return registry.Snapshot{}, l.host.UseError(ctx, "reading the whole registry", err)
	}
	return snapshot, nil
}

func (l *Ledger) snapshot(ctx context.Context, member func(m devices.Member)) (s registry.Snapshot, err error) {
	if _, err := l.Head(ctx); err != nil { // sets the lineage if there is none
		return s, err
	}
	if err := l.makeClientKey(ctx); err != nil {
		return s, err
	}
	conn, err := l.db.Read.Conn(ctx)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	options := &sql.TxOptions{}
	if l.db.Postgres() {
		options = &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true}
	}
	tx, err := conn.BeginTx(ctx, options)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, tx.Rollback()) }()
	if l.db.Postgres() {
		if _, err := tx.ExecContext(ctx, fmt.Sprintf(`SET LOCAL statement_timeout = %d`, snapshotTimeout.Milliseconds())); err != nil {
			return s, err
		}
	}
	if err := tx.QueryRowContext(ctx, headQuery).Scan(&s.Lineage, &s.Revision, &s.ID); err != nil {
		return s, err
	}
	if err := l.readFacts(ctx, tx, &s); err != nil {
		return s, err
	}
	if l.db.Postgres() {
		return s, readMembers(ctx, conn, member)
	}
	return s, scanMembers(ctx, tx, member)
}

// clientKeyKey is the key of the fleet's devices.ClientKey in the table fleet.
const clientKeyKey = "client_key"

const clientKeyQuery = `SELECT value FROM fleet WHERE key = '` + clientKeyKey + `'`

// makeClientKey makes the fleet's client key, unless a node has made one.
func (l *Ledger) makeClientKey(ctx context.Context) error {
	var key string
	err := l.db.Read.QueryRowContext(ctx, clientKeyQuery).Scan(&key)
	if !isNoRows(err) {
		return err
	}
	return l.do(ctx, func(ctx context.Context, t *transaction) error {
		_, err := t.exec(ctx, `INSERT INTO fleet (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING`, clientKeyKey, rand.Text()+rand.Text())
		return err
	})
}

// readFacts reads everything but the members.
func (l *Ledger) readFacts(ctx context.Context, tx *sql.Tx, s *registry.Snapshot) (err error) {
	s.Exceptions, err = database.Collect(ctx, tx, func(scan func(...any) error) (e devices.Exception, err error) {
		var changed, until int64
		err = scan(&e.Device, &e.Generation, &e.Revoked, &e.Reason, &changed, &e.Previous, &until, &e.Refused)
		e.ChangedAt, e.PreviousUntil = clock.Instant(changed), clock.Instant(until)
		return e, err
	}, `SELECT device, generation, revoked, reason, changed_at, previous, previous_until, refused FROM credential_exceptions ORDER BY device`)
	if err != nil {
		return err
	}
	keys, err := database.Collect(ctx, tx, func(scan func(...any) error) (k access.Key, err error) {
		var document string
		var revoked int64
		if err = scan(&document, &revoked); err != nil {
			return k, err
		}
		if fault := json.Unmarshal([]byte(document), &k); fault != nil {
			l.log.Error("a stored API key cannot be read", "error", fault)
			return access.Key{}, nil
		}
		k.Revoked = clock.Instant(revoked)
		return k, nil
	}, `SELECT document, revoked_at FROM api_keys ORDER BY id`)
	if err != nil {
		return err
	}
	for _, k := range keys {
		if k.ID != "" {
			s.Keys = append(s.Keys, k)
		}
	}
	if err := tx.QueryRowContext(ctx, clientKeyQuery).Scan(&s.ClientKey); err != nil {
		return err
	}
	for _, document := range []struct {
		what, query string
		into        any
	}{
		{"policy", `SELECT document FROM policies ORDER BY version DESC LIMIT 1`, &s.Policy},
		{"rotation", `SELECT value FROM fleet WHERE key = 'rotation'`, &s.Rotation},
	} {
		var text string
		err := tx.QueryRowContext(ctx, document.query).Scan(&text)
		switch {
		case isNoRows(err):
			continue
		case err != nil:
			return err
		}
		if err := json.Unmarshal([]byte(text), document.into); err != nil {
			return fmt.Errorf("the stored %s cannot be read: %w", document.what, err)
		}
	}
	return nil
}

// readMembers reads all devices on a connection of Postgres with a running transaction.
func readMembers(ctx context.Context, conn *sql.Conn, member func(m devices.Member)) error {
	return conn.Raw(func(driver any) error {
		rows, err := driver.(*stdlib.Conn).Conn().Query(ctx, `SELECT device, admission, client_id, preferred_transport, joined FROM devices`)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			v := rows.RawValues() // text has the same form in both formats
			member(devices.Member{ID: devices.ID(v[0]), Admission: admissionOf(v[1]), ClientID: string(v[2]), Prefer: transportOf(v[3]), JoinTransport: transportOf(v[4])})
		}
		return rows.Err()
	})
}

// scanMembers reads all devices of SQLite. Reading one column per row takes half the time of five.
func scanMembers(ctx context.Context, tx *sql.Tx, member func(m devices.Member)) error {
	rows, err := tx.QueryContext(ctx, `SELECT device || char(31) || admission || char(31) || preferred_transport || char(31) || joined || char(31) || client_id FROM devices`)
	if err != nil {
		return err
	}
	for rows.Next() {
		var text string
		if err := rows.Scan(&text); err != nil {
			return errors.Join(err, rows.Close())
		}
		v := strings.SplitN(text, "\x1f", 5)
		member(devices.Member{ID: devices.ID(v[0]), Admission: admissionOf([]byte(v[1])), Prefer: transportOf([]byte(v[2])), JoinTransport: transportOf([]byte(v[3])), ClientID: v[4]})
	}
	return rows.Err()
}

func admissionOf(text []byte) devices.Admission {
	return usual(text, devices.AdmissionMember, devices.AdmissionRevoked)
}

func transportOf(text []byte) devices.Transport {
	return usual(text, devices.TransportNone, devices.TransportMQTT, devices.TransportWebSocket)
}

// usual allocates nothing for the usual values.
func usual[T ~string](text []byte, values ...T) T {
	for _, v := range values {
		if string(text) == string(v) {
			return v
		}
	}
	return T(text)
}
