package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// idle measures what the node reads and writes without requests or devices.
func (k *known) idle(ctx context.Context, d *daemon, into samples) error {
	watch := k.watchFiles
	if k.database != "" {
		watch = k.watchTables
	}
	written, err := watch(ctx, into)
	if err != nil {
		return err
	}
	before, err := storedBytes(d.cmd.Process.Pid)
	if err != nil {
		return err
	}
	if err := rest(ctx, k.b.opt.scaleIdle); err != nil {
		return err
	}
	after, err := storedBytes(d.cmd.Process.Pid)
	if err != nil {
		return err
	}
	into.add(figureIdleBytes, float64(after-before))
	return written()
}

// watchTables returns a function that adds what happened in the tables of Postgres since.
func (k *known) watchTables(ctx context.Context, into samples) (written func() error, err error) {
	db, err := k.open()
	if err != nil {
		return nil, err
	}
	before, err := readTables(ctx, db)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return func() error {
		after, err := readTables(ctx, db)
		if err != nil {
			return errors.Join(err, db.Close())
		}
		lease, others, read := 0.0, 0.0, 0.0
		for table, t := range after.tables {
			n := t.written - before.tables[table].written
			if table == "nodes" {
				lease += n
			} else if others += n; n > 0 {
				k.progress("idle: %.0f rows written in %s", n, table)
			}
			read += t.read - before.tables[table].read
		}
		into.add(figureIdleLease, lease)
		into.add(figureIdleRows, others)
		into.add(figureIdleRead, read)
		into.add(figureIdleCommits, after.transactions-before.transactions)
		return db.Close()
	}, nil
}

// watchFiles returns a function that adds how many files of SQLite were written since.
func (k *known) watchFiles(_ context.Context, into samples) (written func() error, err error) {
	before, err := k.fileStates()
	return func() error {
		after, err := k.fileStates()
		n := 0.0
		for i := range after {
			if after[i] != before[i] {
				n++
			}
		}
		into.add(figureIdleFiles, n)
		return err
	}, err
}

// tableCounts are what Postgres has counted of a database since it was made.
type tableCounts struct {
	transactions float64
	tables       map[string]tableCount
}

// tableCount are numbers of rows.
type tableCount struct{ written, read float64 }

func readTables(ctx context.Context, db *sql.DB) (c tableCounts, err error) {
	c.tables = map[string]tableCount{}
	rows, err := db.QueryContext(ctx, `SELECT relname, n_tup_ins + n_tup_upd + n_tup_del, seq_tup_read + COALESCE(idx_tup_fetch, 0),
 (SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()) FROM pg_stat_user_tables`)
	if err != nil {
		return c, err
	}
	defer func() { _ = rows.Close() }() // read to its end, or failed
	for rows.Next() {
		var name string
		var t tableCount
		if err := rows.Scan(&name, &t.written, &t.read, &c.transactions); err != nil {
			return c, err
		}
		c.tables[name] = t
	}
	return c, rows.Err()
}

// fileStates are the sizes of the files of SQLite and the times of their last writes.
func (k *known) fileStates() (states [2]string, err error) {
	for i, name := range []string{"fleetd.db", "fleetd.db-wal"} {
		info, err := os.Stat(filepath.Join(k.dir, name))
		if errors.Is(err, os.ErrNotExist) {
			continue // a database without a log has none
		} else if err != nil {
			return states, err
		}
		states[i] = fmt.Sprint(info.Size(), info.ModTime().UnixNano())
	}
	return states, nil
}
