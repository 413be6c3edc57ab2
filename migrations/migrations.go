// Package migrations holds the database schema as numbered SQL files in the
// format of goose v3: one sequence and one text for Postgres and SQLite.
//
// A file that was released never changes; what comes later is a new file.
// Columns are TEXT, BIGINT or BOOLEAN. Times are microseconds since 1970 UTC,
// 0 if unknown. The collation "binary", byte order, is built into SQLite; on
// Postgres the code that applies the files creates it first.
package migrations

import "embed"

// FS holds the files, named NNNN_what.sql, in its root.
//
//go:embed *.sql
var FS embed.FS

// Lowest is the lowest schema version that a program must support to use the database after all migrations, as the last one of
// them that raises it says. While nodes run that do not support it, nothing is migrated.
const Lowest = 23

// First is the version of the first file. FirstCommit is the last commit whose fleetd migrates databases of older versions to it.
const (
	First       = 23
	FirstCommit = "a749a4a"
)
