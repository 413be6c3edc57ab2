package database

import (
	"io/fs"
	"strconv"
	"strings"

	"fleetd/migrations"
)

// SchemaVersion is the newest schema that this program knows.
func SchemaVersion() int64 {
	newest := int64(versionFilled)
	names, _ := fs.Glob(migrations.FS, "*.sql") // the pattern is right
	for _, name := range names {
		number, _, _ := strings.Cut(name, "_")
		if n, err := strconv.ParseInt(number, 10, 64); err == nil {
			newest = max(newest, n)
		}
	}
	return newest
}
