package storetest

import (
	"embed"
	"io/fs"
	"testing"
)

// firstSchema is the schema of the first release; it never changes.
//
//go:embed testdata/first/*.sql
var firstSchema embed.FS

func firstFS(t testing.TB) fs.FS {
	t.Helper()
	sub, err := fs.Sub(firstSchema, "testdata/first")
	if err != nil {
		t.Fatal(err)
	}
	return sub
}
