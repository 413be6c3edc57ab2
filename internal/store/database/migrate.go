package database

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/pressly/goose/v3"

	"fleetd/internal/selector"
	"fleetd/internal/timescale"
	"fleetd/migrations"
)

// versionFilled is a migration in Go, whose number follows those of the files: labels as rows, keys of firmware versions.
const versionFilled = 11

// goMigrations returns the migrations that SQL cannot express.
func (db *DB) goMigrations(log *slog.Logger) []*goose.Migration {
	return []*goose.Migration{goose.NewGoMigration(versionFilled, &goose.GoFunc{RunDB: func(ctx context.Context, pool *sql.DB) error {
		return db.fillRegistry(ctx, pool, log)
	}}, nil)}
}

// Running nodes renew their leases every 3 s.
var (
	leaseTime = timescale.Of(15 * time.Second)
	leaseLook = timescale.Of(time.Second)
)

// checkOldNodes refuses to migrate while nodes are running that cannot use the database afterwards, and removes the leases
// of dead ones.
func (db *DB) checkOldNodes(ctx context.Context, have int64) error {
	if have >= migrations.Lowest {
		return nil
	}
	first, err := db.oldLeases(ctx)
	if err != nil || len(first) == 0 {
		return err
	}
	for until := time.Now().Add(leaseTime); ; {
		timer := time.NewTimer(leaseLook)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
		now, err := db.oldLeases(ctx)
		if err != nil {
			return err
		}
		var alive []string
		for lease, beat := range now {
			if before, known := first[lease]; !known || before != beat {
				alive = append(alive, lease.node)
			}
		}
		if len(alive) > 0 {
			slices.Sort(alive)
			return fmt.Errorf("%w: %s is in use by nodes of an older version: %s; stop all of them, then start this one; the new version migrates the database, and older versions cannot use it afterwards",
				ErrConfig, db.Where, strings.Join(slices.Compact(alive), ", "))
		}
		if !time.Now().Before(until) {
			break
		}
	}
	for lease, beat := range first {
		if _, err := db.Admin.ExecContext(ctx, `DELETE FROM nodes WHERE node = $1 AND instance = $2 AND beat = $3`, lease.node, lease.instance, beat); err != nil {
			return fmt.Errorf("removing the lease of a dead node: %w", err)
		}
	}
	return nil
}

type lease struct{ node, instance string }

// oldLeases returns the beats of the nodes that support no schema version from migrations.Lowest on: all, if the table has no column
// for that.
func (db *DB) oldLeases(ctx context.Context) (map[lease]int64, error) {
	var exists, told bool
	err := db.Admin.QueryRowContext(ctx, `SELECT count(*) > 0, count(*) FILTER (WHERE column_name = 'schema') > 0 FROM information_schema.columns
 WHERE table_schema = current_schema AND table_name = 'nodes'`).Scan(&exists, &told)
	if err != nil || !exists {
		return nil, err
	}
	old := ""
	if told {
		old = fmt.Sprint(" WHERE schema < ", migrations.Lowest)
	}
	leases := map[lease]int64{}
	_, err = Collect(ctx, db.Admin, func(scan func(...any) error) (none struct{}, err error) {
		var l lease
		var beat int64
		err = scan(&l.node, &l.instance, &beat)
		leases[l] = beat
		return none, err
	}, `SELECT node, instance, beat FROM nodes`+old)
	if err != nil {
		return nil, fmt.Errorf("reading the leases of nodes: %w", err)
	}
	return leases, nil
}

// fillPage is how many devices are filled in one transaction.
const fillPage = 1000

// logEvery is the longest time between two log lines of a migration.
const logEvery = 5 * time.Second

// fillRegistry computes what SQL cannot compute alike on both databases: rows for labels, keys of
// firmware versions, and boards in lower case. Each page is a transaction, and can be repeated.
func (db *DB) fillRegistry(ctx context.Context, pool *sql.DB, log *slog.Logger) error {
	var all int
	if err := pool.QueryRowContext(ctx, `SELECT count(*) FROM devices`).Scan(&all); err != nil {
		return fmt.Errorf("counting devices: %w", err)
	}
	for _, column := range []struct {
		name, derived string
		of            func(string) string
	}{
		{"firmware", "firmware_key", func(v string) string { key, _ := selector.VersionKey(v); return key }},
		{"board", "board_folded", strings.ToLower},
	} {
		if err := db.fillColumn(ctx, pool, column.name, column.derived, column.of); err != nil {
			return fmt.Errorf("filling %s: %w", column.derived, err)
		}
		log.Info("migrating the database", "devices", all, "filled", column.derived)
	}
	logged, done := time.Now(), 0
	for after := ""; ; {
		n, last, err := db.fillLabels(ctx, pool, after)
		if err != nil {
			return fmt.Errorf("filling labels: %w", err)
		}
		done += n
		if n < fillPage {
			break
		}
		after = last
		if time.Since(logged) >= logEvery {
			logged = time.Now()
			log.Info("migrating the database: labels", "devices", done, "of", all)
		}
	}
	if db.Postgres() {
		for _, table := range []string{"devices", "presence", "device_labels"} {
			if _, err := pool.ExecContext(ctx, "ANALYZE "+table); err != nil {
				return fmt.Errorf("analyzing %s: %w", table, err)
			}
		}
	}
	return nil
}

// fillColumn sets a column that derives from another one, once for each value.
func (db *DB) fillColumn(ctx context.Context, pool *sql.DB, name, derived string, of func(string) string) error {
	type value struct{ value, derived string }
	values, err := Collect(ctx, pool, func(scan func(...any) error) (v value, err error) {
		return v, scan(&v.value, &v.derived)
	}, fmt.Sprintf(`SELECT %[1]s, min(%[2]s) FROM devices GROUP BY %[1]s`, name, derived))
	if err != nil {
		return err
	}
	for _, v := range values {
		want := of(v.value)
		if want == v.derived {
			continue
		}
		if _, err := pool.ExecContext(ctx, fmt.Sprintf(`UPDATE devices SET %[2]s = $2 WHERE %[1]s = $1 AND %[2]s <> $2`, name, derived), v.value, want); err != nil {
			return err
		}
	}
	return nil
}

// fillLabels writes the label rows of the next page of devices.
func (db *DB) fillLabels(ctx context.Context, pool *sql.DB, after string) (n int, last string, err error) {
	tx, err := pool.BeginTx(ctx, nil)
	if err != nil {
		return 0, "", err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, tx.Rollback())
		}
	}()
	type device struct{ id, labels string }
	page, err := Collect(ctx, tx, func(scan func(...any) error) (d device, err error) {
		return d, scan(&d.id, &d.labels)
	}, `SELECT device, labels FROM devices WHERE device > $1 ORDER BY device LIMIT $2`, after, int64(fillPage))
	if err != nil {
		return 0, "", err
	}
	var rows []Label
	for _, d := range page {
		for key, value := range DecodeLabels(d.labels) {
			rows = append(rows, Label{Clean(key), Clean(value), d.id})
		}
		last = d.id
	}
	if err := db.InsertLabels(ctx, tx, rows); err != nil {
		return 0, "", err
	}
	return len(page), last, tx.Commit()
}
