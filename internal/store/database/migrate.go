package database

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/timescale"
)

// Running nodes renew their leases every 3 s.
var (
	leaseTime = timescale.Of(15 * time.Second)
	leaseLook = timescale.Of(time.Second)
)

// CheckOldNodes refuses to migrate while nodes are running that do not support the schema version lowest, without which they could not use
// the database afterwards, and removes the leases of dead ones.
func (db *DB) CheckOldNodes(ctx context.Context, lowest int64) error {
	first, err := db.oldLeases(ctx, lowest)
	if err != nil || len(first) == 0 {
		return err
	}
	for until := time.Now().Add(leaseTime); ; {
		if !clock.Sleep(ctx, leaseLook) {
			return ctx.Err()
		}
		now, err := db.oldLeases(ctx, lowest)
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

// oldLeases returns the beats of the nodes that do not support the schema version lowest.
func (db *DB) oldLeases(ctx context.Context, lowest int64) (map[lease]int64, error) {
	leases := map[lease]int64{}
	_, err := Collect(ctx, db.Admin, func(scan func(...any) error) (none struct{}, err error) {
		var l lease
		var beat int64
		err = scan(&l.node, &l.instance, &beat)
		leases[l] = beat
		return none, err
	}, `SELECT node, instance, beat FROM nodes WHERE schema < $1`, lowest)
	if err != nil {
		return nil, fmt.Errorf("reading the leases of nodes: %w", err)
	}
	return leases, nil
}
