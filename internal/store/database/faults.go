package database

import (
	"context"
	"crypto/tls"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// ErrConfig is wrapped by every error that only the operator can fix: an invalid URL, a login or
// database that does not exist, a schema newer than this program, a database of another fleet.
// Retrying does not help.
var ErrConfig = errors.New("the database cannot be used")

// Fault is the class of an error of the database.
type Fault int

const (
	FaultRow       Fault = iota // the values of the statement are refused
	FaultLost                   // the connection broke or was never established
	FaultTransient              // the server answers, but cannot work now
	FaultWrong                  // login, database or schema are not as expected
)

// FaultOf classifies an error of either driver. An unknown error is FaultRow: then only one row is
// lost, while a retry would never end.
func FaultOf(err error) Fault {
	var pg *pgconn.PgError
	var lite *sqlite.Error
	var connect *pgconn.ConnectError
	var cert *tls.CertificateVerificationError
	switch {
	case errors.As(err, &pg):
		return faultOfState(pg.Code)
	case errors.As(err, &lite):
		return faultOfResult(lite.Code())
	case errors.As(err, &cert):
		return FaultWrong
	case isBroken(err):
		return FaultLost
	case errors.As(err, &connect):
		return FaultWrong // the server was reached, but uses or requires something else
	default:
		return FaultRow
	}
}

// isBroken reports whether a connection ended, timed out or was never established.
func isBroken(err error) bool {
	var network net.Error
	var errno syscall.Errno
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) || errors.Is(err, sql.ErrTxDone) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, pgconn.ErrConnClosed) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, context.Canceled) || pgconn.Timeout(err) || pgconn.SafeToRetry(err) ||
		errors.As(err, &network) || errors.As(err, &errno)
}

// faultOfState classifies an SQLSTATE (PostgreSQL manual, appendix A).
func faultOfState(code string) Fault {
	switch {
	case strings.HasPrefix(code, "08"), // connection exception
		code == "57P01", code == "57P02", code == "57P03": // shutting down, crashed, starting up
		return FaultLost
	case strings.HasPrefix(code, "22"), // data exception
		strings.HasPrefix(code, "23"), // constraint violation
		strings.HasPrefix(code, "44"), // WITH CHECK OPTION violation
		strings.HasPrefix(code, "54"), // program limit, such as an index row too long
		strings.HasPrefix(code, "P0"): // raised by a trigger
		return FaultRow
	case strings.HasPrefix(code, "28"), // login
		strings.HasPrefix(code, "3D"), strings.HasPrefix(code, "3F"), // database or schema not found
		strings.HasPrefix(code, "42"), // rights, missing or foreign tables
		strings.HasPrefix(code, "0A"): // not supported
		return FaultWrong
	default: // 40 deadlock, 53 resources, 55 locks, 57 statement timeout, 58 system, 25 read-only standby
		return FaultTransient
	}
}

// faultOfResult classifies an SQLite result code (sqlite.org/rescode.html).
func faultOfResult(code int) Fault {
	switch code & 0xff {
	case sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_RANGE:
		return FaultRow
	case sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_READONLY,
		sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_ERROR:
		return FaultWrong
	default: // busy, disk full, input/output error
		return FaultTransient
	}
}

// Refusal converts an error during Open into one sentence that wraps ErrConfig.
func (db *DB) Refusal(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return fmt.Errorf("%w: %s: %s", ErrConfig, db.Where, OneLine(err))
	}
	var advice string
	switch {
	case strings.HasPrefix(pg.Code, "28"):
		advice = "check user and password in --database"
	case strings.HasPrefix(pg.Code, "3D"):
		advice = "create it or correct --database"
	case pg.Code == "42501":
		advice = "give the user the right to create tables there, or use another one"
	default:
		advice = "use a database of its own for fleetd"
	}
	return fmt.Errorf("%w: %s answers: %s (SQLSTATE %s); %s", ErrConfig, db.Where, pg.Message, pg.Code, advice)
}

// OneLine returns the text of an error without line breaks.
func OneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
