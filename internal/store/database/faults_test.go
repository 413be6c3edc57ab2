package database

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestFaults(t *testing.T) {
	state := func(code string) error { return fmt.Errorf("writing: %w", &pgconn.PgError{Code: code}) }
	for _, test := range []struct {
		err  error
		want Fault
	}{
		{state("23505"), FaultRow}, {state("22021"), FaultRow}, {state("54000"), FaultRow}, {state("P0001"), FaultRow},
		{state("57P01"), FaultLost}, {state("57P03"), FaultLost}, {state("08006"), FaultLost},
		{state("57014"), FaultTransient}, {state("40P01"), FaultTransient}, {state("40001"), FaultTransient},
		{state("53100"), FaultTransient}, {state("53300"), FaultTransient}, {state("25006"), FaultTransient},
		{state("28P01"), FaultWrong}, {state("3D000"), FaultWrong}, {state("42P01"), FaultWrong}, {state("42501"), FaultWrong},
		{driver.ErrBadConn, FaultLost}, {io.ErrUnexpectedEOF, FaultLost}, {context.DeadlineExceeded, FaultLost},
		{&net.OpError{Op: "dial", Err: errors.New("refused")}, FaultLost}, {&net.DNSError{IsNotFound: true}, FaultLost},
		{errors.New("cannot encode"), FaultRow},
	} {
		if got := FaultOf(test.err); got != test.want {
			t.Errorf("%v: %d, want %d", test.err, got, test.want)
		}
	}
	for code, want := range map[int]Fault{
		19: FaultRow, 2067: FaultRow, 18: FaultRow, 20: FaultRow, // constraint, unique, too big, mismatch
		5: FaultTransient, 517: FaultTransient, 10: FaultTransient, 13: FaultTransient, // busy, snapshot, io, full
		14: FaultWrong, 26: FaultWrong, 11: FaultWrong, 1: FaultWrong, // cannot open, not a database, corrupt, error
	} {
		if got := faultOfResult(code); got != want {
			t.Errorf("SQLite %d: %d, want %d", code, got, want)
		}
	}
}
