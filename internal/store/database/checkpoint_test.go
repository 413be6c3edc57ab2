package database

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"fleetd/internal/devicetest"
)

func TestLogOfSQLiteIsCopiedAndBeginsAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), FileName)
	db, err := Open("sqlite:"+path, "")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}()
	write := func(text string, args ...any) {
		t.Helper()
		release, err := db.Turn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer release()
		if _, err := db.Ledger.ExecContext(t.Context(), text, args...); err != nil {
			t.Fatal(err)
		}
	}
	write(`CREATE TABLE t (b BLOB)`)
	most := int64(0)
	for range 60 { // 60,000 pages: more than a COMMIT copies
		write(`WITH RECURSIVE s (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < 1000) INSERT INTO t SELECT zeroblob(4000) FROM s`)
		info, err := os.Stat(path + "-wal")
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, info.Size())
	}
	if pages := most / 4096; pages > 36_000 {
		t.Errorf("the log had %d pages", pages)
	}
	var pages, copied int
	defer func() {
		if t.Failed() {
			t.Logf("%d pages are in the log, %d of them copied", pages, copied)
		}
	}()
	devicetest.Eventually(t, "the log is copied and begins again", func() bool {
		write(`INSERT INTO t VALUES (zeroblob(1))`)
		if pages, copied, err = db.checkpoints.pragma(context.Background(), "NOOP"); err != nil {
			t.Fatal(err)
		}
		return pages-copied < 2*checkpointPages && pages < 2*restartPages
	})
}
