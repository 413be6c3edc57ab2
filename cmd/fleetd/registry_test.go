package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestDevicesSelect(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/devices?limit=1000&select=room%3Dlab&sort=offline_since": `{"items":[{"id":"a","state":"offline","offline_reason":"timeout","mcp":{"state":"unknown"}}],"next_cursor":""}`,
		"GET /v1/devices?limit=1000&select=room%3D":                       `{"status":400,"code":"bad_request","detail":"select: position 5: expected a value"}`,
		"GET /v1/devices?limit=1000&select=lab":                           `{"items":[],"next_cursor":""}`,
		"GET /v1/devices?limit=1000": `{"items":[{"id":"a","name":"=1+1","state":"offline","offline_reason":"timeout","offline_since":"2026-08-01T11:00:00Z","node":"n","board":"@b, c","firmware":"2.4.2",
			"mcp":{"tools":7,"catalog_state":"stale"},"labels":{"room":"lab","floor":"1"},"first_seen":"2026-08-01T00:00:00Z","last_seen":"2026-08-01T11:00:00Z"}],"next_cursor":""}`,
	})
	f.status["GET /v1/devices?limit=1000&select=room%3D"] = 400
	f.run("devices", "room=lab", "--sort", "offline_since").is(t, exitOK,
		"ID  NAME  STATE              TRANSPORT  BOARD  FIRMWARE  TOOLS    LAST SEEN\n"+
			"a   -     offline (timeout)  -          -      -         unknown  -\n", "")
	f.run("devices", "lab").is(t, exitOK, "no device has the label lab; `fleetd devices show lab` shows one device\n", "")
	f.run("devices", "room=").is(t, exitFailed, "", "fleetd: <select>: position 5: expected a value (bad_request)\n")
	f.run("devices", "--csv").is(t, exitOK, "id,name,state,offline_reason,offline_since,transport,node,board,firmware,tools,catalog_state,first_seen,last_seen,labels\n"+
		`a,'=1+1,offline,timeout,2026-08-01T11:00:00Z,,n,"'@b, c",2.4.2,7,stale,2026-08-01T00:00:00Z,2026-08-01T11:00:00Z,"floor=1,room=lab"`+"\n", "")
	for _, args := range [][]string{{"--sort", "board"}, {"--csv", "--json"}} {
		if got := f.run(append([]string{"devices"}, args...)...); got.code != exitFailed || got.stdout != "" {
			t.Errorf("%v: %+v", args, got)
		}
	}
}

func TestDevicesShow(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/devices/a": `{"id":"a","name":"lamp\u001b[31m","labels":{"room":"lab","floor":"1"},"state":"offline","offline_reason":"timeout","offline_since":"2026-08-01T11:00:00Z",
			"transport":"","node":"n-1","board":"otto","firmware":"2.4.2","client":"aa1111111111","client_id":"c1","transport_wanted":"mqtt",
			"pending":[{"client":"bb2222222222","address":"192.0.2.7","since":"2026-08-01T11:30:00Z"}],"session_id":"",
			"mcp":{"state":"unknown","tools":7,"catalog":"ab12","catalog_state":"stale","partial":true,"error":"no answer"},"audio":{"open":false},
			"credentials":{"generation":2,"previous_until":"2026-09-01T00:00:00Z"},"first_seen":"2026-07-01T12:00:00Z","last_seen":"2026-08-01T11:00:00Z","revision":42}`,
		"GET /v1/devices/b": `{"id":"b","state":"online","transport":"mqtt","node":"n-1","session_id":"s","mcp":{"state":"ready","tools":2,"catalog_state":"ready"},
			"audio":{"open":true,"packets":9,"dropped":1},"last_seen":"2026-08-01T11:59:00Z","connected_at":"2026-08-01T10:00:00Z"}`,
	})
	f.run("devices", "show", "a").is(t, exitOK, strings.Join([]string{
		"Device       a",
		"Name         lamp",
		"State        offline (timeout) since 2026-08-01T11:00:00Z (60m ago)",
		"Wanted       mqtt",
		"Node         n-1",
		"Board        otto",
		"Firmware     2.4.2",
		"Client       aa1111111111",
		"Client-Id    c1",
		"             bb2222222222 waits for approval since 2026-08-01T11:30:00Z (30m ago), from 192.0.2.7",
		"Credentials  generation 2; older ones are valid until 2026-09-01T00:00:00Z",
		"Labels       floor=1,room=lab",
		"Tools        7, stale: known from before, not confirmed on this connection; the device's list could not be read to its end; no answer",
		"Catalog      ab12",
		"First seen   2026-07-01T12:00:00Z (31d ago)",
		"Last seen    2026-08-01T11:00:00Z (60m ago)",
		"Revision     42",
		"",
	}, "\n"), "")
	f.run("devices", "show", "b").is(t, exitOK, strings.Join([]string{
		"Device       b",
		"Name         -",
		"State        online since 2026-08-01T10:00:00Z (2h ago)",
		"Transport    mqtt",
		"Node         n-1",
		"Board        -",
		"Firmware     -",
		"Client       -",
		"Credentials  generation 0",
		"Labels       -",
		"Tools        2, ready",
		"Session      s",
		"Audio        open, 9 packets, 1 dropped",
		"First seen   -",
		"Last seen    now",
		"",
	}, "\n"), "")
	if got := f.run("devices", "show", "b", "--json"); got.code != exitOK || !strings.HasPrefix(got.stdout, "{\n  \"id\": \"b\",") {
		t.Errorf("%+v", got)
	}
}

// Labels of one device are merged by the server.
func TestEditDevice(t *testing.T) {
	var matches, bodies []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/devices/a" {
			t.Errorf("%s %s", r.Method, r.RequestURI)
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		matches, bodies = append(matches, r.Header.Get("If-Match")), append(bodies, string(body))
		if r.Header.Get("If-Match") != "" {
			w.WriteHeader(http.StatusPreconditionFailed)
			fmt.Fprint(w, `{"status":412,"code":"conflict","detail":"the device has changed"}`)
			return
		}
		fmt.Fprint(w, `{"id":"a","applies":"next boot"}`)
	}))
	defer server.Close()
	run := func(args ...string) outcome {
		a, stdout, stderr := newApp()
		code := a.run(t.Context(), append([]string{"devices", "edit", "--api", server.URL, "a"}, args...))
		return outcome{code, stdout.String(), stderr.String()}
	}
	run("room=lab", "x=", "floor-", "--name", "arm", "--transport=").is(t, exitOK, "a changed; the transport applies at its next boot\n", "")
	if want := `{"name":"arm","labels":{"floor":null,"room":"lab","x":""},"transport_wanted":""}`; len(bodies) != 1 || bodies[0] != want {
		t.Errorf("%s, want %s", bodies, want)
	}
	run("--name=").is(t, exitOK, "a changed; the transport applies at its next boot\n", "")
	run("room=lab", "--if-match", "3").is(t, exitRefused, "", "fleetd: a is no longer at revision 3; nothing was changed: the device has changed (conflict)\n")
	if want := []string{"", "", `"3"`}; !reflect.DeepEqual(matches, want) || bodies[1] != `{"name":""}` {
		t.Errorf("If-Match %q, bodies %q", matches, bodies)
	}
}

func TestEditSelection(t *testing.T) {
	const patch = `PATCH /v1/devices?select=room%3Dlab {"labels":{"floor":null,"room":"hall"}}`
	f := newAPI(t, map[string]string{
		"GET /v1/fleet?select=room%3Dlab":        `{"total":3}`,
		"GET /v1/fleet?select=room%3Dcellar":     `{"total":0}`,
		"GET /v1/fleet?select=device%3Da":        `{"total":1}`,
		"PATCH /v1/devices?select=room%3Dlab":    `{"matched":3,"changed":2}`,
		"PATCH /v1/devices?select=room%3Dcellar": `{"matched":0,"changed":0}`,
		"PATCH /v1/devices?select=device%3Da":    `{"matched":1,"changed":1}`,
	})
	f.run("devices", "edit", "room=lab", "room=hall", "floor-").is(t, exitRefused, "", "fleetd: 3 devices match; nothing was changed: add --yes to change them\n")
	f.run("devices", "edit", "room=cellar", "room=hall").is(t, exitOK, "no device matches; nothing was changed\n", "")
	f.run("devices", "edit", "room=cellar", "room=hall", "--json").is(t, exitOK, "{\n  \"matched\": 0,\n  \"changed\": 0\n}\n", "")
	f.run("devices", "edit", "device=a", "--transport", "mqtt").is(t, exitOK, "1 of 1 device changed; the transport applies at the next boot\n", "")
	before := len(f.requests())
	f.run("devices", "edit", "room=lab", "room=hall", "floor-", "--yes").is(t, exitOK, "2 of 3 devices changed\n", "")
	if asked := f.requests()[before:]; !reflect.DeepEqual(asked, []string{patch}) {
		t.Errorf("asked %q", asked)
	}
	for answer, code := range map[string]int{"y\n": exitOK, "n\n": exitRefused, "": exitRefused} {
		a, _, stderr := newApp()
		a.environ = []string{"FLEETD_API=" + f.url, "FLEETD_TOKEN=t0ken"}
		a.stdin, a.interactive = strings.NewReader(answer), true
		if got := a.run(t.Context(), []string{"devices", "edit", "room=lab", "room=hall", "floor-"}); got != code || !strings.HasPrefix(stderr.String(), "3 devices match room=lab; change them? [y/N] ") {
			t.Errorf("%q: status %d, %s", answer, got, stderr)
		}
	}
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"a"}, "nothing to change: give KEY=VALUE, KEY-, --name or --transport"},
		{[]string{"a", "room"}, `"room" is not KEY=VALUE or KEY-`},
		{[]string{"a", "room=1", "room-"}, `"room-": each label needs a key, and each key occurs once`},
		{[]string{"a", "=1"}, `"=1": each label needs a key, and each key occurs once`},
		{[]string{"room=lab", "--name", "x"}, `--name is for one device, and "room=lab" is a selection`},
		{[]string{"!room", "x=1", "--if-match", "3"}, `--if-match is for one device, and "!room" is a selection`},
	} {
		f.run(append([]string{"devices", "edit"}, tc.args...)...).is(t, exitFailed, "", "fleetd: "+tc.want+"\n")
	}
}

func TestDevicesImport(t *testing.T) {
	var request, kind, body string
	var length int64
	status, answer := 200, ""
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		content, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		request, kind, body, length = r.Method+" "+r.RequestURI, r.Header.Get("Content-Type"), string(content), r.ContentLength
		w.WriteHeader(status)
		fmt.Fprint(w, answer)
	}))
	defer server.Close()
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	run := func(stdin string, args ...string) outcome {
		a, stdout, stderr := newApp()
		a.stdin = strings.NewReader(stdin)
		code := a.run(t.Context(), append([]string{"devices", "import", "--api", server.URL}, args...))
		return outcome{code, stdout.String(), stderr.String()}
	}
	const csv, ndjson = "id,name\na,lamp\n", `{"id":"a"}` + "\n"
	answer = `{"rows":3,"created":1,"changed":1,"unchanged":1,"refused":0,"first_clients":2,"faults":[]}`
	run("", write("d.csv", csv)).is(t, exitOK, "3 rows: 1 created, 1 changed, 1 unchanged\n2 rows have no client_id: the first client that comes with one of these ids is admitted\n", "")
	if request != "POST /v1/devices/import" || kind != "text/csv" || body != csv || length != int64(len(csv)) {
		t.Errorf("%s with %s of %d bytes: %q", request, kind, length, body)
	}
	answer = `{"rows":3,"created":1,"refused":2,"faults":[{"line":3,"column":7,"detail":"a label key may have 63 bytes\u001b"},{"line":4,"column":0,"detail":"the id a is in line 2, too"}]}`
	run(ndjson, "-", "--partial", "--replace-client").is(t, exitOK, "3 rows: 1 created, 0 changed, 0 unchanged, 2 not imported\n",
		"3:7: a label key may have 63 bytes\n4: the id a is in line 2, too\n")
	if request != "POST /v1/devices/import?partial=true&replace_client=true" || kind != "application/x-ndjson" || body != ndjson || length != -1 {
		t.Errorf("%s with %s of %d bytes: %q", request, kind, length, body)
	}
	status, answer = 422, `{"status":422,"code":"invalid_arguments","detail":"3 rows have a fault","refused":3,"faults":[{"line":2,"column":1,"detail":"no id"}]}`
	run("", write("devices.jsonl", ndjson)).is(t, exitRefused, "", "2:1: no id\nand 2 more\n"+
		"fleetd: nothing was imported; correct these lines, or import the others with --partial: 3 rows have a fault (invalid_arguments)\n")
	if kind != "application/x-ndjson" {
		t.Errorf("by its name: %s", kind)
	}
	status, answer = 403, `{"status":403,"code":"forbidden","detail":"no"}`
	run("", write("devices", "\uFEFF\n"+csv)).is(t, exitRefused, "", "fleetd: no (forbidden)\n")
	if kind != "text/csv" {
		t.Errorf("by its first byte: %s", kind)
	}
	run(" \n", "-").is(t, exitFailed, "", "fleetd: there are no devices in standard input\n")
	if got := run("", filepath.Join(dir, "none")); got.code != exitFailed {
		t.Errorf("%+v", got)
	}
}

// An export that breaks off leaves the file that was there, and nothing beside it.
func TestDevicesExport(t *testing.T) {
	const whole = "id,name\na,lamp\n"
	f := newAPI(t, map[string]string{
		"GET /v1/devices/export?format=csv&select=room%3Dlab": whole,
		"GET /v1/devices/export?format=ndjson":                `{"id":"a"}` + "\n",
		"GET /v1/devices/export?format=csv&secrets=true":      "id,client_id\n",
	})
	const without = "this export has no client_id: an import of it admits, for each device that it creates, the first client that comes with the device's id; --secrets includes them\n"
	f.run("devices", "export", "room=lab").is(t, exitOK, whole, without)
	f.run("devices", "export", "--secrets").is(t, exitOK, "id,client_id\n", "")
	dir := t.TempDir()
	file := filepath.Join(dir, "d.ndjson")
	f.run("devices", "export", "-o", file).is(t, exitOK, file+": 11 bytes\n", without)
	f.run("devices", "export", "--format", "xml").is(t, exitFailed, "", "fleetd: --format must be csv or ndjson, not \"xml\"\n")
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"id":"b"}`)
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}))
	defer broken.Close()
	a, stdout, stderr := newApp()
	if code := a.run(t.Context(), []string{"devices", "export", "-o", file, "--api", broken.URL}); code != exitRefused || stdout.String() != "" || !strings.Contains(stderr.String(), "broke off after 10 bytes") {
		t.Errorf("status %d, %s%s", code, stdout, stderr)
	}
	content, err := os.ReadFile(file)
	if left, _ := os.ReadDir(dir); err != nil || string(content) != `{"id":"a"}`+"\n" || len(left) != 1 {
		t.Errorf("%q, %v, %v", content, err, left)
	}
	// A link stays one.
	link := filepath.Join(dir, "link.ndjson")
	if err := os.Symlink("d.ndjson", link); err != nil {
		t.Fatal(err)
	}
	f.run("devices", "export", "-o", link).is(t, exitOK, link+": 11 bytes\n", without)
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("%v, %v", info, err)
	}
}

func TestFleet(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/fleet": `{"total":12,"as_of":"2026-08-01T12:00:00Z","state":{"online":9,"offline":3},"offline_reason":{"timeout":3},"transport":{"mqtt":9,"":3},
			"board":{"a":1,"other":11},"firmware":{},"node":{"n-1":12},"mcp_state":{"ready":9,"unknown":3}}`,
		"GET /v1/fleet?select=room%3Dx": `{"total":0}`,
	})
	f.run("fleet").is(t, exitOK, strings.Join([]string{
		"12 devices, counted 2026-08-01T12:00:00Z",
		"  State           online   9",
		"                  offline  3",
		"  Offline reason  timeout  3",
		"  Transport       mqtt     9",
		"                  (none)   3",
		"  Board           a        1",
		"                  other    11",
		"  Node            n-1      12",
		"  MCP state       ready    9",
		"                  unknown  3",
		"",
	}, "\n"), "")
	f.run("fleet", "room=x").is(t, exitOK, "0 devices\n", "")
	if got := f.run("fleet", "--json"); got.code != exitOK || !strings.HasPrefix(got.stdout, "{\n  \"total\": 12,") {
		t.Errorf("%+v", got)
	}
	many := map[string]int64{otherValues: 5}
	for i := range 20 {
		many[fmt.Sprintf("v%02d", i)] = 2
	}
	if got := frequent(many); len(got) != shownValues+1 || got[0].text != "v00" || got[shownValues] != (valueCount{otherValues, 15}) {
		t.Errorf("%+v", got)
	}
}

func TestChanges(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/changes?limit=1000&since=40": `{"items":[{"revision":41,"device":"aa:bb:cc:dd:ee:01","aspect":"label:room","value":"lab","who":"desk","at":"2026-08-01T11:00:00Z"},
			{"revision":42,"device":"","aspect":"policy","value":3,"who":"admin","at":"2026-08-01T11:00:01Z"}],"next_cursor":"c"}`,
		"GET /v1/changes?cursor=c&limit=1000&since=40":              `{"items":[{"revision":43,"device":"b","aspect":"name","value":null,"who":"","at":"2026-08-01T11:00:02Z"}],"next_cursor":""}`,
		"GET /v1/devices/b/changes?limit=1000":                      `{"items":[{"revision":43,"device":"b"}],"next_cursor":""}`,
		"GET /v1/changes?limit=1000&since=2026-08-01T11%3A00%3A00Z": `{"items":[],"next_cursor":""}`,
	})
	f.run("changes", "--since", "40").is(t, exitOK, strings.Join([]string{
		`2026-08-01T11:00:00.000Z  41        aa:bb:cc:dd:ee:01  desk              label:room        "lab"`,
		`2026-08-01T11:00:01.000Z  42        -                  admin             policy            3`,
		`2026-08-01T11:00:02.000Z  43        b                  -                 name              (removed)`,
		"",
	}, "\n"), "")
	f.run("changes", "b", "--json").is(t, exitOK, `{"revision":43,"device":"b"}`+"\n", "")
	f.run("changes", "--since", "1h").is(t, exitOK, "", "")
	if got := f.run("changes", "--since", "soon"); got.code != exitFailed {
		t.Errorf("%+v", got)
	}
}

// A cell of a list as CSV is no formula, whichever characters a spreadsheet takes for one.
func TestCSVCells(t *testing.T) {
	for text, want := range map[string]string{"=1+1": "'=1+1", " \n＝1+1": "'＝1+1", "lamp": "lamp", "": ""} {
		if got := csvCell(text); got != want {
			t.Errorf("%q became %q, want %q", text, got, want)
		}
	}
}
