package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Where lists are kept.
const (
	storeMemory   = "mem"
	storePostgres = "pg-hash"
)

// openStore returns a function that stores the list of a device, and returns when it is stored.
func openStore(name, dsn string) (func(device string, l *toolList) error, error) {
	switch name {
	case storeMemory:
		var mu sync.Mutex
		lists := map[string]*toolList{}
		return func(device string, l *toolList) error {
			mu.Lock()
			defer mu.Unlock()
			lists[device] = l
			return nil
		}, nil
	case storePostgres:
		return openPostgres(dsn)
	}
	return nil, fmt.Errorf("unknown store %q", name)
}

const schema = `
DROP TABLE IF EXISTS baseline_devices, baseline_lists;
CREATE TABLE baseline_lists (hash bytea PRIMARY KEY, tools jsonb NOT NULL);
CREATE TABLE baseline_devices (device text PRIMARY KEY, hash bytea NOT NULL, updated timestamptz NOT NULL DEFAULT now());`

// Writes to Postgres: each writer commits what is waiting.
const (
	writers     = 2
	batchMost   = 512
	batchLinger = 2 * time.Millisecond
)

// row is a device that waits for its list to be stored.
type row struct {
	device string
	list   *toolList
	done   chan error
}

func openPostgres(dsn string) (func(device string, l *toolList) error, error) {
	ctx := context.Background()
	rows := make(chan row, batchMost)
	for i := range writers {
		conn, err := pgx.Connect(ctx, dsn)
		if err == nil && i == 0 {
			_, err = conn.Exec(ctx, schema)
		}
		if err != nil {
			return nil, fmt.Errorf("postgres: %w", err)
		}
		go writeBatches(ctx, conn, rows)
	}
	return func(device string, l *toolList) error {
		done := make(chan error, 1)
		rows <- row{device, l, done}
		return <-done
	}, nil
}

// writeBatches writes rows until the process ends.
func writeBatches(ctx context.Context, conn *pgx.Conn, rows <-chan row) {
	known := map[[32]byte]bool{}
	for first := range rows {
		batch := []row{first}
		for full := time.After(batchLinger); len(batch) < batchMost; {
			select {
			case r := <-rows:
				batch = append(batch, r)
				continue
			case <-full:
			}
			break
		}
		err := writeBatch(ctx, conn, batch, known)
		for _, r := range batch {
			r.done <- err
		}
	}
}

// writeBatch writes each list once, and a small row for each device, unless it is there.
func writeBatch(ctx context.Context, conn *pgx.Conn, batch []row, known map[[32]byte]bool) error {
	devices, hashes := make([]string, len(batch)), make([][]byte, len(batch))
	var faults error
	for i, r := range batch {
		devices[i], hashes[i] = r.device, r.list.hash[:]
		if !known[r.list.hash] {
			_, err := conn.Exec(ctx, "INSERT INTO baseline_lists VALUES ($1, $2) ON CONFLICT DO NOTHING", r.list.hash[:], r.list.json)
			faults = errors.Join(faults, err)
			known[r.list.hash] = true
		}
	}
	_, err := conn.Exec(ctx, `INSERT INTO baseline_devices (device, hash) SELECT * FROM unnest($1::text[], $2::bytea[])
		ON CONFLICT (device) DO UPDATE SET hash = excluded.hash, updated = now() WHERE baseline_devices.hash <> excluded.hash`, devices, hashes)
	return errors.Join(faults, err)
}
