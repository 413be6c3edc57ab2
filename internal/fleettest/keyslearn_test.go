package fleettest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"image"
	"image/jpeg"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/devicetest"
	"fleetd/internal/espimage/imagetest"
	"fleetd/internal/jsontest"
)

// mark is text that shows where it came from: of which room it tells what. What concerns both rooms is of the room "other".
type mark struct{ text, room, kind string }

// walker is a key, and what it may learn.
type walker struct {
	name, token string
	index       byte
	rooms       []string
	kinds       map[string]bool
	// blind are the sides that it cannot tell from what does not exist, or, if blindTo is set, not in the operations that match.
	blind   []string
	blindTo *regexp.Regexp
	streams map[string]*Output
	own     map[string]string // what it has made itself, by the name of a parameter
}

func (k *walker) may(m mark) bool {
	return m.text == "mark"+k.name || slices.Contains(k.rooms, m.room) && (k.kinds[m.kind] || k.kinds["everything"])
}

// world is a fleet with marks, and those who walk through it.
type world struct {
	node      *Node
	document  openAPI
	described *jsontest.Document
	marks     []mark
	things    map[string]map[string]string // by side, then by the name of a parameter
	hooks     *markedReceiver
	keys      []*walker
	found     found
	seen      sync.Map // marks that the administrator saw
	served    sync.Map // operations that somebody was answered
	refused   sync.Map // the last refusal of each
}

// Members of each room besides the connected one. The numbers are marks, too.
var imported = map[string]int{"lab": 107, "hall": 131}

const both = "other" // the room of what concerns both

// roomDevice is the id of a device; its beginning is the mark of the room.
func roomDevice(room string, n int) string {
	return fmt.Sprintf("02:1e:a1:%02x:%02x:%02x", slices.Index(append(sides, "stranger"), room)+1, n>>8, n&255)
}

const connected = 0xff01 // the number of the connected device of a room

func (w *world) mark(room, kind, text string) string {
	w.marks = append(w.marks, mark{plain(text), room, kind})
	return text
}

// plain is text as it is compared: ids are written with and without colons, in URLs and in subjects.
func plain(text string) string { return separators.Replace(strings.ToLower(text)) }

var separators = strings.NewReplacer(":", "", "-", "", "_", "", "%3a", "", "@", "")

// victim is a device that one walker may delete; under the side absent one that it may create.
func (w *world) victim(side string, key *walker) string { return roomDevice(side, 1+int(key.index)) }

// outcast is one whose credentials the walker may end.
func (w *world) outcast(side string, key *walker) string { return roomDevice(side, 9+int(key.index)) }

type body struct {
	text, contentType string
	named             bool
}

// bodies are the bodies of a request. An operation that is new gets what its schema requires.
func (w *world) bodies(op *operation, side string, key *walker) []body {
	device := w.of(side, key)["device"]
	call := `{"action":{"call":{"tool":"` + status + `"}},`
	of := map[string][]string{
		"createJob": {call + `"select":"room=` + side + `"}`, call + `"devices":["` + device + `"]}`, call + `"select":"device=` + device + `"}`,
			`{"action":{"restart":{}},"devices":["` + device + `"],"when":{"at":"2099-01-01T00:00:00Z","until":"2099-01-02T00:00:00Z"}}`},
		"editDevice":       {`{"name":"walked"}`},
		"editDevices":      {`{"labels":{"walked":"yes"}}`},
		"sendRequest":      {`{"method":"tools/list"}`, `{"method":"tools/call","params":{"name":"` + status + `","arguments":{}}}`},
		"sendMessage":      {`{"type":"alert","status":"walked","message":"walked","emotion":"neutral"}`},
		"callTool":         {`{}`, `{"later":"1h"}`},
		"createWebhook":    {`{"url":"` + w.hooks.url + `/` + key.name + `","types":["offline"],"select":"room=` + side + `"}`},
		"editWebhook":      {`{"offline_for":""}`},
		"importDevices":    {"id,name\n" + w.victim(side, key) + ",walked\n"},
		"startTrace":       {`{}`},
		"approveDevice":    {`{}`},
		"rotateDevice":     {`{}`},
		"pauseJob":         {``},
		"editJob":          {`{"note":"walked"}`},
		"setPolicy":        {`{}`},
		"createConsoleKey": {`{"code":"none"}`},
		"addFirmware":      {string(imagetest.Build{}.Image())},
		"editFirmware":     {`{"note":"walked"}`},
	}
	if texts, ok := of[op.OperationID]; ok {
		var list []body
		for _, text := range texts {
			contentType := "application/json"
			if op.OperationID == "importDevices" {
				contentType = "text/csv"
			}
			list = append(list, body{text, contentType, w.names(text, side, key) || strings.Contains(text, w.victim(side, key))})
		}
		return list
	}
	for _, contentType := range slices.Sorted(maps.Keys(op.RequestBody.Content)) {
		text, err := json.Marshal(w.made(op.RequestBody.Content[contentType].Schema, "", side))
		if err == nil {
			return []body{{string(text), contentType, strings.Contains(string(text), device)}}
		}
	}
	return []body{{}}
}

// counted finds the numbers of devices that are marks; other numbers may be the same by chance.
var counted = regexp.MustCompile(`"(\w+)\\*":\s*(\d{3})[,}\]]|\b(\d{3}) (?:\w+ )?devices?\b`)

// notCounts are members of answers whose numbers count no devices.
var notCounts = regexp.MustCompile(`^(revision|bytes|size|status|age|.*_ms|version|port)$`)

// numbersIn returns the numbers in an answer that may count devices, each with the text around it.
func numbersIn(answer string) map[string]string {
	numbers := map[string]string{}
	for _, found := range counted.FindAllStringSubmatch(answer, -1) {
		if !notCounts.MatchString(found[1]) {
			numbers[found[2]+found[3]] = found[0]
		}
	}
	return numbers
}

// check looks in an answer for marks of what the key may not learn. What the caller sent is not news to it.
func (w *world) check(key *walker, operation, request, answer string, counts bool) {
	text, asked, numbers := plain(answer), plain(request), numbersIn(answer)
	for _, m := range w.marks {
		if at, found := numbers[m.text]; m.kind == "count" {
			switch {
			case found && key.name == "admin":
				w.seen.Store(m, true)
			case found && counts && !key.may(m):
				w.found.add(key.name+" learns in "+operation+" the number of "+m.room+", "+m.text, request+"\n"+around(answer, at))
			}
			continue
		}
		switch {
		case !strings.Contains(text, m.text):
		case key.name == "admin":
			w.seen.Store(m, true)
		case !key.may(m) && !strings.Contains(asked, m.text):
			w.found.add(key.name+" learns in "+operation+" the "+m.kind+" of "+m.room, request+"\n"+around(text, m.text))
		}
	}
}

// around is the part of an answer where text is.
func around(answer, text string) string {
	i := max(strings.Index(answer, text), 0)
	return "\t" + answer[max(i-300, 0):min(i+len(text)+200, len(answer))]
}

// compare compares the answers of requests that differ in what they name.
func (w *world) compare(key *walker, operation string, answers map[string]string) {
	absent, compared := answers["absent"]
	for _, side := range key.blind {
		there, ok := answers[side]
		if !ok || !compared || key.blindTo != nil && !key.blindTo.MatchString(operation) {
			continue
		}
		if there != absent {
			w.found.add(key.name+" can tell in "+operation+" what is in "+side+" from what does not exist", "\t"+there[:min(len(there), 900)]+"\n\t"+absent[:min(len(absent), 900)])
		}
	}
}

// unserved are operations that nobody is answered in a walk: the first two are those of the console itself, a job has to
// fail first, images are changed by keys without limits alone, and there is none to roll out.
var unserved = map[string]bool{"createConsoleKey": true, "endSelf": true, "retryJob": true,
	"addFirmware": true, "editFirmware": true, "deleteFirmware": true, "rollFirmware": true, "rollbackJob": true}

// walk makes all requests of a phase with a key.
func (w *world) walk(t testing.TB, key *walker, phase int) {
	t.Helper()
	var made int
	for _, op := range w.document.operations() {
		if op.phase() != phase {
			continue
		}
		answers := map[string]map[string]string{}
		for _, c := range w.calls(op, key) {
			if op.OperationID == "endSelf" && strings.Contains(key.name, "console") {
				continue // it ends the walk
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			r, err := w.do(ctx, key.token, c)
			cancel()
			if err != nil {
				t.Error(err)
				continue
			}
			made++
			if r.status < 300 {
				w.served.Store(op.OperationID, true)
			} else if key.own != nil {
				w.refused.Store(op.OperationID, c.String()+"\n"+r.text)
			}
			if r.status >= 500 {
				t.Errorf("%s: %s: %d %s", key.name, c, r.status, r.text)
			}
			w.check(key, op.OperationID, c.String(), r.text, phase == phaseReads)
			if c.side != "" {
				template := op.OperationID + " " + w.unnamed(c.side, c.target+" "+c.body, key)
				if answers[template] == nil {
					answers[template] = map[string]string{}
				}
				answers[template][c.side] = w.unnamed(c.side, r.text, key)
			}
		}
		for template, of := range answers {
			w.compare(key, template, of)
		}
	}
	t.Logf("%s: %d requests", key.name, made)
}

// markedReceiver takes deliveries of webhooks, by path.
type markedReceiver struct {
	url string
	mu  sync.Mutex
	got map[string]string
}

func newMarkedReceiver(t testing.TB) *markedReceiver {
	r := &markedReceiver{got: map[string]string{}}
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		content, _ := io.ReadAll(req.Body)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.got[req.URL.Path] += string(content) + "\n"
	}))
	t.Cleanup(server.Close)
	r.url = server.URL
	return r
}

func (r *markedReceiver) of(path string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.got[path]
}

// client returns the API as a key sees it.
func (w *world) client(t testing.TB, token string) *apiclient.Client {
	t.Helper()
	client, err := apiclient.New(w.node.Info.API, token)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// allScopes are those of a key that is limited by devices or tools alone.
var allScopes = []string{"devices:read", "devices:write", "photos:read", "tools:call:user", "events:read", "audio", "jobs", "webhooks", "firmware"}

func (w *world) newKey(t testing.TB, name string, scopes []string, devices string, tools ...string) api.CreatedKey {
	t.Helper()
	k, err := w.node.CreateKey(t.Context(), api.NewKey{Name: w.mark(both, "key", "mark"+name), Scopes: scopes, Devices: api.Selection{Text: devices}, Tools: tools})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// connect brings the device of a room online, all of whose words are marks.
func (w *world) connect(t testing.TB, room string) *device {
	t.Helper()
	id := roomDevice(room, connected)
	w.mark(room, "id", id[:len("02:1e:a1:00")])
	w.mark(room, "Client-Id", clientOf(id))
	check := fmt.Sprintf(`{"version":2,"application":{"version":"2.4.2"},"board":{"name":"%s"}}`,
		w.mark(room, "board", "mark"+room+"board"))
	reply, code := checkIn(t, w.node.Info.OTA, id, check)
	if code != http.StatusOK {
		t.Fatalf("%d %s", code, reply.raw)
	}
	var camera atomic.Pointer[struct{ URL, Token string }]
	script := devicetest.NewScript()
	script.Tools = fmt.Sprintf(`[{"name":%q,"description":"State.","inputSchema":{"type":"object","properties":{}}},`+
		`{"name":%q,"description":"Photo.","inputSchema":{"type":"object","properties":{"question":{"type":"string"}},"required":["question"]}},`+
		`{"name":"self.%s.go","description":"%s","inputSchema":{"type":"object","properties":{"%s":{"type":"string"}}}}]`,
		status, takePhoto, w.mark(room, "tool", "mark"+room+"tool"), w.mark(room, "description", "mark"+room+"description"), w.mark(room, "argument", "mark"+room+"argument"))
	script.Other = func(r devicetest.Request) string {
		var p struct {
			Capabilities struct{ Vision struct{ URL, Token string } }
		}
		if r.Method != "initialize" || json.Unmarshal(r.Params, &p) != nil {
			return ""
		}
		camera.Store((*struct{ URL, Token string })(&p.Capabilities.Vision))
		return `"result":{"protocolVersion":"2024-11-05","capabilities":{"tools":{}},"serverInfo":{"name":"mark` + room + `board","version":"2.4.2"}}`
	}
	result := w.mark(room, "result", "mark"+room+"result")
	script.Call = func(tool string, arguments json.RawMessage) string {
		if tool != takePhoto {
			return `"result":{"content":[{"type":"text","text":"` + result + `"}],"isError":false}`
		}
		var p struct{ Question string }
		_ = json.Unmarshal(arguments, &p) // the test made it
		text, err := json.Marshal(upload(t, *camera.Load(), id, p.Question))
		if err != nil {
			t.Error(err)
		}
		return `"result":{"content":[{"type":"text","text":` + string(text) + `}],"isError":false}`
	}
	return login{reply.login}.dial(t, script)
}

// clientOf is what the API shows of the Client-Id of a device, or of that of the client that waits as it.
func (w *world) clientOf(t testing.TB, id string) string {
	t.Helper()
	d, err := w.node.Device(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if d.Client == "" {
		t.Fatalf("%+v", d)
	}
	if len(d.Pending) > 0 {
		return d.Pending[0].Client
	}
	return d.Client
}

// upload sends a photo as a device does, and returns the answer.
func upload(t testing.TB, camera struct{ URL, Token string }, id, question string) string {
	const boundary = "----ESP32_CAMERA_BOUNDARY"
	var picture bytes.Buffer
	if err := jpeg.Encode(&picture, image.NewGray(image.Rect(0, 0, 8, 8)), nil); err != nil {
		t.Error(err)
	}
	content := "--" + boundary + "\r\nContent-Disposition: form-data; name=\"question\"\r\n\r\n" + question + "\r\n" +
		"--" + boundary + "\r\nContent-Disposition: form-data; name=\"file\"; filename=\"camera.jpg\"\r\nContent-Type: image/jpeg\r\n\r\n" +
		picture.String() + "\r\n--" + boundary + "--\r\n"
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, camera.URL, strings.NewReader(content))
	if err != nil {
		t.Error(err)
		return ""
	}
	r.Header = http.Header{"Device-Id": {id}, "Client-Id": {clientOf(id)}, "Authorization": {"Bearer " + camera.Token}, "Content-Type": {"multipart/form-data; boundary=" + boundary}}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Error(err)
		return ""
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Errorf("photo: %s %s %v", answer.Status, text, err)
	}
	return string(text)
}

// furnish gives a room its members, names and labels.
func (w *world) furnish(t testing.TB, room string) {
	t.Helper()
	name, tag, value := w.mark(room, "name", "mark"+room+"name"), w.mark(room, "label", "mark"+room+"tag"), w.mark(room, "label", "mark"+room+"label")
	var file strings.Builder
	fmt.Fprintf(&file, "id,name,client_id,label.room,label.%s\n%s,%s,,%s,%s\n", tag, roomDevice(room, connected), name, room, value)
	for n := range imported[room] {
		fmt.Fprintf(&file, "%s,%s %d,%s,%s,%s\n", roomDevice(room, n+1), name, n, clientOf(roomDevice(room, n+1)), room, value)
	}
	report, err := w.node.ImportDevices(t.Context(), strings.NewReader(file.String()), apiclient.ImportOptions{Format: "csv", Size: int64(file.Len())})
	if err != nil || report.Refused != 0 {
		t.Fatalf("%+v, %v", report, err)
	}
}

// happens has all happen in a room that keys of others may not hear of.
func (w *world) happens(t testing.TB, room string, d *device, outsider *apiclient.Client) {
	t.Helper()
	ctx, id := t.Context(), roomDevice(room, connected)
	key := w.newKey(t, room+"key", allScopes, "room="+room)
	w.mark(room, "key id", key.ID)
	owner := w.client(t, key.Token)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	hook, err := owner.CreateWebhook(ctx, api.NewWebhook{URL: w.hooks.url + "/" + w.mark(room, "webhook", "mark"+room+"hook"), Types: []string{"online", "offline", "photo"}})
	must(err)
	must(d.Send(`{"session_id":"","type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/` + w.mark(room, "event", "mark"+room+"event") + `","params":{"text":"mark` + room + `event"}}}`))
	result, err := owner.Call(ctx, id, status, apiclient.CallRequest{})
	must(err)
	photographed, err := owner.Call(ctx, id, takePhoto, apiclient.CallRequest{Arguments: json.RawMessage(`{"question":"` + w.mark(room, "question", "mark"+room+"question") + `"}`)})
	must(err)
	var photo photoAnswer
	must(json.Unmarshal([]byte(photographed.Content[0].Text), &photo))
	_, err = outsider.Call(ctx, id, "self.mark"+room+"tool.go", apiclient.CallRequest{}) // refused, which names the key and its limit
	if problemCode(err) != "tool_denied" {
		t.Fatalf("%v", err)
	}
	w.mark(room, "call", problemCall(err))
	note := w.mark(room, "note", "mark"+room+"note")
	job, err := apiclient.Send[api.Job](ctx, owner, apiclient.Request{Method: "POST", Path: []string{"jobs"}, Body: api.NewJob{JobSpec: api.JobSpec{Select: "room=" + room, Note: note, Action: api.JobAction{Call: &api.JobCall{Tool: status}}}}})
	must(err)
	tools, err := w.node.Tools(ctx, id, true)
	must(err)
	// Another client of a known device waits.
	stranger, err := http.NewRequestWithContext(ctx, http.MethodPost, w.node.Info.OTA, strings.NewReader("{}"))
	must(err)
	stranger.Header = http.Header{"Device-Id": {id}, "Client-Id": {w.mark(room, "pending Client-Id", "mark"+room+"stranger")}}
	answer, err := http.DefaultClient.Do(stranger)
	must(err)
	_ = answer.Body.Close()
	w.things[room] = map[string]string{"device": id, "client": w.clientOf(t, id), "job": w.mark(room, "job", job.ID), "call": w.mark(room, "call", result.Call), "photo": w.mark(room, "photo", photo.Photo),
		"webhook": w.mark(room, "webhook", hook.ID), "sha256": w.mark(room, "catalog", tools.Catalog), "key": "mark" + room + "key", "tool": status}
	w.node.Await(t, "the task of the connected device has ended", 30*time.Second, func() bool {
		j, err := owner.Job(ctx, job.ID)
		return err == nil && j.Counts.OK == 1
	})
}

// newWorld makes a fleet of two rooms, and the keys that walk through it.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{node: programs.Start(t, "--webhook-allow", "127.0.0.1"), things: map[string]map[string]string{}, hooks: newMarkedReceiver(t), found: found{lines: map[string]string{}}}
	w.document, w.described = readDocument(t, w.node)
	rooms := map[string]*device{}
	for _, room := range sides[:2] {
		rooms[room] = w.connect(t, room)
		w.furnish(t, room)
		for _, n := range []int{imported[room], imported[room] + 1} {
			w.mark(room, "count", fmt.Sprint(n))
		}
	}
	all := imported["lab"] + imported["hall"]
	for _, n := range []int{all, all + 2} {
		w.mark(both, "count", fmt.Sprint(n))
	}
	w.node.AwaitReady(t, 2)
	w.node.AwaitStored(t)
	added, _, err := w.node.AddFirmware(t.Context(), bytes.NewReader(imagetest.Build{}.Image()), -1, nil)
	if err != nil {
		t.Fatal(err)
	}
	w.things["absent"] = map[string]string{"device": roomDevice("absent", connected), "client": "0123456789ab", "job": "06q1v8k2m3n4p5q6r7s8", "call": "06q1v8k2m3n4p5q6r7s8", "photo": "06q1v8k2m3n4p5q6r7s8",
		"webhook": "06q1v8k2m3n4p5q6r7s8", "sha256": strings.Repeat("ab", 32), "key": "markabsentkey", "tool": status}
	for _, things := range w.things { // images are of no room
		things["firmware"], things["image"], things["release"] = added.Value.Items[0].ID, added.Value.Items[0].ID, added.Value.Items[0].Version
	}

	scoped := func(kinds ...string) map[string]bool {
		m := map[string]bool{}
		for _, kind := range kinds {
			m[kind] = true
		}
		return m
	}
	everywhere := []string{"lab", "hall", both}
	// What devices are and say. The results are of calls that the key itself makes.
	ofDevices := []string{"id", "count", "name", "label", "board", "tool", "description", "argument", "catalog"}
	ofAll := append(slices.Clone(ofDevices), "event", "photo", "question", "result")
	ofJobs := []string{"id", "count", "job", "note", "tool", "key", "key id", "call"} // a key without limits sees all jobs, and who made them
	for _, k := range []struct {
		name    string
		scopes  []string
		devices string
		tools   []string
		walker
	}{
		{name: "keyreader", scopes: []string{"devices:read"}, walker: walker{rooms: everywhere, kinds: scoped(append(ofDevices, "key id")...)}},
		{name: "keylab", scopes: allScopes, devices: "room=lab", walker: walker{rooms: []string{"lab"}, kinds: scoped(ofAll...), blind: []string{"hall"}}},
		{name: "keynotlab", scopes: allScopes, devices: "room!=lab", walker: walker{rooms: []string{"hall"}, kinds: scoped(ofAll...), blind: []string{"lab"}}},
		{name: "keytools", scopes: allScopes, tools: []string{"self.get_*"}, walker: walker{rooms: everywhere, kinds: scoped(append(ofAll, "stranger", "key id")...), blind: []string{"lab", "hall"},
			blindTo: regexp.MustCompile(`^\w+ /v1/(jobs|calls|webhooks)/`)}},
		{name: "keyjobs", scopes: []string{"jobs"}, walker: walker{rooms: everywhere, kinds: scoped(append(ofJobs, "result")...)}},
		{name: "keyevents", scopes: []string{"events:read"}, walker: walker{rooms: everywhere, kinds: scoped(append(ofJobs, "event", "photo", "catalog", "stranger")...)}},
	} {
		key := k.walker
		key.name, key.token = k.name, w.newKey(t, k.name, k.scopes, k.devices, k.tools...).Token
		w.keys = append(w.keys, &key)
	}
	w.keys = append(w.keys, &walker{name: "admin", token: w.node.Token(t), rooms: everywhere, kinds: scoped("everything")}, &walker{name: "none"})
	for _, room := range sides[:2] {
		if _, err := w.node.StartTrace(t.Context(), roomDevice(room, connected), api.NewTrace{}); err != nil {
			t.Fatal(err)
		}
	}
	for i, key := range w.keys {
		key.index, key.streams = byte(i), map[string]*Output{}
		if !key.kinds["event"] && key.name != "admin" {
			continue
		}
		for _, room := range sides[:2] {
			if slices.Contains(key.rooms, room) {
				w.follow(t, key, "/v1/devices/"+roomDevice(room, connected)+"/trace")
			}
		}
		w.follow(t, key, "/v1/events")
		w.follow(t, key, "/v1/events?batch=100ms")
		if !key.kinds["question"] && key.name != "admin" {
			continue
		}
		client := w.client(t, key.token)
		hook, err := client.CreateWebhook(t.Context(), api.NewWebhook{URL: w.hooks.url + "/" + key.name,
			Types: []string{"online", "offline", "catalog", "notifications", "photo", "pending", "contested", "task", "job.started", "job.done", "job.paused"}})
		if err != nil {
			t.Fatal(err)
		}
		if key.name == "admin" {
			continue
		}
		key.own = map[string]string{"device": roomDevice(key.rooms[0], 17+i), "webhook": hook.ID, "tool": status}
		key.own["client"] = w.clientOf(t, key.own["device"])
		job, err := apiclient.Send[api.Job](t.Context(), client, apiclient.Request{Method: "POST", Path: []string{"jobs"}, Body: api.NewJob{JobSpec: api.JobSpec{Devices: []string{key.own["device"]}, Action: api.JobAction{Call: &api.JobCall{Tool: status}},
			Stages: []api.JobStage{{OK: api.Amount{Number: 1}}, {OK: api.Amount{Percent: 100}}}}}})
		if err != nil {
			t.Fatal(err)
		}
		key.own["job"] = job.ID
	}
	outsider := w.client(t, w.newKey(t, "outsider", allScopes, "", "self.nothing").Token)
	for _, room := range sides[:2] {
		w.happens(t, room, rooms[room], outsider)
	}
	// A device that is in no room, and nobody's.
	stranger := w.mark(both, "stranger", roomDevice("stranger", 1))
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+w.node.Setting("--device-listen")+"/xiaozhi/v1/", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header = http.Header{"Device-Id": {stranger}, "Client-Id": {"none"}, "Authorization": {"Bearer none"}, "Protocol-Version": {"1"}, "Connection": {"Upgrade"}, "Upgrade": {"websocket"},
		"Sec-WebSocket-Version": {"13"}, "Sec-WebSocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="}}
	answer, err := http.DefaultClient.Do(r)
	if err != nil || answer.StatusCode < 400 {
		t.Fatalf("a stranger: %v, %v", answer, err)
	}
	_ = answer.Body.Close()
	return w
}

// No key learns of what it is not for: neither from the answers of any operation of the API, nor from events, webhooks or
// MCP, nor through a key of the console that it makes for itself. Nor can it tell what it is not for from what does not exist.
func TestKeysLearnNothing(t *testing.T) {
	long(t)
	t.Parallel()
	w := newWorld(t)
	together := func(keys []*walker, task func(key *walker)) {
		var walking sync.WaitGroup
		for _, key := range keys {
			walking.Go(func() { task(key) })
		}
		walking.Wait()
	}
	together(w.keys, func(key *walker) { w.walk(t, key, phaseReads) })
	for _, m := range w.marks {
		if _, ok := w.seen.Load(m); !ok && m.kind != "pending Client-Id" {
			t.Errorf("nobody sees the mark %q, the %s of %s: a walk could not find it", m.text, m.kind, m.room)
		}
	}
	together(w.keys, func(key *walker) { w.walkMCP(t, key) })

	// The same through the console.
	var console []*walker
	for _, key := range w.keys[:len(w.keys)-2] {
		code, err := apiclient.Send[api.ConsoleCode](t.Context(), w.client(t, key.token), apiclient.Request{Method: "POST", Path: []string{"console", "codes"}, Body: api.NewConsoleCode{}})
		if err != nil {
			t.Fatal(err)
		}
		made, err := apiclient.Send[api.CreatedKey](t.Context(), w.client(t, ""), apiclient.Request{Method: "POST", Path: []string{"console", "keys"}, Body: api.ConsoleLogin{Code: code.Code}})
		if err != nil {
			t.Fatal(err)
		}
		child := *key
		child.token, child.streams = made.Token, map[string]*Output{}
		console = append(console, &child)
	}
	together(console, func(key *walker) {
		w.walk(t, key, phaseReads)
		w.walkMCP(t, key)
	})
	for _, room := range sides[:2] {
		if err := w.node.EndTrace(t.Context(), roomDevice(room, connected)); err != nil {
			t.Fatal(err)
		}
	}
	changing := slices.DeleteFunc(slices.Clone(w.keys), func(key *walker) bool { return key.name == "admin" })
	together(changing, func(key *walker) { w.walk(t, key, phaseChanges) })
	together(changing, func(key *walker) { w.walk(t, key, phaseEnds) })
	for _, op := range w.document.operations() {
		if _, ok := w.served.Load(op.OperationID); !ok && !unserved[op.OperationID] && !op.needs("admin") {
			last, _ := w.refused.Load(op.OperationID)
			t.Errorf("%s was refused to all keys: the walk needs better values for it\n%v", op.OperationID, last)
		}
	}
	for _, key := range slices.Concat(w.keys, console) {
		for path, out := range key.streams {
			w.check(key, path, "", out.String(), false)
		}
		delivered := w.hooks.of("/" + key.name)
		if key.kinds["question"] && delivered == "" {
			t.Errorf("nothing was delivered to the webhook of %s", key.name)
		}
		w.check(key, "webhook", "/"+url.PathEscape(key.name), delivered, false)
	}
	for _, kind := range slices.Sorted(maps.Keys(w.found.lines)) {
		// security: K8 R3
		t.Errorf("%s:\n%s", kind, w.found.lines[kind])
	}
}
