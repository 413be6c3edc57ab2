package database

import (
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"fleetd/migrations"
)

// CheckMigratable returns an error for a schema version from which this program does not migrate.
func CheckMigratable(version int64) error {
	if version >= migrations.First {
		return nil
	}
	return fmt.Errorf("its schema version is %d, and this fleetd migrates only from %d on; use it with fleetd of commit %s once, and then with this one", version, migrations.First, migrations.FirstCommit)
}

// SchemaVersion returns the newest schema version that this program supports.
func SchemaVersion() int64 {
	newest := int64(migrations.First)
	names, _ := fs.Glob(migrations.FS, "*.sql") // the pattern is valid
	for _, name := range names {
		number, _, _ := strings.Cut(name, "_")
		if n, err := strconv.ParseInt(number, 10, 64); err == nil {
			newest = max(newest, n)
		}
	}
	return newest
}
