package store

import (
	"context"
	"fmt"
	"math"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/store/database"
)

// MaxAuditPage is how many blocks one read returns at most: each may have half a MiB.
const MaxAuditPage = 16

// SaveAuditBlock writes a block. An existing block is not changed, so that a write with an
// unknown outcome can be repeated.
func (s *Store) SaveAuditBlock(ctx context.Context, b *audit.Block) error {
	_, err := database.Change(ctx, s, s.backend.Write, "writing the audit", `INSERT INTO audit_blocks (run, first_seq, last_seq, node, first_at, last_at, entries, previous, hash)
 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (run, first_seq) DO NOTHING`,
		b.Run, b.FirstSeq, b.LastSeq, b.Node, clock.Micros(b.FirstAt), clock.Micros(b.LastAt), string(b.Entries), b.Previous.String(), b.Hash.String())
	if err == nil {
		s.stats.AuditBlocks.Add(1)
	}
	return err
}

// auditColumns are the columns of a block, in the order of scanBlock.
const auditColumns = `run, first_seq, last_seq, node, first_at, last_at, entries, previous, hash FROM audit_blocks`

func scanBlock(scan func(...any) error) (b audit.Block, err error) {
	var first, last int64
	var previous, hash string
	if err = scan(&b.Run, &b.FirstSeq, &b.LastSeq, &b.Node, &first, &last, &b.Entries, &previous, &hash); err != nil {
		return b, err
	}
	b.FirstAt, b.LastAt = clock.Instant(first), clock.Instant(last)
	// A malformed hash was modified: it equals no other hash.
	b.Previous, b.Hash = readHash(previous), readHash(hash)
	return b, nil
}

func readHash(text string) audit.Hash {
	h, err := audit.ParseHash(text)
	if err != nil {
		return audit.Hash{0xff}
	}
	return h
}

// AuditBlocks returns the newest blocks that match the query, newest first.
func (s *Store) AuditBlocks(ctx context.Context, q audit.Query) ([]audit.Block, error) {
	since, until := auditRange(q)
	before := int64(math.MaxInt64)
	if !q.Before.LastAt.IsZero() {
		before = clock.Micros(q.Before.LastAt)
	}
	return s.auditBlocks(ctx, `SELECT `+auditColumns+` WHERE last_at >= $1 AND first_at <= $2 AND (last_at < $3 OR last_at = $3 AND (run, first_seq) <= ($4, $5))
 ORDER BY last_at DESC, run DESC, first_seq DESC LIMIT $6`, since, until, before, q.Before.Run, q.Before.FirstSeq, auditLimit(q))
}

// AuditRuns returns blocks in the order of run and sequence, after q.Before: the order of
// their chain.
func (s *Store) AuditRuns(ctx context.Context, q audit.Query) ([]audit.Block, error) {
	since, until := auditRange(q)
	return s.auditBlocks(ctx, `SELECT `+auditColumns+` WHERE last_at >= $1 AND first_at <= $2 AND (run, first_seq) > ($3, $4)
 ORDER BY run, first_seq LIMIT $5`, since, until, q.Before.Run, q.Before.FirstSeq, auditLimit(q))
}

func auditRange(q audit.Query) (since, until int64) {
	since, until = math.MinInt64, math.MaxInt64
	if !q.Since.IsZero() {
		since = clock.Micros(q.Since)
	}
	if !q.Until.IsZero() {
		until = clock.Micros(q.Until)
	}
	return since, until
}

func auditLimit(q audit.Query) int64 {
	if q.Limit < 1 || q.Limit > MaxAuditPage {
		return MaxAuditPage
	}
	return int64(q.Limit)
}

func (s *Store) auditBlocks(ctx context.Context, text string, args ...any) ([]audit.Block, error) {
	return database.Read(ctx, s, "reading the audit", scanBlock, text, args...)
}

// pruneAudit deletes blocks whose entries are all older, from the start of each run, so that
// the remaining chain is complete.
func (s *Store) pruneAudit(ctx context.Context, before time.Time) (deleted int, err error) {
	deleted, err = s.repeat(ctx, `DELETE FROM audit_blocks WHERE (run, first_seq) IN (
 SELECT run, first_seq FROM audit_blocks WHERE last_at < $1 ORDER BY last_at, run, first_seq LIMIT $2)`, []any{clock.Micros(before), int64(pruneRows)})
	s.stats.PrunedAudit.Add(int64(deleted))
	if err != nil {
		err = fmt.Errorf("audit log: %w", err)
	}
	return deleted, err
}
