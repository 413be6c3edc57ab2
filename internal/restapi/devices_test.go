package restapi

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
)

const devicePath = "/v1/devices/aa:bb:cc:dd:ee:ff"

func TestDevice(t *testing.T) {
	f := newFleet(t)
	script := devicetest.NewScript()
	l := f.connect(t, robot, script)
	r := f.do(t, "GET", devicePath, "")
	var d api.Device
	r.json(t, &d)
	sum := sha256.Sum256([]byte(script.Tools))
	if d.ID != string(robot) || d.State != string(devices.StateOnline) || d.Transport != "websocket" || d.Node != "n-test" || d.Board != "bread-compact-wifi" ||
		d.Firmware != "2.4.2" || d.ClientID != "client-1" || d.Client != f.service.Client("client-1") || d.SessionID != l.session.ID() || d.MCP.State != "ready" || d.MCP.Tools != 2 ||
		d.MCP.Catalog != hex.EncodeToString(sum[:]) || d.MCP.CatalogState != "ready" || d.MCP.Partial || d.MCP.Error != "" {
		t.Errorf("%s", r.body)
	}
	for _, part := range []string{`"first_seen":"`, `"connected_at":"`, `"labels":{}`, `"audio":{"open":false,"packets":0,"dropped":0}`} {
		if !strings.Contains(r.body, part) {
			t.Errorf("%s is not in %s", part, r.body)
		}
	}
	if !regexp.MustCompile(`"last_seen":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"`).MatchString(r.body) || !strings.Contains(r.body, `"pending":[]`) {
		t.Errorf("%s", r.body)
	}
	devicetest.Eventually(t, "the list is recorded", func() bool { _, n, _, _ := f.ports.Of(robot); return n.Catalog != devices.Hash{} })
	l.session.Close(devices.CloseGone)
	r = f.do(t, "GET", "/v1/devices/AA-BB-CC-DD-EE-FF", "")
	r.json(t, &d)
	if d.State != string(devices.StateOffline) || d.Transport != "" || d.SessionID != "" || d.MCP.CatalogState != "stale" || !strings.Contains(r.body, `"connected_at":null`) {
		t.Errorf("%s", r.body)
	}
	f.do(t, "GET", "/v1/devices/nobody", "").problem(t, 404, devices.CodeDeviceUnknown)
	f.do(t, "GET", "/v1/devices/no%20id", "").problem(t, 400, devices.CodeBadRequest)
	f.ports.SetAway(true)
	f.do(t, "GET", "/v1/devices/nobody", "").problem(t, 404, devices.CodeDeviceUnknown) // which needs no database
	p := f.do(t, "GET", devicePath, "").problem(t, 503, devices.CodeUnavailable)
	if p.Part != "database" {
		t.Errorf("%+v", p)
	}
	f.ports.SetAway(false)
}

func TestDeviceList(t *testing.T) {
	f := newFleet(t)
	var want []string
	for i := range 25 {
		id := devices.ID(fmt.Sprintf("dev-%02d", i))
		want = append(want, string(id))
		f.ports.SaveDevice(devices.Device{ID: id, Admission: devices.AdmissionMember})
	}
	type page struct {
		Items []struct {
			ID string `json:"id"`
		} `json:"items"`
		NextCursor string `json:"next_cursor"`
	}
	var got []string
	cursor := ""
	for pages := 1; ; pages++ {
		var p page
		f.do(t, "GET", "/v1/devices?limit=10&cursor="+cursor, "").json(t, &p)
		for _, d := range p.Items {
			got = append(got, d.ID)
		}
		if cursor = p.NextCursor; cursor == "" {
			if pages != 3 {
				t.Errorf("%d pages", pages)
			}
			break
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
	var p page
	f.do(t, "GET", "/v1/devices?limit=25", "").json(t, &p)
	if len(p.Items) != 25 || p.NextCursor != "" {
		t.Errorf("%d items, cursor %q", len(p.Items), p.NextCursor)
	}
	query := url.Values{"state": {"offline"}, "transport": {"websocket"}, "board": {"b"}, "firmware": {"2.4"}, "label": {"room=hall"}, "reason": {"gone"}, "node": {"n-1"}, "q": {"x y"}, "limit": {"7"}}
	f.do(t, "GET", "/v1/devices?"+query.Encode(), "").json(t, &p)
	f.ports.mu.Lock()
	asked := f.ports.asked
	f.ports.mu.Unlock()
	if want := "room=hall,state=offline,transport=websocket,node=n-1,reason=gone,board=b,firmware=2.4"; asked.Select.String() != want || asked.Text != "x y" || asked.Limit != 7 || asked.Sort != devices.SortID {
		t.Errorf("%+v", asked)
	}
	empty := newFleet(t)
	if r := empty.do(t, "GET", "/v1/devices", ""); strings.TrimSpace(r.body) != `{"items":[],"next_cursor":""}` {
		t.Errorf("%s", r.body)
	}
	empty.ports.SetAway(true)
	if p := empty.do(t, "GET", "/v1/devices", "").problem(t, 503, devices.CodeUnavailable); p.Part != "database" {
		t.Errorf("%+v", p)
	}
	empty.ports.SetAway(false)
}

func TestEdit(t *testing.T) {
	f := newFleet(t)
	f.connect(t, robot, devicetest.NewScript())
	for _, tc := range []struct{ body, want, applies string }{
		{`{"name":"arm \u00e9 <1>"}`, `"name":"arm é <1>"`, ""},
		{`{"labels":{"room":"hall"}}`, `"labels":{"room":"hall"}`, ""},
		{`{}`, `"labels":{"room":"hall"}`, ""},
		{`{"transport_wanted":"mqtt"}`, `"name":"arm é <1>"`, "next boot"},
		{`{"transport_wanted":"mqtt"}`, `"transport_wanted":"mqtt"`, "next boot"},
		{`{"transport_wanted":"","labels":{}}`, `"transport_wanted":""`, "next boot"},
		{`{"name":""}`, `"name":""`, ""},
	} {
		r := f.do(t, "PATCH", devicePath, tc.body)
		var answer struct{ Applies string }
		r.json(t, &answer)
		if !strings.Contains(r.body, tc.want) || answer.Applies != tc.applies || (tc.applies == "") == strings.Contains(r.body, "applies") {
			t.Errorf("%s: %s", tc.body, r.body)
		}
	}
	f.do(t, "PATCH", "/v1/devices/nobody", `{"name":"x"}`).problem(t, 404, devices.CodeDeviceUnknown)
}

// Clients are shown as hashes, in every answer and to every key; the Client-Id to administrators in one device and in an export
// that they ask for, addresses of clients that wait to keys that may approve them.
func TestClients(t *testing.T) {
	f := newFleet(t)
	f.ports.Put(devices.Member{ID: robot, ClientID: "client-1"})
	if _, err := f.service.CheckIn(t.Context(), admission.CheckIn{Device: robot, ClientID: "client-2", Address: netip.MustParseAddr("192.0.2.7")}); err != nil {
		t.Fatal(err)
	}
	first, second := f.service.Client("client-1"), f.service.Client("client-2")
	read, write := as(f.key(t, "read", "devices:read", "")), as(f.key(t, "write", "devices:read devices:write", ""))
	wanted := map[string]bool{first: true, second: true}
	for _, path := range []string{devicePath, "/v1/devices", "/v1/devices?state=pending"} {
		for who, header := range map[string][]string{"read": read, "write": write, "admin": nil} {
			r := f.do(t, "GET", path, "", header...)
			one := who == "admin" && path == devicePath
			// security: D20
			if strings.Contains(r.body, "client-1") != one || strings.Contains(r.body, "client-2") || strings.Contains(r.body, `"client_id"`) != one {
				t.Errorf("%s shows %s: %s", path, who, r.body)
			}
			if one != (r.header.Get("Cache-Control") == "no-store") {
				t.Errorf("%s shows %s with Cache-Control %q", path, who, r.header.Get("Cache-Control"))
			}
			// security: D20
			if strings.Contains(r.body, "192.0.2.7") != (who != "read") {
				t.Errorf("%s shows %s: %s", path, who, r.body)
			}
			for client := range wanted {
				if !strings.Contains(r.body, client) {
					t.Errorf("%s does not show %s the client %s: %s", path, who, client, r.body)
				}
			}
		}
	}
	for _, format := range []string{"csv", "ndjson"} {
		for _, header := range [][]string{read, write} {
			// security: D20
			f.do(t, "GET", "/v1/devices/export?secrets=true&format="+format, "", header...).problem(t, 403, devices.CodeForbidden)
		}
		for secrets, shown := range map[string]bool{"": false, "&secrets=false": false, "&secrets=true": true} {
			r := f.do(t, "GET", "/v1/devices/export?format="+format+secrets, "")
			// security: D20
			if strings.Contains(r.body, "client-1") != shown || !strings.Contains(r.body, first) {
				t.Errorf("%s%s: %s", format, secrets, r.body)
			}
		}
	}
	f.do(t, "GET", "/v1/devices/export?secrets=yes", "").problem(t, 400, devices.CodeBadRequest)

	path := devicePath + "/clients/"
	f.do(t, "DELETE", path+second, "", read...).problem(t, 403, devices.CodeForbidden)
	f.do(t, "DELETE", path+"client-2", "").problem(t, 400, devices.CodeBadRequest)
	f.do(t, "DELETE", path+first, "").problem(t, 409, devices.CodeConflict)
	f.do(t, "DELETE", path+f.service.Client("x"), "").problem(t, 404, devices.CodeNotFound)
	f.do(t, "DELETE", "/v1/devices/nobody/clients/"+second, "").problem(t, 404, devices.CodeDeviceUnknown)
	f.do(t, "POST", devicePath+"/approve", "").problem(t, 409, devices.CodeConflict)
	f.do(t, "POST", devicePath+"/approve", `{"client":"client-2"}`).problem(t, 400, devices.CodeBadRequest)
	f.do(t, "POST", devicePath+"/approve", `{"client":"`+f.service.Client("x")+`"}`).problem(t, 404, devices.CodeNotFound)
	if r := f.do(t, "DELETE", path+second, "", write...); r.status != 204 || r.body != "" {
		t.Errorf("refuse: %d %s", r.status, r.body)
	}
	var d api.Device
	f.do(t, "GET", devicePath, "").json(t, &d)
	if d.Client != first || len(d.Pending) != 0 || d.State != "offline" {
		t.Errorf("after the refusal: %+v", d)
	}
	f.do(t, "POST", devicePath+"/approve", `{"client":"`+second+`"}`, write...).json(t, &d)
	if d.Client != second {
		t.Errorf("after the approval: %+v", d)
	}
	entries := f.audited(audit.KindDevice)
	if last := entries[len(entries)-1]; last.Action != "approve" || last.Detail != "client "+second {
		t.Errorf("%+v", last)
	}
	for _, path := range []string{"/v1/changes", devicePath + "/changes"} {
		r := f.do(t, "GET", path, "", read...)
		// security: D20
		if strings.Contains(r.body, "client-") || !strings.Contains(r.body, `"aspect":"refused","value":["`+second+`"]`) || !strings.Contains(r.body, `"client":"`+first+`"`) ||
			!strings.Contains(r.body, `"aspect":"client","value":"`+second+`"`) || !strings.Contains(r.body, `"aspect":"refused","value":[]`) {
			t.Errorf("%s: %s", path, r.body)
		}
	}
}

func TestAdmission(t *testing.T) {
	f := newFleet(t)
	welcome, err := f.service.CheckIn(t.Context(), admission.CheckIn{Device: robot, ClientID: "client-1"})
	if err != nil || welcome.Admitted {
		t.Fatal(welcome, err)
	}
	var d api.Device
	f.do(t, "GET", devicePath, "").json(t, &d)
	if d.State != string(devices.StatePending) || len(d.Pending) != 1 || d.Pending[0].Client != f.service.Client("client-1") || d.ClientID != "" {
		t.Errorf("%+v", d)
	}
	f.do(t, "POST", "/v1/devices/"+wrongCode(welcome.Code)+"/approve", "").problem(t, 404, devices.CodeDeviceUnknown)
	f.do(t, "POST", "/v1/devices/"+welcome.Code+"/approve", "").json(t, &d)
	if d.ID != string(robot) || d.State != string(devices.StateOffline) || d.ClientID != "client-1" {
		t.Errorf("%+v", d)
	}
	if r := f.do(t, "POST", devicePath+"/approve", "{}"); r.status != 200 {
		t.Errorf("approved twice: %d %s", r.status, r.body)
	}
	f.do(t, "POST", "/v1/devices/nobody/approve", "").problem(t, 404, devices.CodeDeviceUnknown)
	f.do(t, "POST", "/v1/devices/n%2Fb/approve", "").problem(t, 400, devices.CodeBadRequest)
	for range admission.MaxWrongCodes {
		f.do(t, "POST", "/v1/devices/"+wrongCode(welcome.Code)+"/approve", "")
	}
	f.do(t, "POST", "/v1/devices/"+wrongCode(welcome.Code)+"/approve", "").problem(t, 403, devices.CodeForbidden)
	if r := f.do(t, "POST", devicePath+"/revoke", ""); r.status != 204 || r.body != "" {
		t.Errorf("revoke: %d %s", r.status, r.body)
	}
	if f.service.MayBeMember(robot) {
		t.Error("still a member")
	}
	f.do(t, "POST", "/v1/devices/nobody/revoke", "").problem(t, 404, devices.CodeDeviceUnknown)
	if r := f.do(t, "DELETE", devicePath, ""); r.status != 204 || r.body != "" {
		t.Errorf("forget: %d %s", r.status, r.body)
	}
	f.do(t, "GET", devicePath, "").problem(t, 404, devices.CodeDeviceUnknown)
	f.do(t, "DELETE", devicePath, "").problem(t, 404, devices.CodeDeviceUnknown)
}

func wrongCode(code string) string {
	if code == "123456" {
		return "654321"
	}
	return "123456"
}

func TestTools(t *testing.T) {
	f := newFleet(t)
	script := devicetest.NewScript()
	// White space inside a tool is part of what it is.
	odd := strings.Replace(devicetest.Volume, `"name":`, `"name" :  `, 1)
	script.Tools = "[" + odd + "," + devicetest.Reboot + "]"
	f.connect(t, robot, script)
	sum := sha256.Sum256([]byte(script.Tools))
	hash := hex.EncodeToString(sum[:])
	prefix := `{"catalog":"` + hash + `","state":"ready","partial":false,"items":[`
	for _, tc := range []struct{ method, path, want string }{
		{"GET", devicePath + "/tools", prefix + odd + "]}\n"},
		{"GET", devicePath + "/tools?user=false", prefix + odd + "]}\n"},
		{"GET", devicePath + "/tools?user=true", prefix + odd + "," + devicetest.Reboot + "]}\n"},
		{"POST", devicePath + "/tools/refresh", prefix + odd + "]}\n"},
		{"POST", devicePath + "/tools/refresh?user=true", prefix + odd + "," + devicetest.Reboot + "]}\n"},
		{"GET", "/v1/catalogs/" + hash, `{"catalog":"` + hash + `","items":` + script.Tools + "}\n"},
	} {
		r := f.do(t, tc.method, tc.path, "")
		if r.status != 200 || r.body != tc.want || r.header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %s, want %s", tc.path, r.status, r.body, tc.want)
		}
	}
	f.service.CloseAll(devices.CloseGone)
	if r := f.do(t, "GET", devicePath+"/tools", ""); !strings.Contains(r.body, `"state":"stale"`) {
		t.Errorf("%s", r.body)
	}
	f.do(t, "POST", devicePath+"/tools/refresh", "").problem(t, 409, devices.CodeDeviceOffline)
	f.do(t, "GET", devicePath+"/tools?user=maybe", "").problem(t, 400, devices.CodeBadRequest)
	f.do(t, "GET", "/v1/devices/nobody/tools", "").problem(t, 404, devices.CodeDeviceUnknown)
	f.do(t, "GET", "/v1/catalogs/"+strings.Repeat("0", 63)+"1", "").problem(t, 404, devices.CodeNotFound)
	f.do(t, "GET", "/v1/catalogs/xyz", "").problem(t, 400, devices.CodeBadRequest)
	mute := devices.ID("mute")
	session, err := f.service.Accept(devices.Identity{Device: mute, ClientID: "c"}, &line{script: script})
	if err != nil {
		t.Fatal(err)
	}
	session.StartMCP(devices.FeaturesNone)
	if r := f.do(t, "GET", "/v1/devices/mute/tools", ""); r.body != `{"catalog":"","state":"none","partial":false,"items":[]}`+"\n" {
		t.Errorf("%s", r.body)
	}
}

func TestHistory(t *testing.T) {
	f := newFleet(t)
	f.ports.SaveDevice(devices.Device{ID: robot})
	for i := range 5 {
		f.ports.SaveCatalog(devices.HistoryEntry{Device: robot, Epoch: devices.Epoch(1 + i/2), Seq: int64(1 + i), Catalog: devices.Hash{byte(i + 1)},
			Firmware: fmt.Sprint("2.", i), At: time.Unix(int64(i), 0)}, devices.CatalogText{}, func() {})
	}
	var got []string
	cursor := ""
	for {
		var p struct {
			Items []struct {
				Firmware, Catalog string
				Since             time.Time
			}
			NextCursor string `json:"next_cursor"`
		}
		f.do(t, "GET", devicePath+"/catalogs?limit=2&cursor="+cursor, "").json(t, &p)
		for _, e := range p.Items {
			got = append(got, e.Firmware+" "+e.Catalog[:2])
		}
		if cursor = p.NextCursor; cursor == "" {
			break
		}
	}
	if !slices.Equal(got, []string{"2.4 05", "2.3 04", "2.2 03", "2.1 02", "2.0 01"}) {
		t.Errorf("%v", got)
	}
	f.do(t, "GET", "/v1/devices/nobody/catalogs", "").problem(t, 404, devices.CodeDeviceUnknown)
}
