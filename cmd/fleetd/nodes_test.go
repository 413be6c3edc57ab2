package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"fleetd/internal/datadir"
)

func TestNodesAndLogLevel(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/nodes?limit=1000": `{"items":[{"name":"n-1","version":"v1","started":"2026-08-01T10:00:00Z","devices":7,"api":"http://10.0.0.1:8080","schema":3}],"next_cursor":""}`,
		"GET /v1/log-level":        `{"level":"info"}`,
		"PUT /v1/log-level":        `{"level":"debug"}`,
	})
	f.run("nodes").is(t, exitOK, "NAME  VERSION  DEVICES  STARTED               API\nn-1   v1       7        2026-08-01T10:00:00Z  http://10.0.0.1:8080\n", "")
	if got := f.run("nodes", "--json"); got.code != exitOK || !strings.HasSuffix(got.stdout, `"schema":3}`+"\n") {
		t.Errorf("%+v", got)
	}
	f.run("log-level").is(t, exitOK, "info\n", "")
	f.run("log-level", "debug").is(t, exitOK, "the node logs at debug until it stops\n", "")
	f.run("log-level", "debug", "--json").is(t, exitOK, "{\n  \"level\": \"debug\"\n}\n", "")
	if asked := f.requests(); asked[len(asked)-1] != `PUT /v1/log-level {"level":"debug"}` {
		t.Errorf("asked %q", asked)
	}
}

func TestPhotos(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/photos?limit=1000": `{"items":[{"id":"p2","device":"a","question":"what?","bytes":2048,"kind":"camera","taken_at":"2026-08-01T11:00:00Z"},
			{"id":"p1","device":"b","question":"","bytes":3,"kind":"snapshot","taken_at":"2026-08-01T10:00:00Z"}],"next_cursor":""}`,
		"GET /v1/photos?device=b&limit=1000": `{"items":[],"next_cursor":""}`,
		"GET /v1/photos?device=c&limit=1000": `{"items":[{"id":"../p"}],"next_cursor":""}`,
		"GET /v1/photos/p2":                  "\xff\xd8p2",
		"GET /v1/photos/p1":                  "\xff\xd8p1",
		"DELETE /v1/photos/p1":               "",
	})
	f.run("photos").is(t, exitOK, strings.Join([]string{
		"ID  DEVICE  TAKEN                 KIND      SIZE     QUESTION",
		"p2  a       2026-08-01T11:00:00Z  camera    2 KiB    what?",
		"p1  b       2026-08-01T10:00:00Z  snapshot  3 bytes  -",
		"",
	}, "\n"), "")
	f.run("photos", "b").is(t, exitOK, "no photos\n", "")
	dir := filepath.Join(t.TempDir(), "photos")
	p1, p2 := filepath.Join(dir, "p1.jpg"), filepath.Join(dir, "p2.jpg")
	f.run("photos", "-o", dir).is(t, exitOK, p2+": 4 bytes\n"+p1+": 4 bytes\n", "")
	if content, err := os.ReadFile(p1); err != nil || string(content) != "\xff\xd8p1" {
		t.Errorf("%q, %v", content, err)
	}
	f.run("photos", "-o", dir).is(t, exitOK, "", "")
	f.run("photos", "c", "-o", dir).is(t, exitRefused, "", "fleetd: the id \"../p\" of a photo cannot be a file name; download it with `fleetd photos get ID -o FILE`\n")
	f.run("photos", "get", "p1", "-o", "-").is(t, exitOK, "\xff\xd8p1", "")
	f.run("photos", "delete", "p1", "--yes").is(t, exitOK, "p1 deleted\n", "")
}

// A health check finds the node by itself, needs no token, and prints what is down.
func TestHealthcheck(t *testing.T) {
	status, answer := 200, `{"ready":true,"down":{}}`
	var paths []string
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			t.Error("it sends a token")
		}
		paths = append(paths, r.URL.Path)
		if answer == "" {
			<-r.Context().Done()
			return
		}
		w.WriteHeader(status)
		fmt.Fprint(w, answer)
	}))
	defer node.Close()
	dir := t.TempDir()
	run := func(args ...string) outcome {
		a, stdout, stderr := newApp()
		a.environ = []string{"FLEETD_DATA_DIR=" + dir}
		code := a.run(t.Context(), append([]string{"healthcheck"}, args...))
		return outcome{code, stdout.String(), stderr.String()}
	}
	run().is(t, exitFailed, "", "fleetd: no running node found in "+dir+"; start one with `fleetd serve`, or give --api URL and --token\n")
	lockDir(t, dir)
	if err := datadir.WriteRunInfo(dir, datadir.RunInfo{API: node.URL}); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "admin-token"), 0o700); err != nil { // not readable as a file
		t.Fatal(err)
	}
	run().is(t, exitOK, "ready\n", "")
	run("--live").is(t, exitOK, "live\n", "")
	run("--api", node.URL).is(t, exitOK, "ready\n", "")
	if want := []string{"/readyz", "/livez", "/readyz"}; !reflect.DeepEqual(paths, want) {
		t.Errorf("asked %q", paths)
	}
	status, answer = 503, `{"ready":false,"down":{"nats":"no servers","database":"refused"}}`
	run().is(t, exitFailed, "", "fleetd: the node at "+node.URL+" is not ready: database: refused; nats: no servers\n")
	status, answer = 404, "not found"
	run().is(t, exitFailed, "", "fleetd: not found; the answer is not from the API of fleetd: check the address in --api or FLEETD_API (HTTP 404)\n")
	answer = ""
	run().is(t, exitFailed, "", "fleetd: "+node.URL+" did not answer in time; its log may say why\n")
	node.Close()
	if got := run(); got.code != exitFailed || !strings.Contains(got.stderr, "does not answer") {
		t.Errorf("%+v", got)
	}
}

func TestRenamedCommands(t *testing.T) {
	for args, want := range map[string]string{
		"token": "`fleetd token` is now `fleetd keys`", "token create --name x": "`fleetd token` is now `fleetd keys`",
		"devices keys import f": "`fleetd devices keys` is now `fleetd chips`",
	} {
		a, stdout, stderr := newApp()
		code := a.run(t.Context(), strings.Fields(args))
		outcome{code, stdout.String(), stderr.String()}.is(t, exitFailed, "", "fleetd: "+want+", with the same arguments\n")
	}
}

func TestKeysShow(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/self": `{"name":"admin token","key":"admin","scopes":["admin"],"devices":{},"tools":[],"expires":null,"admin":true}`,
		"GET /v1/keys?limit=1000": `{"items":[{"id":"aaaaaaaa","name":"lab","scopes":["tools:call"],"devices":"room=lab","tools":[],"state":"revoked","created":"2026-08-01T10:00:00Z","created_by":"ops","expires":null,"revoked":"2026-08-01T11:00:00Z"},
			{"id":"bbbbbbbb","name":"lab","scopes":["tools:call"],"devices":{"room":"lab","floor":"1"},"tools":["*get_*"],"state":"valid","created":"2026-08-01T11:00:00Z","expires":"2027-01-01T00:00:00Z"}],"next_cursor":""}`,
	})
	f.run("keys", "show").is(t, exitOK, "Key      admin\nName     admin token\nScopes   admin\nDevices  all\nTools    all\nExpires  never\n", "")
	f.run("keys", "show", "lab").is(t, exitOK, "Key      bbbbbbbb\nName     lab\nState    valid\nScopes   tools:call\nDevices  floor=1,room=lab\nTools    *get_*\n"+
		"Created  2026-08-01T11:00:00Z (60m ago)\nExpires  2027-01-01T00:00:00Z\n", "")
	f.run("keys", "show", "aaaaaaaa").is(t, exitOK, "Key      aaaaaaaa\nName     lab\nState    revoked\nScopes   tools:call\nDevices  room=lab\nTools    all\n"+
		"Created  2026-08-01T10:00:00Z (2h ago)\nExpires  never\nBy       ops\nRevoked  2026-08-01T11:00:00Z (60m ago)\n", "")
	f.run("keys", "show", "nobody").is(t, exitRefused, "", "fleetd: no API key has the id or name \"nobody\"; `fleetd keys` lists them\n")
}

// A revocation that waits for the database is in force, so it is a success.
func TestRevokeWithoutDatabase(t *testing.T) {
	f := newAPI(t, map[string]string{
		"POST /v1/devices/a/revoke": `{"recorded":false,"nodes":["n-1","n-2"]}`,
		"DELETE /v1/keys/lab":       `{"recorded":false,"nodes":["n-1"]}`,
	})
	f.status["POST /v1/devices/a/revoke"], f.status["DELETE /v1/keys/lab"] = 202, 202
	f.run("devices", "revoke", "a").is(t, exitOK, "a revoked on 2 nodes (n-1, n-2); the database is away, and the revocation is recorded there when it is back; the device waits for approval from its next OTA check on\n", "")
	f.run("keys", "revoke", "lab").is(t, exitOK, "lab revoked on 1 node (n-1); the database is away, and the revocation is recorded there when it is back\n", "")
}
