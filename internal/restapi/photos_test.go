package restapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
)

func TestPhotos(t *testing.T) {
	f := newFleet(t)
	taken := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	for i := range 5 {
		f.photos.photos = append(f.photos.photos, devices.Photo{ID: fmt.Sprintf("photo%d", 9-i), Device: []devices.ID{robot, "other"}[i%2], Question: "what?",
			Bytes: 4, SHA256: "abcd", Kind: "camera", TakenAt: taken})
	}
	f.photos.jpeg = []byte{0xFF, 0xD8, 0xFF, 0xD9}
	list := func(query string) (ids []string, next string) {
		var p struct {
			Items []struct {
				ID, Device string
				TakenAt    string `json:"taken_at"`
			}
			NextCursor string `json:"next_cursor"`
		}
		f.do(t, "GET", "/v1/photos"+query, "").json(t, &p)
		for _, item := range p.Items {
			if item.TakenAt != "2026-01-02T03:04:05.678Z" {
				t.Errorf("%+v", item)
			}
			ids = append(ids, item.ID+" "+item.Device)
		}
		return ids, p.NextCursor
	}
	first, next := list("?limit=2&device=aa:bb:cc:dd:ee:ff")
	second, end := list("?limit=2&device=aa:bb:cc:dd:ee:ff&cursor=" + next)
	if want := []string{"photo9 aa:bb:cc:dd:ee:ff", "photo7 aa:bb:cc:dd:ee:ff", "photo5 aa:bb:cc:dd:ee:ff"}; !slices.Equal(append(first, second...), want) || end != "" {
		t.Errorf("%v %v %q", first, second, end)
	}
	if all, _ := list(""); len(all) != 5 {
		t.Errorf("%v", all)
	}
	r := f.do(t, "GET", "/v1/photos/photo9", "")
	if r.status != 200 || !bytes.Equal([]byte(r.body), f.photos.jpeg) || r.header.Get("Content-Type") != "image/jpeg" || r.header.Get("ETag") != `"abcd"` ||
		r.header.Get("Content-Length") != "4" || r.header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("%d %q %v", r.status, r.body, r.header)
	}
	for _, tag := range []string{`"abcd"`, `W/"abcd"`, `"x", "abcd"`, "*"} {
		if r := f.do(t, "GET", "/v1/photos/photo9", "", "If-None-Match", tag); r.status != 304 || r.body != "" {
			t.Errorf("%s: %d", tag, r.status)
		}
	}
	if r := f.do(t, "GET", "/v1/photos/photo9", "", "If-None-Match", `"x"`); r.status != 200 {
		t.Errorf("%d", r.status)
	}
	if r := f.do(t, "HEAD", "/v1/photos/photo9", ""); r.status != 200 || r.body != "" || r.header.Get("Content-Length") != "4" {
		t.Errorf("%d %v", r.status, r.header)
	}
	if r := f.do(t, "DELETE", "/v1/photos/photo9", ""); r.status != 204 {
		t.Errorf("%d %s", r.status, r.body)
	}
	f.do(t, "GET", "/v1/photos/photo9", "").problem(t, 404, devices.CodeNotFound)
	f.do(t, "DELETE", "/v1/photos/photo9", "").problem(t, 404, devices.CodeNotFound)
	f.do(t, "GET", "/v1/photos?device=a.b", "").problem(t, 400, devices.CodeBadRequest)
	f.photos.err = &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "away"}
	for _, path := range []string{"/v1/photos", "/v1/photos/photo8"} {
		if p := f.do(t, "GET", path, "").problem(t, 503, devices.CodeUnavailable); p.Part != "nats" {
			t.Errorf("%+v", p)
		}
	}
}

func TestNodes(t *testing.T) {
	f := newFleet(t)
	started := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, name := range []string{"b", "c", "a"} {
		f.nodes = append(f.nodes, devices.Node{Name: name, Version: "1", Started: started, Devices: 7, API: "http://x"})
	}
	var p struct {
		Items      []struct{ Name string }
		NextCursor string `json:"next_cursor"`
	}
	r := f.do(t, "GET", "/v1/nodes?limit=1", "")
	r.json(t, &p)
	if !strings.HasPrefix(r.body, `{"items":[{"name":"a","version":"1","started":"2026-01-02T03:04:05.000Z","devices":7,"api":"http://x"}],"next_cursor":"`) || p.NextCursor == "" {
		t.Errorf("%s", r.body)
	}
	f.do(t, "GET", "/v1/nodes?limit=2&cursor="+p.NextCursor, "").json(t, &p)
	if len(p.Items) != 2 || p.Items[0].Name != "b" || p.NextCursor != "" {
		t.Errorf("%+v", p)
	}
}

func TestDiagnosis(t *testing.T) {
	f := newFleet(t)
	r := f.do(t, "GET", "/v1/diagnosis?device=AABBCCDDEEFF", "")
	want := `{"ota_url":"http://192.0.2.1:8000/xiaozhi/ota/","device":"aa:bb:cc:dd:ee:ff","status":200,"reply":{"websocket": {"url":"ws://x"}},` +
		`"findings":[{"severity":"warning","setting":"--public-host","message":"\"quoted\""}]}`
	if r.status != 200 || strings.TrimSpace(r.body) != want {
		t.Errorf("%s", r.body)
	}
	if r := f.do(t, "GET", "/v1/diagnosis", ""); !strings.Contains(r.body, `"device":""`) {
		t.Errorf("%s", r.body)
	}
	f.do(t, "GET", "/v1/diagnosis?device=a.b", "").problem(t, 400, devices.CodeBadRequest)
}

func TestLogLevel(t *testing.T) {
	f := newFleet(t)
	for _, level := range []string{"debug", "warn", "error", "info"} {
		for _, r := range []response{f.do(t, "PUT", "/v1/log-level", `{"level":"`+level+`"}`), f.do(t, "GET", "/v1/log-level", "")} {
			if r.status != 200 || strings.TrimSpace(r.body) != `{"level":"`+level+`"}` {
				t.Errorf("%d %s", r.status, r.body)
			}
		}
	}
	if f.level.Level() != slog.LevelInfo {
		t.Errorf("%v", f.level.Level())
	}
	for _, body := range []string{`{"level":"loud"}`, `{}`, `{"level":1}`} {
		f.do(t, "PUT", "/v1/log-level", body).problem(t, 400, devices.CodeBadRequest)
	}
}

func TestReadiness(t *testing.T) {
	f := newFleet(t)
	ready := func(status int, want string) {
		t.Helper()
		r := f.do(t, "GET", "/readyz", "", "Authorization", "")
		if r.status != status || strings.TrimSpace(r.body) != want || !json.Valid([]byte(r.body)) || r.header.Get("Content-Type") != "application/json" {
			t.Errorf("%d %s", r.status, r.body)
		}
	}
	ready(200, `{"ready":true,"down":{}}`)
	f.mu.Lock()
	f.down = map[string]error{"nats": errors.New("not connected"), "database": nil}
	f.mu.Unlock()
	ready(503, `{"ready":false,"down":{"nats":"not connected"}}`)
	f.draining.Store(true)
	ready(503, `{"ready":false,"down":{"nats":"not connected","node":"stopping"}}`)
	if r := f.do(t, "GET", "/livez", ""); r.status != 200 || r.body != "ok\n" {
		t.Errorf("%d %s", r.status, r.body)
	}
}
