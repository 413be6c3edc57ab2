package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

func TestEvents(t *testing.T) {
	const stream = "id: 7\nevent: online\n" + `data: {"device":"aa:bb:cc:dd:ee:01","node":"n-1","session":"s","epoch":1,"seq":2,"time":"2026-08-01T11:59:59.123Z","transport":"websocket","client":"c\u001b"}` + "\n\n" +
		"event: notifications.robot.fell\n" + `data: {"device":"aabb","time":"2026-08-01T12:00:00.000Z","params":{"hard":true,"why":"` + "\u009b" + `"}}` + "\n\n" +
		"event: gap\ndata: not JSON\n\n"
	cases := []struct {
		args []string
		path string
		want string
	}{
		{[]string{"events"}, "/v1/events", strings.Join([]string{
			`2026-08-01T11:59:59.123Z  aa:bb:cc:dd:ee:01  online      transport="websocket" client="c\u001b"`,
			`2026-08-01T12:00:00.000Z  aabb               notifications.robot.fell  params={"hard":true,"why":"\u009b"}`,
			`2026-08-01T12:00:00.000Z  -                  gap         not JSON`, ""}, "\n")},
		{[]string{"events", "aabb", "--type", "online", "--json"}, "/v1/events?device=aabb&type=online", strings.Join([]string{
			`{"id":"7","type":"online","data":{"device":"aa:bb:cc:dd:ee:01","node":"n-1","session":"s","epoch":1,"seq":2,"time":"2026-08-01T11:59:59.123Z","transport":"websocket","client":"c\u001b"}}`,
			`{"type":"notifications.robot.fell","data":{"device":"aabb","time":"2026-08-01T12:00:00.000Z","params":{"hard":true,"why":"\u009b"}}}`,
			`{"type":"gap","data":"not JSON"}`, ""}, "\n")},
	}
	cases[1].args = append(cases[1].args, "--since", "1h")
	for _, tc := range cases {
		ctx, cancel := context.WithCancel(t.Context())
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/v1/devices/aabb" { // whether this is an id
				fmt.Fprint(w, `{"id":"aabb"}`)
				return
			}
			if path := strings.Replace(r.RequestURI, "since=2026-08-01T11%3A00%3A00Z&", "", 1); path != tc.path {
				t.Errorf("asked for %s", r.RequestURI)
			}
			// Where it resumes, the time it began at counts no more.
			if since, want := r.URL.Query().Has("since"), r.Header.Get("Last-Event-ID") == "" && slices.Contains(tc.args, "--since"); since != want {
				t.Errorf("%s after %q", r.RequestURI, r.Header.Get("Last-Event-ID"))
			}
			w.Header().Set("Content-Type", "text/event-stream")
			if r.Header.Get("Last-Event-ID") == "" {
				fmt.Fprint(w, "retry: 1\n\n"+stream)
				return // breaks off, so that the command has to come back
			}
			w.(http.Flusher).Flush()
			cancel()
			<-r.Context().Done()
		}))
		a, stdout, stderr := newApp()
		a.interactive = true
		code := a.run(ctx, append(tc.args, "--api", server.URL))
		server.Close()
		cancel()
		if code != exitOK || stdout.String() != tc.want || !strings.HasPrefix(stderr.String(), "fleetd: connected to "+server.URL+"; Ctrl-C ends\n") || !strings.Contains(stderr.String(), "; trying again in 1ms\n") {
			t.Errorf("%v: status %d, stdout\n%s\nwant\n%s\nstderr %s", tc.args, code, stdout, tc.want, stderr)
		}
	}
	f := newAPI(t, map[string]string{"GET /v1/events": `{"code":"unavailable","detail":"NATS is away"}`})
	f.status["GET /v1/events"] = 503
	got := f.run("events")
	if got.code != exitRefused {
		t.Errorf("NATS away: %+v", got)
	}
}

// listen opens a port that devices dial.
func listen(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener.Addr().String()
}

func TestDoctor(t *testing.T) {
	address := listen(t)
	reply := func(findings string) string {
		return `{"ota_url":"http://` + address + `/xiaozhi/ota/","device":"02:00:00:00:00:01","status":200,` +
			`"reply":{"websocket":{"url":"ws://` + address + `/xiaozhi/v1/","token":"t\u001b"},"server_time":{"timestamp":1}},"findings":` + findings + `}`
	}
	head := "OTA URL  http://" + address + "/xiaozhi/ota/\nDevice   02:00:00:00:00:01\nStatus   200\n\nReply to its OTA check:\n" +
		"{\n  \"websocket\": {\n    \"url\": \"ws://" + address + "/xiaozhi/v1/\",\n    \"token\": \"t\\u001b\"\n  },\n  \"server_time\": {\n    \"timestamp\": 1\n  }\n}\n\n"
	f := newAPI(t, map[string]string{
		"GET /v1/diagnosis": reply(`[]`),
		"GET /v1/diagnosis?device=02%3A00%3A00%3A00%3A00%3A01": reply(`[{"severity":"warning","setting":"--public-host","message":"loopback, for this lab"},{"severity":"info","setting":"","message":"fine\u0007"}]`),
	})
	f.run("doctor").is(t, exitRefused, head+
		"Findings:\n  error  --public-host  devices would dial 127.0.0.1, which is the device itself; give --public-host the address of this machine in the devices' network\n",
		"fleetd: devices cannot work with these settings; see the errors above\n")
	f.run("doctor", "--mac", "02:00:00:00:00:01").is(t, exitOK, head+
		"Findings:\n  warning  --public-host  loopback, for this lab\n  info                    fine\n", "")
	got := f.run("doctor", "--json")
	if got.code != exitOK || !strings.HasPrefix(got.stdout, "{\n  \"ota_url\": ") || got.stderr != "" {
		t.Errorf("--json: %+v", got)
	}
}

// The public name is looked at from here: what hosts need, and what should not be there.
func TestDoctorPublicName(t *testing.T) {
	var documents map[string]string
	public := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, ok := documents[r.URL.Path]
		switch {
		case !ok:
			http.NotFound(w, r)
		case text == "problem":
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(401)
		default:
			_, _ = io.WriteString(w, text) // fails only if the client has disconnected
		}
	}))
	defer public.Close()
	secure := httptest.NewTLSServer(http.NotFoundHandler())
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer secure.Close()
	const server, resource = "/.well-known/oauth-authorization-server", "/.well-known/oauth-protected-resource/mcp"
	sound := func(change ...string) map[string]string {
		all := map[string]string{server: `{"issuer":"` + public.URL + `"}`, resource: `{"resource":"` + public.URL + `/mcp","authorization_servers":["` + public.URL + `"]}`}
		for i := 0; i < len(change); i += 2 {
			all[change[i]] = change[i+1]
		}
		return all
	}
	for name, tc := range map[string]struct {
		url       string
		documents map[string]string
		want      []string
	}{
		"sound":           {public.URL, sound(), nil},
		"another page":    {public.URL, sound(server, "<html>"), []string{"answers with status 200, and not with the document"}},
		"nothing":         {public.URL, nil, []string{"answers with status 404"}},
		"another issuer":  {public.URL, sound(server, `{"issuer":"https://other.example"}`), []string{`has the issuer "https://other.example" in place of`}},
		"another address": {public.URL, sound(resource, `{"resource":"http://node:8080/mcp"}`), []string{`has the resource "http://node:8080/mcp"`}},
		"the whole API":   {public.URL, sound("/metrics", "up 1", "/v1/self", "problem"), []string{"/metrics answers under the public name", "/v1/self answers under the public name"}},
		"both":            {public.URL, sound(server, "<html>", "/metrics", "up 1"), []string{"answers with status 200, and not", "/metrics answers under the public name"}},
		"no login":        {public.URL, map[string]string{resource: `{"resource":"` + public.URL + `/mcp"}`, "/v1/self": "problem"}, []string{"/v1/self answers under the public name"}},
		"certificate":     {secure.URL, nil, []string{"the certificate of " + secure.URL + " is not valid"}},
		"no server":       {"http://" + closedPort(t), nil, []string{"nothing listens at"}},
		"no name":         {"http://no.such.name.invalid", nil, []string{"no.such.name.invalid"}},
	} {
		documents = tc.documents
		found := checkPublicAPI(t.Context(), tc.url)
		if len(found) != len(tc.want) {
			t.Errorf("%s: %+v", name, found)
			continue
		}
		for i, want := range tc.want {
			if f := found[i]; f.Severity != severityWarning || f.Setting != "--public-api-url" || !strings.Contains(f.Message, want) {
				t.Errorf("%s: %+v, want %q", name, f, want)
			}
		}
	}
}

// closedPort returns an address at which nothing listens.
func closedPort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

func TestTargets(t *testing.T) {
	d := apiclient.Diagnosis{Diagnosis: api.Diagnosis{OTAURL: "https://h/xiaozhi/ota/", Reply: []byte(`{"websocket":{"url":"wss://h:443/xiaozhi/v1/"}}`)}}
	if got := targets(d); len(got) != 1 || got[0] != (target{"h", "443", true, "--device-listen", "--public-device-url"}) {
		t.Errorf("got %+v", got)
	}
	d = apiclient.Diagnosis{Diagnosis: api.Diagnosis{OTAURL: "http://a:8000/", Reply: []byte(`{"websocket":{"url":"ws://b/"}}`)}}
	if got := targets(d); len(got) != 2 || got[0].host != "a" || got[0].port != "8000" || got[1].host != "b" || got[1].port != "80" || got[0].tls || got[1].tls {
		t.Errorf("got %+v", got)
	}
	d = apiclient.Diagnosis{Diagnosis: api.Diagnosis{OTAURL: "http://a:8000/", Reply: []byte(`{"mqtt":{"endpoint":"b:1883"}}`)}}
	if got := targets(d); len(got) != 2 || got[1] != (target{"b", "1883", false, "--mqtt-listen", "--public-mqtt"}) {
		t.Errorf("got %+v", got)
	}
	for _, endpoint := range []string{"b", "b:8883"} {
		d.Reply = []byte(`{"mqtt":{"endpoint":"` + endpoint + `"}}`)
		if got := targets(d); len(got) != 2 || got[1].port != "8883" || !got[1].tls {
			t.Errorf("%s: got %+v", endpoint, got)
		}
	}
	if got := targets(apiclient.Diagnosis{Diagnosis: api.Diagnosis{OTAURL: "::", Reply: []byte(`null`)}}); len(got) != 0 {
		t.Errorf("got %+v", got)
	}
}

func TestCheckAddress(t *testing.T) {
	cases := []struct {
		host        string
		inContainer bool
		want        string // severity
	}{
		{"127.0.0.1", false, "error"}, {"localhost", false, "error"}, {"::1", false, "error"},
		{"172.17.0.2", false, "warning"}, {"172.31.255.1", false, "warning"}, {"172.16.0.2", false, ""}, {"172.32.0.1", false, ""},
		{"10.0.0.5", false, ""}, {"10.0.0.5", true, "warning"}, {"192.168.1.5", true, ""}, {"devices.example.com", true, ""},
	}
	for _, tc := range cases {
		got, found := checkAddress(tc.host, tc.inContainer)
		if got.Severity != tc.want || found != (tc.want != "") || (found && !strings.Contains(got.Message, tc.host)) {
			t.Errorf("%s: %+v", tc.host, got)
		}
	}
}

func TestCheckReach(t *testing.T) {
	split := func(address string) target {
		host, port, _ := net.SplitHostPort(address)
		return target{host: host, port: port}
	}
	open := split(listen(t))
	if got, found := checkReach(t.Context(), open); found {
		t.Errorf("an open port: %+v", got)
	}
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	if got, found := checkReach(t.Context(), split(closed.Addr().String())); !found || got.Severity != "error" || !strings.Contains(got.Message, "nothing listens on") {
		t.Errorf("a closed port: %+v", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, found := checkReach(ctx, open); !found || got.Severity != "warning" {
		t.Errorf("no way there: %+v", got)
	}
	selfSigned := httptest.NewUnstartedServer(http.NotFoundHandler())
	selfSigned.Config.ErrorLog = log.New(io.Discard, "", 0) // it would report that we refuse
	selfSigned.StartTLS()
	defer selfSigned.Close()
	u, err := url.Parse(selfSigned.URL)
	if err != nil {
		t.Fatal(err)
	}
	if got, found := checkReach(t.Context(), target{u.Hostname(), u.Port(), true, "--device-listen", "--public-device-url"}); !found || got.Severity != "error" || got.Setting != "--public-device-url" {
		t.Errorf("a certificate of its own: %+v", got)
	}
}

func TestCheckClock(t *testing.T) {
	cases := []struct {
		server time.Time
		want   string
	}{
		{time.Time{}, ""}, {testNow, ""}, {testNow.Add(-9 * time.Second), ""}, {testNow.Add(11 * time.Second), ""},
		{testNow.Add(61 * time.Second), "1m0s fast"}, {testNow.Add(-time.Hour), "1h0m0s slow"},
	}
	for _, tc := range cases {
		got, found := checkClock(tc.server, testNow, testNow.Add(time.Second))
		if found != (tc.want != "") || !strings.Contains(got.Message, tc.want) {
			t.Errorf("%v: %+v", tc.server, got)
		}
	}
}

func TestIsContainer(t *testing.T) {
	dir := t.TempDir()
	if isContainer(dir) {
		t.Error("an empty root is a container")
	}
	if err := os.WriteFile(filepath.Join(dir, ".dockerenv"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if !isContainer(dir) {
		t.Error("a root with .dockerenv is none")
	}
}
