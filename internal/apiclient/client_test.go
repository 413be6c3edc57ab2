package apiclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/datadir"
)

// newServer starts a server for one test and returns a client of it.
func newServer(t *testing.T, handler http.HandlerFunc) *Client {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	c, err := New(server.URL, "the-token")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestRequests(t *testing.T) {
	ctx := t.Context()
	name := "lamp"
	cases := []struct {
		name   string
		call   func(*Client) error
		want   string // method, path and query
		body   string
		answer string
	}{
		{"device", func(c *Client) error { _, err := c.Device(ctx, "aa:bb:cc:dd:ee:ff"); return err },
			"GET /v1/devices/aa:bb:cc:dd:ee:ff", "", `{}`},
		{"escaped device", func(c *Client) error { _, err := c.Device(ctx, "../x?y"); return err },
			"GET /v1/devices/..%2Fx%3Fy", "", `{}`},
		{"patch", func(c *Client) error { _, err := c.Patch(ctx, "d", api.DeviceEdit{Name: &name}, 0); return err },
			"PATCH /v1/devices/d", `{"name":"lamp"}`, `{"applies":"next boot"}`},
		{"clear labels", func(c *Client) error {
			_, err := c.Patch(ctx, "d", api.DeviceEdit{Labels: map[string]*string{"old": nil}}, 0)
			return err
		}, "PATCH /v1/devices/d", `{"labels":{"old":null}}`, `{}`},
		{"forget", func(c *Client) error { return c.Forget(ctx, "d") }, "DELETE /v1/devices/d", "", ""},
		{"approve", func(c *Client) error { return c.Approve(ctx, "d", "") }, "POST /v1/devices/d/approve", `{}`, `{}`},
		{"approve a client", func(c *Client) error { return c.Approve(ctx, "d", "0123456789ab") }, "POST /v1/devices/d/approve", `{"client":"0123456789ab"}`, `{}`},
		{"refuse", func(c *Client) error { return c.Do(ctx, "DELETE", nil, "devices", "d", "clients", "0123456789ab") }, "DELETE /v1/devices/d/clients/0123456789ab", "", ""},
		{"revoke", func(c *Client) error { _, err := c.Revoke(ctx, "d"); return err }, "POST /v1/devices/d/revoke", "", ""},
		{"tools", func(c *Client) error { _, err := c.Tools(ctx, "d", false); return err }, "GET /v1/devices/d/tools", "", `{}`},
		{"user tools", func(c *Client) error { _, err := c.Tools(ctx, "d", true); return err }, "GET /v1/devices/d/tools?user=true", "", `{}`},
		{"refresh", func(c *Client) error {
			_, err := Send[api.ToolList](ctx, c, Request{Method: "POST", Path: []string{"devices", "d", "tools", "refresh"}})
			return err
		}, "POST /v1/devices/d/tools/refresh", "", `{}`},
		{"catalogs", func(c *Client) error {
			_, err := Collect(List[api.HistoryEntry](ctx, c, nil, "devices", "d", "catalogs"))
			return err
		},
			"GET /v1/devices/d/catalogs?limit=1000", "", `{"items":[]}`},
		{"call", func(c *Client) error {
			_, err := c.Call(ctx, "d", "self.a/b", CallRequest{Arguments: json.RawMessage(`{"x":1.50}`), Timeout: 90 * time.Second})
			return err
		}, "POST /v1/devices/d/tools/self.a%2Fb/call", `{"arguments":{"x":1.50},"timeout":"1m30s"}`, `{}`},
		{"bare call", func(c *Client) error { _, err := c.Call(ctx, "d", "t", CallRequest{}); return err },
			"POST /v1/devices/d/tools/t/call", `{}`, `{}`},
		{"photos", func(c *Client) error {
			_, err := Collect(List[api.Photo](ctx, c, Query{"device": "d"}, "photos"))
			return err
		}, "GET /v1/photos?device=d&limit=1000", "", `{"items":[]}`},
		{"log level", func(c *Client) error { return c.Do(ctx, "PUT", api.LogLevel{Level: "debug"}, "log-level") }, "PUT /v1/log-level", `{"level":"debug"}`, `{"level":"debug"}`},
		{"filter", func(c *Client) error {
			_, err := Collect(c.Devices(ctx, Query{"state": "online", "label": "room=1", "q": "lamp", "sort": ""}))
			return err
		}, "GET /v1/devices?label=room%3D1&limit=1000&q=lamp&state=online", "", `{"items":[]}`},
		{"patch selection", func(c *Client) error {
			_, err := c.PatchSelected(ctx, "room=lab", api.SelectionEdit{Labels: map[string]*string{"room": nil, "floor": &name}})
			return err
		}, "PATCH /v1/devices?select=room%3Dlab", `{"labels":{"floor":"lamp","room":null}}`, `{}`},
		{"export", func(c *Client) error {
			_, err := c.Download(ctx, io.Discard, Query{"select": "a=1", "format": FormatCSV}, "devices", "export")
			return err
		}, "GET /v1/devices/export?format=csv&select=a%3D1", "", `id`},
		{"ready", func(c *Client) error { return c.Ready(ctx) }, "GET /readyz", "", `{"ready":true}`},
		{"live", func(c *Client) error { return c.Live(ctx) }, "GET /livez", "", `ok`},
		{"diagnosis", func(c *Client) error { _, err := c.Diagnose(ctx, ""); return err }, "GET /v1/diagnosis", "", `{}`},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			var got, body, auth, kind string
			c := newServer(t, func(w http.ResponseWriter, r *http.Request) {
				content, _ := io.ReadAll(r.Body)
				got, body, auth, kind = r.Method+" "+r.RequestURI, string(content), r.Header.Get("Authorization"), r.Header.Get("Content-Type")
				if tc.answer == "" {
					w.WriteHeader(http.StatusNoContent)
					return
				}
				fmt.Fprint(w, tc.answer)
			})
			if err := tc.call(c); err != nil {
				t.Fatal(err)
			}
			if got != tc.want || body != tc.body || auth != "Bearer the-token" {
				t.Errorf("sent %s with %q as %q\nwant %s with %q", got, body, auth, tc.want, tc.body)
			}
			if (body != "") != (kind == "application/json") {
				t.Errorf("Content-Type %q of a body %q", kind, body)
			}
		})
	}
}

func TestPaging(t *testing.T) {
	pages := map[string]string{
		"":   `{"items":[{"id":"a"},{"id":"b"}],"next_cursor":"p2"}`,
		"p2": `{"items":[],"next_cursor":"p3"}`,
		"p3": `{"items":[{"id":"c","later":"member"}],"next_cursor":""}`,
	}
	asked := 0
	c := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		asked++
		if limit := r.URL.Query().Get("limit"); limit != "1000" {
			t.Errorf("limit %q", limit)
		}
		fmt.Fprint(w, pages[r.URL.Query().Get("cursor")])
	})
	all, err := Collect(List[Answer[api.Device]](t.Context(), c, nil, "devices"))
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, d := range all {
		ids = append(ids, d.Value.ID)
	}
	if !reflect.DeepEqual(ids, []string{"a", "b", "c"}) || asked != 3 {
		t.Errorf("got %v in %d requests", ids, asked)
	}
	if string(all[2].Raw) != `{"id":"c","later":"member"}` {
		t.Errorf("Raw = %s", all[2].Raw)
	}

	asked = 0
	for range c.Devices(t.Context(), nil) {
		break
	}
	if asked != 1 {
		t.Errorf("%d requests for the first device", asked)
	}
}

func TestPagingFails(t *testing.T) {
	cases := []struct{ name, answer, want string }{
		{"endless", `{"items":[],"next_cursor":"same"}`, "the same page of /v1/devices twice"},
		{"half ours", `{"items":[{"id":"a"},{"id":5}]}`, "is it the API of a fleetd node?"},
		{"not ours", `<html>`, "is it the API of a fleetd node?"},
	}
	for _, tc := range cases {
		c := newServer(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, tc.answer) })
		var last error
		for d, err := range c.Devices(t.Context(), nil) {
			if last = err; err == nil {
				t.Errorf("%s: %q of a page that is not whole", tc.name, d.ID)
			}
		}
		if last == nil || !strings.Contains(last.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, last, tc.want)
		}
	}
}

func TestDevice(t *testing.T) {
	const answer = `{"id":"aa:bb:cc:dd:ee:ff","name":"lamp","labels":{"room":"1"},"state":"online","transport":"websocket","node":"n-1",
		"board":"bread-compact-wifi","firmware":"2.4.2","client":"c","session_id":"s",
		"mcp":{"state":"ready","tools":7,"catalog":"ab","catalog_state":"ready","partial":true,"error":"e"},
		"audio":{"open":true,"packets":9,"dropped":1},
		"first_seen":"2026-08-01T00:00:00Z","last_seen":"2026-08-02T00:00:00.5Z","connected_at":null}`
	c := newServer(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, answer) })
	d, err := Get[Answer[api.Device]](t.Context(), c, nil, "devices", "aa:bb:cc:dd:ee:ff")
	if err != nil {
		t.Fatal(err)
	}
	if string(d.Raw) != answer {
		t.Error("Raw is not what was received")
	}
	want := api.Device{
		ID: "aa:bb:cc:dd:ee:ff", Name: "lamp", Labels: map[string]string{"room": "1"}, State: "online", Transport: "websocket",
		Node: "n-1", Board: "bread-compact-wifi", Firmware: "2.4.2", Client: "c", SessionID: "s",
		MCP:       api.DeviceMCP{State: "ready", Tools: 7, Catalog: "ab", CatalogState: "ready", Partial: true, Error: "e"},
		Audio:     api.DeviceAudio{Open: true, Packets: 9, Dropped: 1},
		FirstSeen: api.At(time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC)), LastSeen: api.At(time.Date(2026, 8, 2, 0, 0, 0, 5e8, time.UTC)),
	}
	if !reflect.DeepEqual(d.Value, want) {
		t.Errorf("got  %+v\nwant %+v", d, want)
	}
}

func TestCallResult(t *testing.T) {
	const answer = `{"content":[{"type":"text","text":"true"},{"type":"image","image":"{\"type\":\"image\",\"mimeType\":\"image/png\",\"data\":\"iVBORw==\"}"},` +
		`{"type":"image","mimeType":"image/jpeg","data":"/9j/"},{"type":"odd","text":5}],"isError":true,"duration_ms":12,"node":"n-1","outcome":"restarting"}`
	c := newServer(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, answer) })
	r, err := c.Call(t.Context(), "d", "t", CallRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if string(r.Raw) != answer || !r.IsError || r.DurationMS != 12 || r.Node != "n-1" || r.Outcome != "restarting" || len(r.Content) != 4 {
		t.Errorf("got %+v", r)
	}
	if r.Content[0].Text != "true" || r.Content[3].Type != "odd" || string(r.Content[3].Raw) != `{"type":"odd","text":5}` {
		t.Errorf("content %+v", r.Content)
	}
	for i, want := range map[int]string{1: "\x89PNG image/png", 2: "\xff\xd8\xff image/jpeg"} {
		data, kind, err := r.Content[i].ImageBytes()
		if err != nil || string(data)+" "+kind != want {
			t.Errorf("image %d: %q %q %v", i, data, kind, err)
		}
	}
	for _, broken := range []Content{{Image: "no JSON"}, {Data: "%%"}} {
		if _, _, err := broken.ImageBytes(); err == nil {
			t.Errorf("%+v: no error", broken)
		}
	}
}

func TestProblems(t *testing.T) {
	cases := []struct {
		name, kind, body string
		status           int
		want             string
		code             string
	}{
		{"full", "application/problem+json",
			`{"type":"about:blank","title":"Conflict","status":409,"detail":"aa:bb is known but not connected","code":"device_offline","node":"n-1"}`,
			409, "aa:bb is known but not connected (device_offline)", "device_offline"},
		{"faults", "application/problem+json",
			`{"title":"Unprocessable Entity","status":422,"code":"invalid_arguments","errors":[{"pointer":"/volume","detail":"101 is above 100"},{"pointer":"","detail":"theme is missing"}]}`,
			422, "Unprocessable Entity: /volume 101 is above 100; theme is missing (invalid_arguments)", "invalid_arguments"},
		{"proxy", "text/html", "<html><body>bad gateway</body></html>", 502, "Bad Gateway (HTTP 502)", ""},
		{"plain text", "text/plain", "404 page not found\nmore", 404, "404 page not found (HTTP 404)", ""},
		{"long text", "text/plain", strings.Repeat("é", 300), 500, strings.Repeat("é", 200) + "... (HTTP 500)", ""},
		{"empty", "", "", 503, "Service Unavailable (HTTP 503)", ""},
		{"list", "application/json", "[1]", 500, "[1] (HTTP 500)", ""},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			c := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", tc.kind)
				w.WriteHeader(tc.status)
				fmt.Fprint(w, tc.body)
			})
			_, err := c.Device(t.Context(), "d")
			var p *Problem
			if !errors.As(err, &p) {
				t.Fatalf("%v is no Problem", err)
			}
			if p.Error() != tc.want || p.Code != tc.code || p.Status != tc.status || string(p.Raw) != tc.body {
				t.Errorf("got %q, code %q, status %d; want %q, %q, %d", p, p.Code, p.Status, tc.want, tc.code, tc.status)
			}
		})
	}
}

// What else is in a problem is there, however much of it another program wrote in its own way.
func TestProblemMembers(t *testing.T) {
	for body, want := range map[string]Problem{
		`{"title":"t","code":"connection_lost","outcome":"unknown","sent":true,"extra":{"a":[1]}}`: {Problem: api.Problem{Title: "t", Code: "connection_lost", Outcome: "unknown", Sent: new(true)}},
		`{"code":"a","errors":{"name":["is missing"]},"detail":"d"}`:                               {Problem: api.Problem{Title: "Bad Gateway", Code: "a", Detail: "d"}},
		`{"code":500,"detail":"d"}`: {Problem: api.Problem{Title: "Bad Gateway", Detail: "d"}},
	} {
		c := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusBadGateway)
			fmt.Fprint(w, body)
		})
		_, err := c.Call(t.Context(), "d", "t", CallRequest{})
		var p *Problem
		if !errors.As(err, &p) {
			t.Fatal(err)
		}
		if want.Status, want.Raw = http.StatusBadGateway, []byte(body); !reflect.DeepEqual(*p, want) {
			t.Errorf("%s: %+v", body, p.Problem)
		}
	}
}

func TestPhoto(t *testing.T) {
	c := newServer(t, func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("\xff\xd8jpeg")) })
	var got strings.Builder
	if n, err := c.Photo(t.Context(), "p", &got); err != nil || n != 6 || got.String() != "\xff\xd8jpeg" {
		t.Errorf("%d bytes %q, %v", n, got.String(), err)
	}
}

func TestDiagnose(t *testing.T) {
	c := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Date", "Sat, 01 Aug 2026 12:00:00 GMT")
		fmt.Fprintf(w, `{"ota_url":"http://h/xiaozhi/ota/","device":%q,"status":200,"reply":{"b":1,"a":2},"findings":[{"severity":"error","setting":"--public-host","message":"m"}]}`, r.URL.Query().Get("device"))
	})
	d, err := c.Diagnose(t.Context(), "aa:bb:cc:dd:ee:ff")
	if err != nil {
		t.Fatal(err)
	}
	if d.OTAURL != "http://h/xiaozhi/ota/" || d.Device != "aa:bb:cc:dd:ee:ff" || d.Status != 200 || string(d.Reply) != `{"b":1,"a":2}` ||
		!reflect.DeepEqual(d.Findings, []api.Finding{{Severity: "error", Setting: "--public-host", Message: "m"}}) || !d.ServerTime.Equal(time.Date(2026, 8, 1, 12, 0, 0, 0, time.UTC)) {
		t.Errorf("got %+v", d)
	}
}

func TestUnreachable(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	server.Close()
	c, err := New(server.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Device(t.Context(), "d"); err == nil || !strings.HasPrefix(err.Error(), "cannot reach the API at "+server.URL+": dial tcp") {
		t.Errorf("got %v", err)
	}
	c.local = "./data"
	if _, err := c.Device(t.Context(), "d"); !errors.Is(err, ErrNoNode) || !strings.Contains(err.Error(), "./data") {
		t.Errorf("got %v, want ErrNoNode", err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	c = newServer(t, func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	})
	if _, err := c.Device(ctx, "d"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
}

func TestDeadline(t *testing.T) {
	c := newServer(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	_, err := Send[json.RawMessage](t.Context(), c, Request{Path: []string{"nodes"}, Timeout: 20 * time.Millisecond})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.HasSuffix(err.Error(), " did not answer in time; its log may say why") {
		t.Errorf("got %v", err)
	}
}

func TestNew(t *testing.T) {
	for _, wrong := range []string{"", "127.0.0.1:8080", "ftp://h", "http://", "http://u:p@h", "http://h?x", "http://h#x", ":"} {
		if _, err := New(wrong, ""); err == nil {
			t.Errorf("%q accepted", wrong)
		}
	}
	if c, err := New("http://h:1/fleet/", ""); err != nil || c.Base() != "http://h:1/fleet" {
		t.Errorf("%v, %v", c, err)
	}
}

func TestDiscover(t *testing.T) {
	dir := t.TempDir()
	if _, err := Discover(dir, "", ""); !errors.Is(err, ErrNoNode) ||
		err.Error() != "no running node found in "+dir+"; start one with `fleetd serve`, or give --api URL and --token" {
		t.Errorf("empty directory: %v", err)
	}
	if err := datadir.WriteRunInfo(dir, datadir.RunInfo{API: "http://0.0.0.0:8080"}); err != nil {
		t.Fatal(err)
	}
	// A node was killed; another process that listens on its port now does not get the token.
	for _, text := range []string{"without the lock's file", "with it"} {
		if _, err := Discover(dir, "", ""); !errors.Is(err, ErrNoNode) || !strings.Contains(err.Error(), "ended without a stop") { // security: K17
			t.Errorf("left by a killed node, %s: %v", text, err)
		}
		if err := os.WriteFile(filepath.Join(dir, datadir.LockFile), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	lockDir(t, dir)
	check := func(what string, wantBase, wantToken string, api, token string) {
		t.Helper()
		c, err := Discover(dir, api, token)
		if err != nil {
			t.Errorf("%s: %v", what, err)
		} else if c.base != wantBase || c.token != wantToken {
			t.Errorf("%s: %s with %q, want %s with %q", what, c.base, c.token, wantBase, wantToken)
		}
	}
	check("no token kept", "http://127.0.0.1:8080", "", "", "")
	if err := os.WriteFile(filepath.Join(dir, "admin-token"), []byte("admin\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	check("admin token", "http://127.0.0.1:8080", "admin", "", "")
	check("own token", "http://127.0.0.1:8080", "mine", "", "mine")
	check("the admin token goes nowhere else", "http://elsewhere:1", "", "http://elsewhere:1", "")
	check("elsewhere with a token", "http://elsewhere:1", "mine", "http://elsewhere:1/", "mine")
	if _, err := Discover(dir, "elsewhere:1", ""); err == nil || !strings.HasPrefix(err.Error(), "--api: ") {
		t.Errorf("no URL: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "run.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Discover(dir, "", ""); err == nil || errors.Is(err, ErrNoNode) {
		t.Errorf("broken file: %v", err)
	}
}

// lockDir holds the lock of a data directory as its node does while it runs.
func lockDir(t *testing.T, dir string) {
	t.Helper()
	file, err := os.Create(filepath.Join(dir, datadir.LockFile))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
}

func TestDialable(t *testing.T) {
	for in, want := range map[string]string{
		"http://127.0.0.1:8080": "http://127.0.0.1:8080", ":8080": "http://127.0.0.1:8080", "0.0.0.0:8080": "http://127.0.0.1:8080",
		"[::]:8080": "http://127.0.0.1:8080", "https://[::]:8080/x": "https://127.0.0.1:8080/x", "http://[::1]:8080": "http://[::1]:8080",
		"http://host": "http://host",
	} {
		if got := dialable(in); got != want {
			t.Errorf("dialable(%q) = %q, want %q", in, got, want)
		}
	}
}
