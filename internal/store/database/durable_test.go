package database

import (
	"path/filepath"
	"testing"
)

// A task that ran must not run again after a power failure: on SQLite each commit reaches the disk.
func TestCommitsReachTheDisk(t *testing.T) {
	db, err := Open("sqlite:"+filepath.Join(t.TempDir(), FileName), "")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}()
	const full = 2
	var mode int
	for _, pool := range []Queryer{db.Jobs, db.Ledger, db.Write} {
		if _, err := Collect(t.Context(), pool, func(scan func(...any) error) (none struct{}, err error) {
			return none, scan(&mode)
		}, `PRAGMA synchronous`); err != nil || mode != full {
			t.Errorf("synchronous is %d, %v", mode, err)
		}
	}
}
