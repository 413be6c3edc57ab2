package database

import (
	"io/fs"
	"strconv"
	"strings"

	"fleetd/migrations"
)

// SchemaVersion returns the newest schema version that this program supports.
func SchemaVersion() int64 {
	newest := int64(versionFilled)
	names, _ := fs.Glob(migrations.FS, "*.sql") // the pattern is valid
	for _, name := range names {
		number, _, _ := strings.Cut(name, "_")
		if n, err := strconv.ParseInt(number, 10, 64); err == nil {
			newest = max(newest, n)
		}
	}
	return newest
}
