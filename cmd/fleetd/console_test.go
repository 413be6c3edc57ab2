package main

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

func TestConsoleLink(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/self":           `{"name":"lab","key":"abcdefgh","scopes":["devices:read"],"tools":[]}`,
		"POST /v1/console/codes": `{"code":"abc.def","expires":"2026-08-01T12:00:00Z"}`,
	})
	got := f.run("console", "--scope", "devices:read,events:read")
	if got.code != exitOK || !strings.HasSuffix(got.stdout, "/console/#code=abc.def\n") || !strings.HasPrefix(got.stdout, "http://127.0.0.1:") || !strings.Contains(got.stderr, "ends with yours (lab)") {
		t.Errorf("%+v", got)
	}
	if asked := f.requests(); asked[len(asked)-1] != `POST /v1/console/codes {"scopes":["devices:read","events:read"]}` {
		t.Errorf("%q", asked)
	}
	open := newAPI(t, map[string]string{"GET /v1/self": `{"name":"no token required","key":"open","scopes":["admin"],"tools":[]}`})
	if got := open.run("console"); got.code != exitOK || !strings.HasSuffix(got.stdout, "/console/\n") {
		t.Errorf("without tokens: %+v", got)
	}
}

// A browser is opened for a person at a terminal alone; without one the link is enough.
func TestConsoleOpens(t *testing.T) {
	answers := map[string]string{
		"GET /v1/self":           `{"name":"lab","key":"abcdefgh","scopes":["devices:read"],"tools":[]}`,
		"POST /v1/console/codes": `{"code":"abc.def","expires":"2026-08-01T12:00:00Z"}`,
	}
	for _, tc := range []struct {
		name        string
		interactive bool
		args        []string
		fails       error
		opened      bool
		stderr      string
	}{
		{"terminal", true, nil, nil, true, "works once"},
		{"script", false, nil, nil, false, "works once"},
		{"not wanted", true, []string{"--no-open"}, nil, false, "works once"},
		{"no display", true, nil, errors.New("this session has no display"), true, "open the link in a browser; it was not opened for you: this session has no display"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f, opened := newAPI(t, answers), ""
			got := f.runWith(func(a *app) {
				a.interactive = tc.interactive
				a.open = func(link string) error { opened = link; return tc.fails }
			}, append([]string{"console"}, tc.args...)...)
			if got.code != exitOK || opened != "" && opened+"\n" != got.stdout || (opened != "") != tc.opened || !strings.Contains(got.stderr, tc.stderr) {
				t.Errorf("opened %q, %+v", opened, got)
			}
		})
	}
}

func TestBrowserCommand(t *testing.T) {
	for _, tc := range []struct {
		system  string
		environ []string
		want    []string
	}{
		{"linux", nil, nil},
		{"linux", []string{"DISPLAY="}, nil},
		{"linux", []string{"DISPLAY=:0"}, []string{"xdg-open"}},
		{"freebsd", []string{"WAYLAND_DISPLAY=wayland-0"}, []string{"xdg-open"}},
		{"darwin", nil, []string{"open"}},
		{"windows", nil, []string{"rundll32", "url.dll,FileProtocolHandler"}},
	} {
		if got := browserCommand(tc.system, tc.environ); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s %v: %v", tc.system, tc.environ, got)
		}
	}
}
