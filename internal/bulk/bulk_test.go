package bulk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/cleantext"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// core takes everything but what a test refuses.
type core struct {
	check, write func(fleet.ImportRow) error
	got          []fleet.ImportRow
	batches      []int
	fails        error // of the second batch that is written
}

func (c *core) CheckImport(_ context.Context, _ access.Principal, rows []fleet.ImportRow, _ bool, _ int64) ([]fleet.ImportResult, error) {
	out := make([]fleet.ImportResult, len(rows))
	for i, row := range rows {
		if c.check != nil {
			out[i].Err = c.check(row)
		}
	}
	return out, nil
}

func (c *core) Import(_ context.Context, _ access.Principal, rows []fleet.ImportRow, _ bool, committed func()) ([]fleet.ImportResult, error) {
	if c.batches = append(c.batches, len(rows)); len(c.batches) == 2 && c.fails != nil {
		return nil, c.fails
	}
	out := make([]fleet.ImportResult, len(rows))
	for i, row := range rows {
		out[i].Created = true
		out[i].FirstClient = row.ClientID == nil
		if c.write != nil {
			out[i].Err = c.write(row)
		}
		if out[i].Err == nil {
			c.got = append(c.got, row)
		}
	}
	committed()
	return out, nil
}

func ptr[T any](v T) *T { return &v }

// The same rows in both formats, in the order of their ids.
func TestRows(t *testing.T) {
	want := []fleet.ImportRow{
		{Device: "aa:bb:cc:dd:ee:ff", Name: ptr("Arm, left"), Prefer: ptr(devices.TransportMQTT), Serial: ptr("S1"), ClientID: ptr("c-1"),
			Labels: map[string]*string{"room": ptr("lab"), "old": nil}},
		{Device: "lamp", Name: ptr(""), Prefer: ptr(devices.TransportNone), ClientID: ptr("")},
		{Device: "odd", Name: ptr("=1+1"), Labels: map[string]*string{"room": ptr(""), "old": ptr("'t Hooft")}},
		{Device: "plain"},
	}
	for format, text := range map[Format]string{
		CSV: "\xEF\xBB\xBFid,name,transport,serial,client_id,label.room,label.old,state,admission\r\n" +
			"AA-BB-CC-DD-EE-FF,\"Arm, left\",mqtt,S1,c-1,lab,\\null,online,member\r\n" +
			"\r\nlamp,\\null,\\null,,\\null,,,,\nplain,,,,,,,offline,\nodd,'=1+1,,,,','t Hooft,,",
		NDJSON: "\xEF\xBB\xBF" + `{"id":"AA-BB-CC-DD-EE-FF","name":"Arm, left","transport":"mqtt","serial":"S1","client_id":"c-1","labels":{"room":"lab","old":null},"state":"online","tools":7,"admission":"member"}` + "\r\n\n" +
			`{"client_id":null,"id":"lamp","name":null,"transport_wanted":null}` + "\n" + ` {"id":"plain","state":{}} ` + "\n" + `{"id":"odd","name":"=1+1","labels":{"room":"","old":"'t Hooft"}}`,
	} {
		c := &core{}
		report, err := Import(t.Context(), c, access.Principal{}, strings.NewReader(text), Options{Format: format})
		if err != nil || report.Rows != 4 || report.Created != 4 || report.FirstClients != 2 || len(report.Faults) != 0 {
			t.Errorf("%s: %+v, %v", format, report, err)
		}
		if !reflect.DeepEqual(c.got, want) {
			t.Errorf("%s: %+v", format, c.got)
		}
	}
}

func TestFaults(t *testing.T) {
	long := strings.Repeat("x", 300)
	for _, tc := range []struct {
		name, text string
		format     Format
		want       []string // line:column detail
	}{
		{"empty", "", CSV, []string{"1:0 the file is empty"}},
		{"no id", "name\nx\n", CSV, []string{"1:0 the first line must contain the column names, including id"}},
		{"semicolons", "id;name\nx;y\n", CSV, []string{`1:0 the first line`, `1:1 unknown column "id;name"`}},
		{"columns", "id,lable.room,id,label.a b\nx,,,\n", CSV, []string{`1:4 unknown column "lable.room"`, `1:15 the column "id" occurs twice`, `1:18 the column "label.a b" must be label.KEY`}},
		{"id", "name,id\nx,a b\ny,\nz,a\n", CSV, []string{`2:3 id must be a MAC address or 1 to 64 of [a-z0-9_-], not "a b"`, "3:3 id must be"}},
		{"twice", "id\naabbccddeeff\nlamp\naa:bb:cc:dd:ee:ff\n", CSV, []string{"4:1 aa:bb:cc:dd:ee:ff is on line 2 already"}},
		{"cells", "id,name\na\nb,x,y\n", CSV, []string{"2:0 the row has 1 cells, but the first line has 2 columns", "3:0 the row has 3 cells"}},
		{"quotes", "id,name\na,\"x\"y\nb,x\"y\nc,\n", CSV, []string{"2:5 a quote in a quoted cell", "3:4 a cell with a quote must be in quotes"}},
		{"line breaks", "id,name,transport\na,\"x\ny\",tcp\nb,,tcp\n", CSV, []string{`3:4 transport must be websocket or mqtt, not "tcp"`, `4:4 transport must be`}},
		{"values", "id,name,serial,client_id,label.a\na," + long + "," + long + "," + long + "," + long + "\n", CSV,
			[]string{"2:3 name has 300 bytes, at most 128", "2:304 serial has 300", "2:605 client_id has 300", "2:906 label a has 300 bytes, at most 256"}},
		{"bytes", "id,name,label.a\na,\xff,\x00\n", CSV, []string{"2:3 name has a byte that is not valid UTF-8, or zero", "2:5 label a has a byte"}},
		{"revoked", "id,admission\na,revoked\nb,x\n", CSV, []string{"2:3 the device was revoked where it was exported", `3:3 admission must be member or revoked, not "x"`}},
		{"open quote", "id,name\na,\"" + strings.Repeat("line\n", 60_000), CSV, []string{"2:0 the row that starts here has more than 262144 bytes"}},
		{"json", "{\"id\":\"a\"}\n{\"id\":\"b\"\n[1]\n\n{\"id\":\"c\"} x\n", NDJSON,
			[]string{"2:9 the line must be one JSON object", "3:1 the line must be", "5:12 the line must be"}},
		{"members", `{"name":"x"}` + "\n" + `{"id":7}` + "\n" + `{"id":"a","nmae":"x","id":"b","name":1,"labels":{"a b":"x","c":1,"d":"x","d":"y"}}` + "\n" + `{"id":"b","labels":["x"]}`, NDJSON,
			[]string{"1:1 id is missing", "2:7 id must be a string", `3:18 unknown member "nmae"`, `3:27 "id" is given twice`, "3:38 name must be a string", `3:56 label "a b": keys are 1 to 63`,
				"3:64 label c must be a string, or null", `3:78 label "d" is given twice`, "4:20 labels must be an object of strings"}},
		{"many labels", `{"id":"a","labels":{` + labels(65) + `}}`, NDJSON, []string{"1:0 the row has 65 labels, at most 64"}},
		{"long line", `{"id":"a","name":"` + strings.Repeat("x", maxLine) + `"}`, NDJSON, []string{"1:0 the line has more than 262144 bytes"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := &core{}
			report, err := Import(t.Context(), c, access.Principal{}, strings.NewReader(tc.text), Options{Format: tc.format})
			if !errors.Is(err, ErrFaults) || len(c.got) > 0 || report.Created > 0 || report.Refused == 0 {
				t.Errorf("%+v, %v", report, err)
			}
			for i, f := range report.Faults {
				got := fmt.Sprintf("%d:%d %s", f.Line, f.Column, f.Detail)
				if i >= len(tc.want) || !strings.HasPrefix(got, tc.want[i]) {
					t.Errorf("fault %d: %s", i, got)
				}
			}
			if len(report.Faults) != len(tc.want) {
				t.Errorf("%d faults, want %d", len(report.Faults), len(tc.want))
			}
		})
	}
}

func labels(n int) string {
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf(`"k%d":"x"`, i))
	}
	return strings.Join(list, ",")
}

// What the core refuses is a fault of its line, before anything is written and
// after; the rows beside it are taken if the import is partial.
func TestRefusals(t *testing.T) {
	var text strings.Builder
	text.WriteString("name,id\n")
	for i := range 2500 {
		fmt.Fprintf(&text, "n,d%d\n", i)
	}
	text.WriteString("n,d7\n")
	refuse := func(ids ...devices.ID) func(fleet.ImportRow) error {
		return func(row fleet.ImportRow) error {
			if slices.Contains(ids, row.Device) {
				return devices.Errorf(devices.CodeForbidden, "not %s", row.Device)
			}
			return nil
		}
	}
	c := &core{check: refuse("d3", "d2001"), write: refuse("d100")}
	file := strings.NewReader(text.String())
	want := []api.LineFault{{Line: 5, Column: 3, Detail: "not d3"}, {Line: 2003, Column: 3, Detail: "not d2001"}, {Line: 2502, Column: 3, Detail: "d7 is on line 9 already"}}
	report, err := Import(t.Context(), c, access.Principal{}, file, Options{Format: CSV})
	if !errors.Is(err, ErrFaults) || len(c.got) > 0 || !slices.Equal(report.Faults, want) || report.Refused != 3 || report.Rows != 2501 {
		t.Errorf("%+v, %v", report, err)
	}
	want = slices.Insert(want, 1, api.LineFault{Line: 102, Column: 3, Detail: "not d100"})
	file.Reset(text.String())
	report, err = Import(t.Context(), c, access.Principal{}, file, Options{Format: CSV, Partial: true})
	if err != nil || len(c.got) != 2497 || report.Created != 2497 || report.Refused != 4 || !slices.Equal(report.Faults, want) {
		t.Errorf("%+v, %v", report, err)
	}
	if most := slices.Max(c.batches); most > importBatch {
		t.Errorf("%d rows in one transaction", most)
	}
	c = &core{fails: devices.ErrDatabase}
	file.Reset(strings.TrimSuffix(text.String(), "n,d7\n"))
	if report, err := Import(t.Context(), c, access.Principal{}, file, Options{Format: CSV}); !errors.Is(err, devices.ErrDatabase) || report.Created != importBatch {
		t.Errorf("%+v, %v", report, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	file.Reset(text.String())
	if _, err := Import(ctx, &core{}, access.Principal{}, file, Options{Format: CSV}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// A file's first line is bounded: each of its columns is compared with those before.
func TestManyColumns(t *testing.T) {
	report, err := Import(t.Context(), &core{}, access.Principal{}, strings.NewReader("id"+strings.Repeat(",x", 20_000)+"\n"), Options{Format: CSV})
	if !errors.Is(err, ErrFaults) || len(report.Faults) != 1 || !strings.Contains(report.Faults[0].Detail, "20001 columns") {
		t.Errorf("%d faults, %v: %.200v", len(report.Faults), err, report.Faults)
	}
}

// Of many faults the first are listed and all counted.
func TestManyFaults(t *testing.T) {
	report, err := Import(t.Context(), &core{}, access.Principal{}, strings.NewReader("id\n"+strings.Repeat("x y\n", 1500)), Options{Format: CSV})
	if !errors.Is(err, ErrFaults) || len(report.Faults) != MaxFaults || report.Refused != 1500 || report.Rows != 1500 {
		t.Errorf("%d faults, %d refused, %v", len(report.Faults), report.Refused, err)
	}
}

// A cell is the value again, whatever the value, and never a formula.
func TestCells(t *testing.T) {
	for _, value := range []string{"", "x", "=1+1", "+1", "-1", "@x", "\tx", "\rx", "'", "''", "'x", "'=x", "''=x", `\null`, `\`, `'\null`, "'t Hooft", "x=1", "\n=1", "＝1", "\u200b+1"} {
		text := Cell(value)
		if got := uncell(text); got != value || text == "" || text == cellNull || cleantext.IsFormula(text) {
			t.Errorf("%q: %q, read as %q", value, text, got)
		}
	}
	if got := uncell("'t Hooft"); got != "'t Hooft" {
		t.Errorf("a name loses its apostrophe: %q", got)
	}
}

// fleetOf is what an import left, as an export sees it.
func fleetOf(rows []fleet.ImportRow) Each {
	return func(f func([]devices.View) error) error {
		for page := range slices.Chunk(rows, 3) {
			var views []devices.View
			for _, row := range page {
				d := devices.Device{ID: row.Device, Admission: devices.AdmissionMember}
				for _, one := range []struct{ to, from *string }{{&d.Name, row.Name}, {&d.Serial, row.Serial}, {&d.ClientID, row.ClientID}} {
					if one.from != nil {
						*one.to = *one.from
					}
				}
				if row.Prefer != nil {
					d.Prefer = *row.Prefer
				}
				for key, value := range row.Labels {
					if value != nil {
						if d.Labels == nil {
							d.Labels = map[string]string{}
						}
						d.Labels[key] = *value
					}
				}
				views = append(views, devices.View{Device: d, State: devices.StateOffline})
			}
			if err := f(views); err != nil {
				return err
			}
		}
		return nil
	}
}

// normal is a row as a device would have it afterwards.
func normal(row fleet.ImportRow) fleet.ImportRow {
	for _, text := range []**string{&row.Name, &row.Serial, &row.ClientID} {
		if *text != nil && **text == "" {
			*text = nil
		}
	}
	if row.Prefer != nil && *row.Prefer == "" {
		row.Prefer = nil
	}
	out := map[string]*string{}
	for key, value := range row.Labels {
		if value != nil {
			out[key] = value
		}
	}
	if row.Labels = out; len(out) == 0 {
		row.Labels = nil
	}
	return row
}

func exporting(format Format, secrets bool) ExportOptions {
	return ExportOptions{Format: format, Secrets: secrets, Client: devices.ClientKey("key").Hash}
}

// again imports what an export of these rows writes.
func again(t *testing.T, format Format, rows []fleet.ImportRow) []fleet.ImportRow {
	t.Helper()
	var file bytes.Buffer
	if err := Export(&file, exporting(format, true), fleetOf(rows)); err != nil {
		t.Fatal(err)
	}
	c := &core{}
	if report, err := Import(t.Context(), c, access.Principal{}, bytes.NewReader(file.Bytes()), Options{Format: format}); err != nil {
		t.Fatalf("%+v, %v in %q", report, err, file.String())
	}
	return c.got
}

func TestExport(t *testing.T) {
	rows := []fleet.ImportRow{
		{Device: "a", Name: ptr("=SUM(A1)"), Labels: map[string]*string{"room": ptr(""), "b": ptr("x,\"y\"\nz")}},
		{Device: "b", Prefer: ptr(devices.TransportWebSocket), Serial: ptr("-1"), ClientID: ptr("'=x")},
		{Device: "c"}, {Device: "d", Name: ptr(`\null`)}, {Device: "e", Labels: map[string]*string{"a": ptr("é")}},
	}
	for _, format := range []Format{CSV, NDJSON} {
		got := again(t, format, rows)
		for i := range got {
			got[i] = normal(got[i])
		}
		if !reflect.DeepEqual(got, rows) {
			t.Errorf("%s: %+v", format, got)
		}
	}
	var file bytes.Buffer
	waiting := func(f func([]devices.View) error) error {
		return f([]devices.View{{Device: devices.Device{ID: "waits"}}, {Device: devices.Device{ID: "r", Admission: devices.AdmissionRevoked}}})
	}
	if err := Export(&file, exporting(CSV, false), waiting); err != nil || strings.Contains(file.String(), "waits") || !strings.Contains(file.String(), "r,,,,revoked") {
		t.Errorf("%s, %v", file.String(), err)
	}
	if !strings.HasPrefix(file.String(), "id,name,transport_wanted,serial,admission,state,offline_reason,offline_since,connection,node,board,") {
		t.Errorf("%s", file.String())
	}
	shown := fleetOf(rows[1:2])
	for _, format := range []Format{CSV, NDJSON} {
		for _, secrets := range []bool{false, true} {
			file.Reset()
			if err := Export(&file, exporting(format, secrets), shown); err != nil {
				t.Fatal(err)
			}
			text := file.String()
			// security: D20
			if strings.Contains(text, "client_id") != secrets || strings.Contains(text, "=x") != secrets || !strings.Contains(text, devices.ClientKey("key").Hash("'=x")) {
				t.Errorf("%s, secrets %t: %s", format, secrets, text)
			}
		}
	}
	file.Reset()
	wide := func(f func([]devices.View) error) error {
		labels := map[string]string{}
		for i := range MaxLabelColumns + 1 {
			labels[fmt.Sprint("k", i)] = "x"
		}
		return f([]devices.View{{Device: devices.Device{ID: "a", Admission: devices.AdmissionMember, Labels: labels}}})
	}
	file.Reset()
	if err := Export(&file, exporting(CSV, false), wide); devices.AsError(err).Code != devices.CodeBadRequest || file.Len() > 0 {
		t.Errorf("%v, %d bytes", err, file.Len())
	}
}

// Any file is read or has faults, and what is read survives an export.
func fuzz(f *testing.F, format Format) {
	f.Fuzz(func(t *testing.T, text []byte) {
		c := &core{}
		report, err := Import(t.Context(), c, access.Principal{}, bytes.NewReader(text), Options{Format: format})
		if err != nil && !errors.Is(err, ErrFaults) {
			t.Fatal(err)
		}
		if (report.Refused > 0) != errors.Is(err, ErrFaults) || (report.Refused > 0) != (len(report.Faults) > 0) {
			t.Fatalf("%+v, %v", report, err)
		}
		for _, fault := range report.Faults {
			if fault.Line < 1 || fault.Column < 0 || fault.Detail == "" {
				t.Errorf("%+v", fault)
			}
		}
		if _, err := Import(t.Context(), &core{}, access.Principal{}, bytes.NewReader(text), Options{Format: format, Partial: true}); err != nil && !errors.Is(err, ErrFaults) {
			t.Fatal(err)
		}
		if len(c.got) == 0 {
			return
		}
		var want []fleet.ImportRow
		for _, row := range c.got {
			want = append(want, normal(row))
		}
		got := again(t, format, c.got)
		for i := range got {
			got[i] = normal(got[i])
		}
		if !reflect.DeepEqual(unbroken(got), unbroken(want)) {
			t.Errorf("%+v, want %+v", got, want)
		}
	})
}

// unbroken leaves out what CSV cannot keep: the CR of a line break.
func unbroken(rows []fleet.ImportRow) []fleet.ImportRow {
	text := func(s *string) *string {
		if s == nil {
			return nil
		}
		return ptr(strings.ReplaceAll(*s, "\r\n", "\n"))
	}
	for i := range rows {
		r := &rows[i]
		r.Name, r.Serial, r.ClientID = text(r.Name), text(r.Serial), text(r.ClientID)
		for key, value := range r.Labels {
			r.Labels[key] = text(value)
		}
	}
	return rows
}

func FuzzCSV(f *testing.F) {
	f.Add([]byte("id,name,label.room\na,\"x\ny\",'=1\nb,\\null,\n"))
	f.Add([]byte("\xEF\xBB\xBFid\r\naabbccddeeff\r\n"))
	f.Add([]byte("id,state\na\"b,x\n\"c"))
	fuzz(f, CSV)
}

func FuzzNDJSON(f *testing.F) {
	f.Add([]byte(`{"id":"a","labels":{"room":"lab","old":null}}` + "\n" + `{"id":"b","name":"\u00e9\ud800"}`))
	f.Add([]byte("{\"id\":1}\n\n{\"id\":\"x\",\"id\":\"y\"}\n{"))
	fuzz(f, NDJSON)
}
