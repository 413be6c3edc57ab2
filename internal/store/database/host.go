package database

import (
	"context"
	"encoding/json"
	"time"
)

// Host is the store, which watches the database for its parts.
type Host interface {
	Database() *DB
	// Usable returns nil while the database can be used, else why not. It does no I/O.
	Usable() error
	// Reading starts a read, of ReadTimeout at most: it fails at once while the database
	// is away.
	Reading(ctx context.Context) (context.Context, context.CancelFunc, error)
	// UseError wraps an error met while using the database, and tells the watcher of it
	// where it should look.
	UseError(ctx context.Context, doing string, err error) error
}

// FingerprintKey names, in the table fleet, the secret that a database belongs to.
const FingerprintKey = "secret_fingerprint"

// ReadTimeout bounds a read where its caller does not.
const ReadTimeout = 5 * time.Second

// IDSet is a condition that holds for these ids, sorted, and its argument: one
// statement for any number.
func IDSet(postgres bool, column, place string, ids []string) (condition string, arg any) {
	if postgres {
		return column + " = ANY(CAST(" + place + " AS TEXT[]))", ids
	}
	text, err := json.Marshal(ids)
	if err != nil {
		panic(err) // strings can always be encoded
	}
	return column + " IN (SELECT value FROM json_each(" + place + "))", string(text)
}
