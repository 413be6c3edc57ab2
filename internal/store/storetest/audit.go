package storetest

import (
	"bytes"
	"fmt"
	"reflect"
	"testing"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/store"
)

// auditRun makes the blocks of one run, a minute apart, chained.
func auditRun(run string, blocks int, from time.Time) []audit.Block {
	var out []audit.Block
	var previous audit.Hash
	for i := range blocks {
		at := from.Add(time.Duration(i) * time.Minute)
		b := audit.Block{Run: run, Node: "n-1", FirstSeq: int64(2*i + 1), LastSeq: int64(2*i + 2), FirstAt: at, LastAt: at.Add(time.Second), Previous: previous}
		for seq := b.FirstSeq; seq <= b.LastSeq; seq++ {
			b.Entries = fmt.Appendf(b.Entries, `{"seq":%d,"at":"2026-03-01T12:00:00.000000Z","kind":"call","action":"\u0000 é"}`+"\n", seq)
		}
		b.Hash = b.Sum(nil)
		previous = b.Hash
		out = append(out, b)
	}
	return out
}

func testAudit(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	a, b := auditRun("run-a", 5, start), auditRun("run-b", 5, start.Add(30*time.Second))
	for i := range a {
		for _, block := range []*audit.Block{&a[i], &b[i], &a[i]} { // the last is there already
			if err := s.SaveAuditBlock(t.Context(), block); err != nil {
				t.Fatal(err)
			}
		}
	}
	changed := a[0]
	changed.Entries = []byte("other\n")
	if err := s.SaveAuditBlock(t.Context(), &changed); err != nil {
		t.Fatal(err)
	}
	read := func(query func() ([]audit.Block, error)) []audit.Block {
		t.Helper()
		blocks, err := query()
		if err != nil {
			t.Fatal(err)
		}
		return blocks
	}

	var runs []audit.Block // page by page, in the order in which they hang together
	var verifier audit.Verifier
	for place := (audit.Place{}); ; {
		page := read(func() ([]audit.Block, error) { return s.AuditRuns(t.Context(), audit.Query{Before: place, Limit: 3}) })
		for i := range page {
			verifier.Add(&page[i])
		}
		runs = append(runs, page...)
		if len(page) < 3 {
			break
		}
		last := page[len(page)-1]
		place = audit.Place{Run: last.Run, FirstSeq: last.FirstSeq}
	}
	if !reflect.DeepEqual(runs, append(a[:5:5], b...)) {
		t.Errorf("%+v", runs)
	}
	if r := verifier.Report(); !r.Intact || r.Runs != 2 || r.Blocks != 10 || r.Entries != 20 {
		t.Errorf("%+v", r)
	}

	newest := read(func() ([]audit.Block, error) { return s.AuditBlocks(t.Context(), audit.Query{Limit: 3}) })
	if len(newest) != 3 || newest[0].Hash != b[4].Hash || newest[1].Hash != a[4].Hash || newest[2].Hash != b[3].Hash {
		t.Errorf("newest first: %+v", newest)
	}
	last := newest[2] // the place itself is part of what follows
	rest := read(func() ([]audit.Block, error) {
		return s.AuditBlocks(t.Context(), audit.Query{Before: audit.Place{LastAt: last.LastAt, Run: last.Run, FirstSeq: last.FirstSeq}})
	})
	if len(rest) != 8 || rest[0].Hash != last.Hash || rest[7].Hash != a[0].Hash {
		t.Errorf("after a position: %d", len(rest))
	}
	some := read(func() ([]audit.Block, error) {
		return s.AuditBlocks(t.Context(), audit.Query{Since: start.Add(time.Minute), Until: start.Add(2 * time.Minute)})
	})
	if len(some) != 3 || some[0].Hash != a[2].Hash || some[2].Hash != a[1].Hash {
		t.Errorf("within a time: %+v", some)
	}

	db.Exec(t, `UPDATE audit_blocks SET entries = replace(entries, 'call', 'cell') WHERE run = 'run-a' AND first_seq = 3`)
	db.Exec(t, `DELETE FROM audit_blocks WHERE run = 'run-b' AND first_seq = 5`)
	verifier = audit.Verifier{}
	for _, block := range read(func() ([]audit.Block, error) { return s.AuditRuns(t.Context(), audit.Query{}) }) {
		if bytes.Contains(block.Entries, []byte("cell")) != (block.Sum(nil) != block.Hash) {
			t.Errorf("%+v", block)
		}
		verifier.Add(&block)
	}
	if r := verifier.Report(); r.Intact || len(r.Faults) != 2 {
		t.Errorf("a changed block and a missing one: %q", r.Faults)
	}
}

func testAuditPrune(t *testing.T, db Database) {
	var c movedClock
	s := openStore(t, db.URL, store.Clock(c.now))
	blocks := auditRun("run-a", 700, start) // more than one statement deletes
	for i := range blocks {
		if err := s.SaveAuditBlock(t.Context(), &blocks[i]); err != nil {
			t.Fatal(err)
		}
	}
	c.advance(day + 600*time.Minute)
	if p := prune(t, s, store.Retention{Catalogs: day}); p.Audit != 0 {
		t.Errorf("without a retention %d are deleted", p.Audit)
	}
	c.advance(2 * store.PruneEvery)
	if p := prune(t, s, store.Retention{Catalogs: day, Audit: day + 2*store.PruneEvery}); p.Audit != 600 {
		t.Errorf("%d are deleted", p.Audit)
	}
	left, err := s.AuditRuns(t.Context(), audit.Query{Limit: 1})
	if err != nil || len(left) != 1 || left[0].FirstSeq != 1201 {
		t.Errorf("%+v %v", left, err)
	}
}
