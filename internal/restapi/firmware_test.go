package restapi

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/firmware"
	"fleetd/internal/selector"
)

// fakeFirmware has the images a00, a01 and a02, newest first. It notes what it is asked.
type fakeFirmware struct {
	during func() // called while a file is added; may be nil
	asked  string
	dir    string
}

func fakeImage(n int) api.FirmwareImage {
	x := api.FirmwareImage{ID: fmt.Sprintf("a%02d", n) + strings.Repeat("0", 61), Kind: "application", Boards: []string{}, Findings: []api.ImageFinding{}, Size: 5}
	x.AddedAt = api.At(time.UnixMicro(int64(1_000_000 - n)))
	return x
}

func (f *fakeFirmware) Add(_ context.Context, by access.Principal, u firmware.Upload) (added api.AddedFirmware, fresh bool, err error) {
	if f.during != nil {
		f.during()
	}
	content, err := io.ReadAll(io.NewSectionReader(u.File, 0, u.Size+1))
	f.asked = fmt.Sprint(by.Name(), " ", string(content), " ", u.Note, " ", u.SHA256, " ", u.Signature, " ", u.DryRun)
	if string(content) == "bad" {
		return added, false, &devices.Error{Code: devices.CodeImageInvalid, Detail: "It is bad.", Findings: []api.ImageFinding{{Code: "hash", Severity: "error", Text: "Wrong."}}}
	}
	return api.AddedFirmware{Items: []api.FirmwareImage{fakeImage(0)}, Dropped: []string{}}, string(content) != "known", err
}

func (f *fakeFirmware) List(_ context.Context, _ access.Principal, filter firmware.Filter) ([]api.FirmwareImage, error) {
	f.asked = fmt.Sprintf("%+v", filter)
	return []api.FirmwareImage{fakeImage(0), fakeImage(1), fakeImage(2)}, nil
}

func (f *fakeFirmware) Get(_ context.Context, _ access.Principal, id string) (api.FirmwareImage, error) {
	if id != "a00" {
		return api.FirmwareImage{}, &devices.Error{Code: devices.CodeNotFound, Detail: "none"}
	}
	return fakeImage(0), nil
}

func (f *fakeFirmware) Open(_ context.Context, id string) (api.FirmwareImage, *os.File, error) {
	if id != "a00" {
		return api.FirmwareImage{}, nil, &devices.Error{Code: devices.CodeUnavailable, Part: "nats", Detail: "away"}
	}
	path := filepath.Join(f.dir, id)
	if err := os.WriteFile(path, []byte("image"), 0o600); err != nil {
		return api.FirmwareImage{}, nil, err
	}
	file, err := os.Open(path)
	return fakeImage(0), file, err
}

func (f *fakeFirmware) Edit(_ context.Context, _ access.Principal, id string, e api.FirmwareEdit) (api.FirmwareImage, error) {
	f.asked = fmt.Sprint(id, " ", *e.Boards, e.Note == nil)
	return fakeImage(0), nil
}

func (f *fakeFirmware) Delete(_ context.Context, _ access.Principal, id string, force bool) error {
	f.asked = fmt.Sprint(id, " ", force)
	if !force {
		return &devices.Error{Code: devices.CodeConflict, Detail: "devices run it"}
	}
	return nil
}

func (f *fakeFirmware) Count(_ context.Context, _ access.Principal, t firmware.Target, sel selector.Selector) (*api.FirmwareCounts, error) {
	return &api.FirmwareCounts{Devices: 3, Verdicts: map[string]int64{}, Findings: map[string]int64{}}, nil
}

func (f *fakeFirmware) Check(_ context.Context, by access.Principal, t firmware.Target, sel selector.Selector, after string, limit int) ([]api.FirmwareVerdict, string, error) {
	f.asked = fmt.Sprintf("%s %+v %s %q %d", by.Name(), t, sel, after, limit)
	next := "next"
	if after == next {
		next = ""
	}
	return []api.FirmwareVerdict{{Device: "d", Verdict: "fit", Findings: []api.FirmwareFinding{}}}, next, nil
}

func (f *fakeFirmware) OfDevice(_ context.Context, id devices.ID, image string) (api.DeviceFirmware, error) {
	f.asked = string(id) + " " + image
	return api.DeviceFirmware{Device: string(id), History: []api.DeviceImage{}}, nil
}

func TestFirmware(t *testing.T) {
	fake := &fakeFirmware{dir: t.TempDir()}
	f := newFleet(t, func(o *Options) { o.Firmware, o.MaxFirmware, o.Dir = fake, 8, fake.dir })
	key := f.key(t, "uploads", "firmware", "")
	fake.during = func() { // the file takes disk until it is gone
		f.api.receiving.mu.Lock()
		defer f.api.receiving.mu.Unlock()
		if len(f.api.receiving.held) != 1 {
			t.Errorf("places %v", f.api.receiving.held)
		}
	}
	asked := func(want string) {
		t.Helper()
		if fake.asked != want {
			t.Errorf("asked %q, want %q", fake.asked, want)
		}
		fake.asked = ""
	}
	for _, c := range []struct {
		query, body string
		status      int
		asked       string
	}{
		{"", "new", 201, "uploads new    false"},
		{"", "known", 200, "uploads known    false"},
		{"?dry_run=true&note=n&sha256=s&signature=g", "new", 200, "uploads new n s g true"},
		{"", "bad", 422, "uploads bad    false"},
		{"", "12345678", 201, "uploads 12345678    false"},
		{"", "123456789", 413, ""},
		{"?what=1", "new", 400, ""},
	} {
		r := f.do(t, "POST", "/v1/firmware"+c.query, c.body, as(key)...)
		if r.status != c.status || c.status == 422 && !strings.Contains(r.body, `"code":"image_invalid"`) || c.status == 422 && !strings.Contains(r.body, `"findings":[{"code":"hash"`) {
			t.Errorf("%s %q: %d %s", c.query, c.body, r.status, r.body)
		}
		asked(c.asked)
	}
	if entries, err := os.ReadDir(fake.dir); err != nil || len(entries) != 0 {
		t.Errorf("%v are left, error %v", entries, err)
	}
	// A limited key is refused before its body is read.
	announced := strings.Repeat("5", 64)
	f.do(t, "POST", "/v1/firmware?sha256="+announced, "new", as(f.key(t, "lab", "firmware", "room=lab"))...).problem(t, 403, devices.CodeForbidden)
	// security: K44
	if entries := f.audited(audit.KindDevice); len(entries) != 1 || entries[0].Action != "add_firmware" || entries[0].Outcome != "forbidden" || !strings.Contains(entries[0].Detail, announced) {
		t.Errorf("audit %+v", entries)
	}
	reader := as(f.key(t, "reader", "firmware:read", ""))
	f.do(t, "POST", "/v1/firmware", "new", reader...).problem(t, 403, devices.CodeForbidden)
	asked("")

	var page api.List[api.FirmwareImage]
	f.do(t, "GET", "/v1/firmware?limit=2&board=b&version=v&kind=merged", "", reader...).json(t, &page)
	asked("{Version:v Board:b Kind:merged}")
	if len(page.Items) != 2 || page.Items[0].ID != fakeImage(0).ID || page.NextCursor == "" {
		t.Fatalf("%+v", page)
	}
	f.do(t, "GET", "/v1/firmware?limit=2&board=b&version=v&kind=merged&cursor="+page.NextCursor, "", reader...).json(t, &page)
	if len(page.Items) != 1 || page.Items[0].ID != fakeImage(2).ID || page.NextCursor != "" {
		t.Errorf("%+v", page)
	}
	f.do(t, "GET", "/v1/firmware/a09", "", reader...).problem(t, 404, devices.CodeNotFound)
	if r := f.do(t, "GET", "/v1/firmware/a00/file", "", reader...); r.status != 200 || r.body != "image" || r.header.Get("Content-Type") != "application/octet-stream" || r.header.Get("Content-Length") != "5" {
		t.Errorf("%d %s %v", r.status, r.body, r.header)
	}
	tag := `"` + fakeImage(0).ID + `"`
	for _, c := range []struct {
		method, header, value string
		status                int
		body, length          string
	}{
		{"HEAD", "", "", 200, "", "5"},
		{"GET", "Range", "bytes=1-2", 206, "ma", "2"},
		{"GET", "Range", "bytes=9-", 416, "invalid range: failed to overlap\n", ""},
		{"GET", "If-None-Match", tag, 304, "", ""},
		{"GET", "If-None-Match", `"other"`, 200, "image", "5"},
		{"GET", "If-Range", `"other"`, 200, "image", "5"},
	} {
		r := f.do(t, c.method, "/v1/firmware/a00/file", "", append(reader, c.header, c.value)...)
		if r.status != c.status || r.body != c.body || c.length != "" && r.header.Get("Content-Length") != c.length || c.status != 416 && r.header.Get("ETag") != tag {
			t.Errorf("%+v: %d %q %v", c, r.status, r.body, r.header)
		}
	}
	f.do(t, "GET", "/v1/firmware/a01/file", "", reader...).problem(t, 503, devices.CodeUnavailable)
	if r := f.do(t, "PATCH", "/v1/firmware/a00", `{"boards":["x"]}`, as(key)...); r.status != 200 {
		t.Errorf("%d %s", r.status, r.body)
	}
	asked("a00 [x] true")
	f.do(t, "DELETE", "/v1/firmware/a00", "", as(key)...).problem(t, 409, devices.CodeConflict)
	if r := f.do(t, "DELETE", "/v1/firmware/a00?force=true", "", as(key)...); r.status != 204 {
		t.Errorf("%d %s", r.status, r.body)
	}
	asked("a00 true")

	var check api.FirmwareCheck
	f.do(t, "GET", "/v1/firmware/check?release=2.4.2&select=room%3Dlab&limit=1", "", reader...).json(t, &check)
	asked(`reader {Image: Release:2.4.2} room=lab "" 1`)
	if check.Counts == nil || check.Counts.Devices != 3 || len(check.Items) != 1 || check.NextCursor == "" {
		t.Fatalf("%+v", check)
	}
	check.Counts = nil
	f.do(t, "GET", "/v1/firmware/check?release=2.4.2&select=room%3Dlab&limit=1&cursor="+check.NextCursor, "", reader...).json(t, &check)
	asked(`reader {Image: Release:2.4.2} room=lab "next" 1`)
	if check.Counts != nil || check.NextCursor != "" {
		t.Errorf("%+v", check)
	}
	f.do(t, "GET", "/v1/firmware/check?release=2.4.2&select=room%3D%3D", "", reader...).problem(t, 400, devices.CodeBadRequest)
	if r := f.do(t, "GET", "/v1/devices/"+string(robot)+"/firmware?image=a00", "", reader...); r.status != 200 {
		t.Errorf("%d %s", r.status, r.body)
	}
	asked(string(robot) + " a00")
}
