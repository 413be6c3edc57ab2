package main

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	_ "modernc.org/sqlite"             // the driver "sqlite"

	"fleetd/internal/selector"

	"fleetd/bench/load"
)

// What the known devices are like.
const (
	scaleMost     = 16_000_000
	scaleSites    = 500 // values of the label site
	scaleBoards   = 20
	scaleFirmware = 40
	scaleSpan     = 30 * 86400 // seconds over which devices were last seen
)

// scaleReasons are why devices are offline, beside those that never connected.
var scaleReasons = []string{"gone", "dead", "idle", "slow", "draining", "node_lost"}

// knownID is the id of a known device that does not connect: unique, and spread evenly over all ids of its prefix, so that
// devices that were imported together are not adjacent in any index.
func knownID(i int) string {
	const bits, mask = 40, 1<<40 - 1
	x := uint64(i)
	for _, odd := range []uint64{0x9e3779b97f, 0xbf58476d1d, 0x94d049bb13} { // each step can be undone
		x = x * odd & mask
		x ^= x >> (bits/2 - 1)
	}
	return idOf(x)
}

// idOf is the id with these last 40 bits.
func idOf(x uint64) string {
	return fmt.Sprintf("06:%02x:%02x:%02x:%02x:%02x", x>>32&255, x>>24&255, x>>16&255, x>>8&255, x&255)
}

// writeDevices writes the file that is imported: devices from (included) to to (excluded) of a fleet, of which the first
// storm are those that connect.
func writeDevices(file string, from, to, storm int) (err error) {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := bufio.NewWriterSize(f, 1<<16)
	fmt.Fprintln(w, "id,name,transport,client_id,label.asset,label.env,label.site")
	for i := from; i < to; i++ {
		id, env, transport := knownID(i), "production", ""
		if i < storm {
			id = load.DeviceID(i)
		}
		if i%10 == 9 {
			env = ""
		}
		if i%3 > 0 {
			transport = []string{overMQTT, overWebSocket}[i%3-1]
		}
		if i < storm {
			transport = ""
		}
		fmt.Fprintf(w, "%s,Speaker %07d,%s,%s,asset-%07d,%s,site-%03d\n", id, i, transport, clientID(i), i, env, i%scaleSites)
	}
	return w.Flush() // has the errors of all writes
}

// pick is an SQL expression that chooses among literals by a number below their count.
func pick(number string, values []string) string {
	var b strings.Builder
	b.WriteString("CASE " + number)
	for i, value := range values {
		fmt.Fprintf(&b, " WHEN %d THEN '%s'", i, value)
	}
	b.WriteString(" END")
	return b.String()
}

func scaleBoard(i int) string { return fmt.Sprintf("board-%02d", i) }

func scaleVersion(i int) string { return fmt.Sprintf("2.%d.%d", i/10, i%10) }

// fill writes what an import cannot: what devices report of themselves, and when they were last connected. now is in
// seconds. Devices that connect are left out.
func fill(ctx context.Context, db *sql.DB, postgres bool, now int64) error {
	n := "rowid"
	if postgres {
		n = "(CAST(hashtext(device) AS BIGINT) & 2147483647)"
	}
	spread := func(prime, below, m int) string { return fmt.Sprintf("(%s * %d %% %d %% %d)", n, prime, below, m) }
	var boards, versions, keys []string
	for i := range scaleBoards {
		boards = append(boards, scaleBoard(i))
	}
	for i := range scaleFirmware {
		key, ok := selector.VersionKey(scaleVersion(i))
		if !ok {
			return fmt.Errorf("version %s has no key", scaleVersion(i))
		}
		versions, keys = append(versions, scaleVersion(i)), append(keys, key)
	}
	board, firmware := spread(7919, 100_003, scaleBoards), spread(15_485_863, 1_000_003, scaleFirmware)
	seen := fmt.Sprintf("(%d000000 - %s * 1000000 - %s %% 1000000)", now, spread(179_424_673, 2_750_159, scaleSpan), n)
	statements := []string{
		fmt.Sprintf(`UPDATE devices SET board = %s, board_folded = %s, firmware = %s, firmware_key = %s, chip = 'esp32s3', checked_at = %s WHERE device LIKE '06:%%'`,
			pick(board, boards), pick(board, boards), pick(firmware, versions), pick(firmware, keys), seen),
		// One in ten never connected.
		fmt.Sprintf(`UPDATE presence SET epoch = %s - 3600000000, seq = 2, node = 'node-1', transport = 'mqtt', reason = %s, connected_at = %s - 3600000000, last_seen = %s,
 offline_since = %s, mcp_state = 'ready', tool_count = 12 WHERE device LIKE '06:%%' AND %s > 0`, seen, pick(spread(104_729, 999_983, len(scaleReasons)), scaleReasons), seen, seen, seen, spread(1_299_709, 1_000_039, 10)),
		`DELETE FROM fleet_counts`,
		`INSERT INTO fleet_counts (dimension, value, slot, n) SELECT dimension, value, 0, n FROM (
 SELECT 'board' AS dimension, board AS value, count(*) AS n FROM devices GROUP BY board
 UNION ALL SELECT 'firmware', firmware, count(*) FROM devices GROUP BY firmware
 UNION ALL SELECT 'state', CASE WHEN online THEN 'online' ELSE 'offline' END, count(*) FROM presence GROUP BY online
 UNION ALL SELECT 'offline_reason', reason, count(*) FROM presence WHERE NOT online GROUP BY reason
 UNION ALL SELECT 'mcp_state', mcp_state, count(*) FROM presence GROUP BY mcp_state) c`,
	}
	if postgres {
		statements = append(statements, `VACUUM (ANALYZE)`) // as autovacuum does within minutes
	} else {
		statements = append([]string{`PRAGMA synchronous = OFF`, `PRAGMA cache_size = -524288`, `PRAGMA temp_store = MEMORY`}, append(statements, `PRAGMA wal_checkpoint(TRUNCATE)`)...)
	}
	conn, err := db.Conn(ctx) // settings are those of a connection
	if err != nil {
		return err
	}
	for _, statement := range statements {
		if _, err := conn.ExecContext(ctx, statement); err != nil {
			return errors.Join(fmt.Errorf("%.60s: %w", statement, err), conn.Close())
		}
	}
	return conn.Close()
}

// countKnown is how many devices the database has, and how many of those that do not connect are as fill made them.
func countKnown(ctx context.Context, db *sql.DB) (known, filled int, err error) {
	err = db.QueryRowContext(ctx, `SELECT count(*), count(CASE WHEN board LIKE 'board-%' THEN 1 END) FROM devices`).Scan(&known, &filled)
	return known, filled, err
}
