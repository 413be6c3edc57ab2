package store

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"

	"fleetd/internal/devices"
)

// FuzzLabels checks the two promises on which the label filter stands: the
// text of labels contains the pattern of every filter that matches them, and
// labels come back as they were.
func FuzzLabels(f *testing.F) {
	f.Add("room", "kitchen", "note", `room":"kitchen`)
	f.Add(`a"b\`, "x=y", "", ",")
	f.Add("<&>", "\u2028\x00", "房间", "%_")
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2 string) {
		labels := map[string]string{k1: v1, k2: v2}
		for _, s := range []string{k1, v1, k2, v2} {
			if !utf8.ValidString(s) {
				return // becomes U+FFFD, in the filter too
			}
		}
		text := encodeLabels(labels)
		if !isText(text) {
			t.Fatalf("%q is not text", text)
		}
		back := decodeLabels(text)
		for k, v := range labels {
			for _, filter := range []string{k, k + "=" + v} {
				if hasLabel(labels, filter) && !strings.Contains(text, labelPattern(filter)) {
					t.Errorf("%s does not contain %s", text, labelPattern(filter))
				}
			}
			if back[k] != v {
				t.Errorf("%q came back as %q", v, back[k])
			}
		}
	})
}

// FuzzTools checks that a tool list survives whatever its bytes are.
func FuzzTools(f *testing.F) {
	f.Add([]byte(`[{"name":"a"}]`))
	f.Add([]byte("\x00"))
	f.Add([]byte("\xe4\xb8"))
	f.Fuzz(func(t *testing.T, tools []byte) {
		text, encoding := encodeTools(tools)
		if !isText(text) {
			t.Fatalf("%q is not text", text)
		}
		back, err := decodeTools(text, encoding)
		if err != nil || string(back) != string(tools) {
			t.Errorf("%q came back as %q, error %v", tools, back, err)
		}
		if s := clean(string(tools)); !isText(s) || isText(string(tools)) && s != string(tools) {
			t.Errorf("%q cleaned is %q", tools, s)
		}
	})
}

func TestStatementsFitBothDatabases(t *testing.T) {
	tables := newTables(time.Now)
	check := func(name string, columns int, take func(rows, most int) int, text func(int) string) {
		for _, most := range []int{8, 128} {
			left, statements := GroupRows, 0
			for left > 0 {
				n := take(left, most)
				if n < 1 || n > min(left, most) || n&(n-1) != 0 {
					t.Fatalf("%s: %d of %d rows", name, n, left)
				}
				// SQLite allows 32766 parameters, Postgres 65535.
				if got := strings.Count(text(n), "$"); got != n*columns || got > 32766 {
					t.Fatalf("%s: %d parameters for %d rows", name, got, n)
				}
				left -= n
				statements++
			}
			if statements > GroupRows/min(most, 8)+3 {
				t.Errorf("%s: %d statements for a group", name, statements)
			}
		}
	}
	check("devices", len(tables.devices.columns), tables.devices.take, tables.devices.text)
	check("presence", len(tables.presence.columns), tables.presence.take, tables.presence.text)
	check("catalogs", len(tables.catalogs.columns), tables.catalogs.take, tables.catalogs.text)
	check("history", len(tables.history.columns), tables.history.take, tables.history.text)
	check("exceptions", len(tables.exceptions.columns), tables.exceptions.take, tables.exceptions.text)
	if got, want := len(tables.devices.values(nil, new(deviceRow))), len(tables.devices.columns); got != want {
		t.Errorf("%d values for %d columns", got, want)
	}
	if got, want := len(tables.presence.values(nil, new(devices.Presence))), len(tables.presence.columns); got != want {
		t.Errorf("%d values for %d columns", got, want)
	}
}

func TestFaults(t *testing.T) {
	state := func(code string) error { return fmt.Errorf("writing: %w", &pgconn.PgError{Code: code}) }
	for _, test := range []struct {
		err  error
		want fault
	}{
		{state("23505"), faultRow}, {state("22021"), faultRow}, {state("54000"), faultRow}, {state("P0001"), faultRow},
		{state("57P01"), faultLost}, {state("57P03"), faultLost}, {state("08006"), faultLost},
		{state("57014"), faultTransient}, {state("40P01"), faultTransient}, {state("40001"), faultTransient},
		{state("53100"), faultTransient}, {state("53300"), faultTransient}, {state("25006"), faultTransient},
		{state("28P01"), faultWrong}, {state("3D000"), faultWrong}, {state("42P01"), faultWrong}, {state("42501"), faultWrong},
		{driver.ErrBadConn, faultLost}, {io.ErrUnexpectedEOF, faultLost}, {context.DeadlineExceeded, faultLost},
		{&net.OpError{Op: "dial", Err: errors.New("refused")}, faultLost}, {&net.DNSError{IsNotFound: true}, faultLost},
		{errors.New("cannot encode"), faultRow},
	} {
		if got := faultOf(test.err); got != test.want {
			t.Errorf("%v: %d, want %d", test.err, got, test.want)
		}
	}
	for code, want := range map[int]fault{
		19: faultRow, 2067: faultRow, 18: faultRow, 20: faultRow, // constraint, unique, too big, mismatch
		5: faultTransient, 517: faultTransient, 10: faultTransient, 13: faultTransient, // busy, snapshot, io, full
		14: faultWrong, 26: faultWrong, 11: faultWrong, 1: faultWrong, // cannot open, not a database, corrupt, error
	} {
		if got := faultOfResult(code); got != want {
			t.Errorf("SQLite %d: %d, want %d", code, got, want)
		}
	}
}
