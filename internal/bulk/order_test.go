package bulk

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// taker keeps what an import writes; it refuses to write one device.
type taker struct {
	rows    []fleet.ImportRow
	refuses devices.ID
}

func (c *taker) CheckImport(_ context.Context, _ access.Principal, rows []fleet.ImportRow, _ bool, _ int64) ([]fleet.ImportResult, error) {
	return make([]fleet.ImportResult, len(rows)), nil
}

func (c *taker) Import(_ context.Context, _ access.Principal, rows []fleet.ImportRow, _ bool, _ func()) ([]fleet.ImportResult, error) {
	out := make([]fleet.ImportResult, len(rows))
	for i, row := range rows {
		if row.Device == c.refuses {
			out[i].Err = devices.Errorf(devices.CodeForbidden, "refused")
			continue
		}
		out[i].Created = true
		c.rows = append(c.rows, row)
	}
	return out, nil
}

const mark = "\xEF\xBB\xBF"

func TestRowsAreWrittenInTheOrderOfTheirIDs(t *testing.T) {
	for _, test := range []struct {
		name    string
		format  Format
		file    string
		refused int64
		fault   api.LineFault // of the row zz
	}{
		{"CSV", CSV, "id,name\nb,B\na,A\nzz,Z\nc,C\n", 1, api.LineFault{Line: 4, Column: 1, Detail: "refused"}},
		{"CSV without an end, with CRLF and a mark", CSV, mark + "name,id\r\nB,b\r\n\r\n\r\nC,c\r\nZ,zz\r\nA,a", 1, api.LineFault{Line: 6, Column: 3, Detail: "refused"}},
		{"CSV with line breaks in cells", CSV, "id,name,serial\nb,B,\"x\ny\"\nc,C,\"\"\"\nq\"\nzz,Z,\n\na,A,", 1, api.LineFault{Line: 6, Column: 1, Detail: "refused"}},
		{"CSV with other faults", CSV, "id,name\nb,B\nx y,X\nzz,Z\nc,C\na,A,extra\na,A\nb,again\n", 4, api.LineFault{Line: 4, Column: 1, Detail: "refused"}},
		{"NDJSON", NDJSON, "{\"id\":\"b\",\"name\":\"B\"}\n{\"id\":\"a\",\"name\":\"A\"}\n{\"id\":\"zz\",\"name\":\"Z\"}\n{\"id\":\"c\",\"name\":\"C\"}", 1, api.LineFault{Line: 3, Column: 7, Detail: "refused"}},
		{"NDJSON with blank lines, a mark and faults", NDJSON, mark + "\n  \n{\"id\":\"c\",\"name\":\"C\"}\r\n[]\n\n{\"id\":\"zz\"}\n{\"name\":\"B\", \"id\":\"b\"}\n{\"id\":\"a\",\"name\":\"A\"}\n", 2, api.LineFault{Line: 6, Column: 7, Detail: "refused"}},
		{"NDJSON with a mark before the first", NDJSON, mark + "{\"id\":\"zz\"}\n{\"id\":\"c\",\"name\":\"C\"}\n{\"id\":\"b\",\"name\":\"B\"}\n{\"id\":\"a\",\"name\":\"A\"}\n", 1, api.LineFault{Line: 1, Column: 7, Detail: "refused"}},
		{"NDJSON with a long line", NDJSON, "{\"id\":\"c\",\"name\":\"C\"}\n{\"id\":\"b\"," + strings.Repeat(" ", 100<<10) + "\"name\":\"B\"}\n{\"id\":\"zz\"}\n{\"id\":\"a\",\"name\":\"A\"}\n", 1, api.LineFault{Line: 3, Column: 7, Detail: "refused"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			core := &taker{refuses: "zz"}
			report, err := Import(t.Context(), core, access.Principal{}, strings.NewReader(test.file), Options{Format: test.format, Partial: true})
			if err != nil {
				t.Fatal(err, report)
			}
			var got []string
			for _, row := range core.rows {
				got = append(got, string(row.Device)+*row.Name)
			}
			if !slices.Equal(got, []string{"aA", "bB", "cC"}) {
				t.Errorf("wrote %q", got)
			}
			if report.Created != 3 || report.Refused != test.refused || !slices.Contains(report.Faults, test.fault) {
				t.Errorf("%+v", report)
			}
		})
	}
}

func TestManyRowsAreWrittenOnce(t *testing.T) {
	for _, format := range []Format{CSV, NDJSON} {
		var b strings.Builder
		if format == CSV {
			b.WriteString("id,name\n")
		}
		var want []string
		for _, i := range rand.Perm(5000) {
			id := fmt.Sprintf("x-%0*d", 1+i%60, i)
			want = append(want, id)
			if format == CSV {
				fmt.Fprintf(&b, "%s,\"%s\nx\"\n", id, id)
			} else {
				fmt.Fprintf(&b, "{\"id\":%q,\"name\":\"%s\\nx\"}\n", id, id)
			}
		}
		slices.Sort(want)
		core := &taker{}
		if report, err := Import(t.Context(), core, access.Principal{}, strings.NewReader(b.String()), Options{Format: format}); err != nil || report.Created != 5000 {
			t.Fatal(report, err)
		}
		var got []string
		for _, row := range core.rows {
			if *row.Name != string(row.Device)+"\nx" {
				t.Fatalf("%s has the name %q", row.Device, *row.Name)
			}
			got = append(got, string(row.Device))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: not each row once, in order", format)
		}
	}
}

func TestFileWithFaultsIsNotWritten(t *testing.T) {
	core := &taker{}
	if _, err := Import(t.Context(), core, access.Principal{}, strings.NewReader("id\nb\nb\n"), Options{Format: CSV}); !errors.Is(err, ErrFaults) || core.rows != nil {
		t.Error(err, core.rows)
	}
}
