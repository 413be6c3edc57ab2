package mcpserver

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/jobs/manager"
	"fleetd/internal/mcpserver/testdata/models"
	first "fleetd/internal/mcpserver/testdata/models/first"
	second "fleetd/internal/mcpserver/testdata/models/second"
	third "fleetd/internal/mcpserver/testdata/models/third"
	"fleetd/internal/selector"
)

// modelTools are the tools of the devices of fleet.json, by kind.
var modelTools = map[string]string{
	"lamp": statusTool + `,{"name":"self.lamp.turn_on","description":"Turn on the lamp","inputSchema":{"type":"object","properties":{}}},
		{"name":"self.lamp.turn_off","description":"Turn off the lamp","inputSchema":{"type":"object","properties":{}}},
		{"name":"self.lamp.set_brightness","description":"Set the brightness of the lamp","inputSchema":{"type":"object","properties":{"brightness":{"type":"integer","minimum":0,"maximum":100}},"required":["brightness"]}}`,
	"speaker": statusTool + `,` + devicetest.Volume,
	"toy":     statusTool + `,` + devicetest.Volume,
	"display": statusTool + `,` + devicetest.Volume + `,{"name":"self.screen.set_brightness","description":"Set the brightness of the screen.","inputSchema":{"type":"object","properties":{"brightness":{"type":"integer","minimum":0,"maximum":100}},"required":["brightness"]}},
		{"name":"self.screen.set_theme","description":"Set the theme of the screen. The theme can be light or dark.","inputSchema":{"type":"object","properties":{"theme":{"type":"string"}},"required":["theme"]}}`,
	"camera": statusTool + `,{"name":"self.camera.take_photo","description":"Take a photo and explain it.","inputSchema":{"type":"object","properties":{"question":{"type":"string"}},"required":["question"]}}`,
	"robot": statusTool + `,` + devicetest.Volume + `,{"name":"self.robot.move","description":"Move the robot","inputSchema":{"type":"object","properties":{"direction":{"type":"string","enum":["forward","back","left","right"],"default":"forward"},"steps":{"type":"integer","minimum":1,"maximum":100,"default":3}}}},
		{"name":"self.robot.stop","description":"Stop the robot","inputSchema":{"type":"object","properties":{}}}`,
}

// modelDevice is a device of fleet.json.
type modelDevice struct {
	ID     devices.ID
	Name   string
	Kind   string
	Labels map[string]string
	Online bool
}

// modelFleet is the fleet that the requests are about, and what happens in it.
type modelFleet struct {
	*testFleet
	t       *testing.T
	devices map[devices.ID]*modelDevice
	states  map[devices.ID]map[string]any
	scripts map[devices.ID]*devicetest.Script
	session *mcp.ClientSession

	mu      sync.Mutex
	effects []modelEffect
	calls   []string // of one request: tools of the server
	bytes   int
	asked   int
	answer  string
	log     *os.File
}

// modelEffect is something that was done to a device, or asked of it.
type modelEffect struct {
	device, tool, by string
	arguments        string
}

func newModelFleet(t *testing.T) *modelFleet {
	m := &modelFleet{t: t, devices: map[devices.ID]*modelDevice{}, states: map[devices.ID]map[string]any{}, scripts: map[devices.ID]*devicetest.Script{}}
	m.testFleet = newFleet(t, func(o *Options) { o.Jobs = &modelJobs{m: m} })
	text, err := os.ReadFile("testdata/models/fleet.json")
	if err != nil {
		t.Fatal(err)
	}
	var list []*modelDevice
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	for _, d := range list {
		m.devices[d.ID], m.states[d.ID] = d, map[string]any{"volume": 40, "brightness": 75, "theme": "light"}
		script := devicetest.NewScript()
		script.Tools = "[" + modelTools[d.Kind] + "]"
		script.Call = func(tool string, arguments json.RawMessage) string { return m.answerOf(d, tool, arguments) }
		line := m.connect(t, d.ID, script)
		m.scripts[d.ID] = script
		m.name(t, d.ID, d.Name, d.Labels)
		if !d.Online {
			line.Session.Close(devices.CloseGone)
		}
	}
	m.session = m.host(t, PathMCP, "2025-11-25", admin, nil)
	if dir := os.Getenv("FLEETD_MODEL_TRANSCRIPTS"); dir != "" {
		if m.log, err = os.Create(filepath.Join(dir, strings.ReplaceAll(t.Name(), "/", "-")+".jsonl")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = m.log.Close() })
	}
	return m
}

// answerOf is what a device answers.
func (m *modelFleet) answerOf(d *modelDevice, tool string, arguments json.RawMessage) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.effects = append(m.effects, modelEffect{d.Name, tool, m.calls[len(m.calls)-1], string(arguments)})
	state := m.states[d.ID]
	if tool != "self.get_device_status" {
		var args map[string]any
		if json.Unmarshal(arguments, &args) == nil {
			maps.Copy(state, args)
		}
		return devicetest.True
	}
	status, err := json.Marshal(map[string]any{"audio_speaker": map[string]any{"volume": state["volume"]}, "screen": map[string]any{"brightness": state["brightness"], "theme": state["theme"]},
		"battery": map[string]any{"level": 80, "charging": false}, "network": map[string]any{"type": "wifi", "signal": "strong"}})
	if err != nil {
		panic(err) // these values can be encoded
	}
	quoted, err := json.Marshal(string(status))
	if err != nil {
		panic(err)
	}
	return `"result":{"content":[{"type":"text","text":` + string(quoted) + `}],"isError":false}`
}

// modelJobs has the jobs done at once, as far as it is seen.
type modelJobs struct {
	Jobs
	m    *modelFleet
	made int
}

func (j *modelJobs) does(devices []string, tool string, arguments json.RawMessage) (api.Job, error) {
	j.m.mu.Lock()
	defer j.m.mu.Unlock()
	j.made++
	for _, name := range devices {
		j.m.effects = append(j.m.effects, modelEffect{name, tool, j.m.calls[len(j.m.calls)-1], string(arguments)})
	}
	return api.Job{ID: fmt.Sprintf("06q%017d", j.made), State: "running", Counts: api.JobCounts{Total: int64(len(devices)), Waiting: int64(len(devices))}}, nil
}

func (j *modelJobs) names(spec *api.JobSpec) (names []string, err error) {
	sel := selector.In(selector.FieldDevice, spec.Devices...)
	if len(spec.Devices) == 0 {
		if sel, err = selector.Parse(spec.Select); err != nil {
			return nil, devices.Errorf(devices.CodeBadRequest, "select: %v", err)
		}
	}
	views, _, err := j.m.mcp.find(context.Background(), devicetest.Admin, devices.ListQuery{Select: sel, Limit: 1000}, allPages)
	for _, v := range views {
		names = append(names, v.Device.Name)
	}
	return names, err
}

func (j *modelJobs) Create(_ context.Context, _ access.Principal, spec api.JobSpec, _ manager.CreateOptions) (api.Job, bool, error) {
	names, err := j.names(&spec)
	if err != nil {
		return api.Job{}, false, err
	}
	tool, arguments := "message", spec.Action.Message
	if c := spec.Action.Call; c != nil {
		tool, arguments = c.Tool, c.Arguments
	}
	made, err := j.does(names, tool, arguments)
	return made, false, err
}

func (j *modelJobs) Plan(_ context.Context, _ access.Principal, spec api.JobSpec) (api.JobPlan, error) {
	names, err := j.names(&spec)
	return api.JobPlan{Devices: int64(len(names)), Spec: spec}, err
}

func (j *modelJobs) Later(_ context.Context, _ access.Principal, c devices.ToolCall, _, _ time.Duration, _ string) (api.Job, bool, error) {
	made, err := j.does([]string{j.m.devices[c.Device].Name}, c.Tool, c.Arguments)
	return made, false, err
}

func (j *modelJobs) List(context.Context, access.Principal, manager.Query) (api.List[api.Job], error) {
	return api.List[api.Job]{}, nil
}

// Call calls a tool of the server, as a policy does.
func (m *modelFleet) Call(tool string, arguments map[string]any) (answer map[string]any, failed bool) {
	m.mu.Lock()
	m.calls = append(m.calls, tool)
	m.mu.Unlock()
	r, err := m.session.CallTool(m.t.Context(), &mcp.CallToolParams{Name: tool, Arguments: arguments})
	text := ""
	if err != nil {
		failed, answer, text = true, map[string]any{"error": map[string]any{"code": "invalid_arguments", "detail": err.Error()}}, err.Error()
	} else {
		failed, text = r.IsError, textOf(r)
		if json.Unmarshal([]byte(text), &answer) != nil {
			answer = map[string]any{}
		}
	}
	sent, err := json.Marshal(arguments)
	if err != nil {
		m.t.Fatal(err)
	}
	m.bytes += len(sent) + len(text)
	m.write(map[string]any{"call": tool, "arguments": json.RawMessage(sent), "answer": text})
	m.messages()
	return answer, failed
}

// messages notes what displays show now.
func (m *modelFleet) messages() {
	for id, script := range m.scripts {
		for _, text := range script.Messages() {
			m.effects = append(m.effects, modelEffect{m.devices[id].Name, "message", m.calls[len(m.calls)-1], text})
		}
		script.ForgetMessages()
	}
}

// Ask asks the person.
func (m *modelFleet) Ask(question string, options []string) string {
	m.asked++
	m.write(map[string]any{"ask": question, "options": options, "answer": m.answer})
	return m.answer
}

func (m *modelFleet) write(v any) {
	if m.log == nil {
		return
	}
	if err := json.NewEncoder(m.log).Encode(v); err != nil {
		m.t.Error(err)
	}
}

// judged is how a request ended.
type judged struct {
	done, wrong, needless bool
	why                   string
}

// judge compares what was done with what was wanted.
func (m *modelFleet) judge(r *models.Request, said *models.Said) (j judged) {
	j.needless = m.asked > 0 && r.Answer == ""
	var touched []string
	matching := true
	for _, e := range m.effects {
		if e.tool == "self.get_device_status" && r.Kind != "status" {
			continue // looking is no effect
		}
		touched = append(touched, e.device)
		for _, want := range r.Want.Tool {
			matching = matching && slices.ContainsFunc(strings.Split(want, "|"), func(word string) bool {
				return strings.Contains(strings.ToLower(e.tool+" "+m.descriptionOf(e)), strings.ToLower(word))
			})
		}
		for _, want := range r.Want.Arguments {
			matching = matching && strings.Contains(strings.ToLower(unescape(e.arguments)), strings.ToLower(fmt.Sprint(want)))
		}
	}
	slices.Sort(touched)
	touched = slices.Compact(touched)
	wanted := slices.Sorted(slices.Values(r.Want.Devices))
	if r.Kind == "group" || r.Kind == "message" { // the authors do not know which devices are offline
		wanted = slices.DeleteFunc(wanted, func(name string) bool { return m.isOffline(name) && !slices.Contains(touched, name) })
	}
	for _, name := range touched {
		j.wrong = j.wrong || r.Want.Devices != nil && r.Kind != "history" && !slices.Contains(wanted, name)
	}
	used := len(r.Want.ServerTool) == 0 || slices.ContainsFunc(r.Want.ServerTool, func(tool string) bool { return slices.Contains(m.calls, tool) })
	switch {
	case r.Kind == "history":
		j.done = used && !slices.ContainsFunc(wanted, func(name string) bool {
			return !slices.Contains(said.Devices, name) && !strings.Contains(said.Text, name)
		})
	case r.Want.Devices == nil:
		j.done = used && matching && len(touched) > 0
	case r.Kind == "ask" && m.asked == 0:
	default:
		j.done = (used || len(wanted) == 0) && matching && slices.Equal(touched, wanted)
	}
	if !j.done || j.wrong {
		j.why = fmt.Sprintf("touched %q, wanted %q; calls %q; asked %d; effects %+v", touched, wanted, m.calls, m.asked, m.effects)
	}
	return j
}

// unescape shows the characters of JSON that are escaped.
func unescape(text string) string {
	var v any
	if json.Unmarshal([]byte(text), &v) != nil {
		return text
	}
	return fmt.Sprint(v)
}

func (m *modelFleet) isOffline(name string) bool {
	for _, d := range m.devices {
		if d.Name == name {
			return !d.Online
		}
	}
	return false
}

func (m *modelFleet) descriptionOf(e modelEffect) string {
	for _, d := range m.devices {
		if d.Name == e.device {
			var list []struct{ Name, Description string }
			if json.Unmarshal([]byte("["+modelTools[d.Kind]+"]"), &list) == nil {
				for _, t := range list {
					if t.Name == e.tool {
						return t.Description
					}
				}
			}
		}
	}
	return ""
}

// play has a policy play requests, and returns the figures.
func (m *modelFleet) play(list []models.Request, policy func(models.Host, models.Request) models.Said) (f modelFigures) {
	ones := 0
	for i := range list {
		r := &list[i]
		m.effects, m.calls, m.bytes, m.asked, m.answer = nil, nil, 0, 0, r.Answer
		m.write(map[string]any{"request": r.ID, "text": r.Text})
		shown := *r
		shown.Want, shown.Answer = models.Want{}, ""
		said := policy(m, shown)
		j := m.judge(r, &said)
		f.bytes += m.bytes
		if r.Kind == "one" {
			ones++
			f.calls += len(m.calls)
		}
		for flag, n := range map[*bool]*int{&j.done: &f.done, &j.wrong: &f.wrong, &j.needless: &f.needless} {
			if *flag {
				*n++
			}
		}
		if j.why != "" {
			m.t.Logf("%s %s %q (%s, %s): %s", r.ID, r.Kind, r.Text, r.Who, r.Do, j.why)
		}
	}
	f.perDevice, f.bytes = float64(f.calls)/float64(max(1, ones)), f.bytes/len(list)
	return f
}

// modelFigures are those of a policy: needless counts questions, bytes are of arguments and answers for one request.
type modelFigures struct {
	done, wrong, needless, calls, bytes int
	perDevice                           float64
}

// models are the two authors' policies; the second one's requests were read by nobody before the tools were built.
func TestModels(t *testing.T) {
	checkSums(t)
	for name, policy := range map[string]func(models.Host, models.Request) models.Said{"first": first.Policy, "second": second.Policy, "third": third.Policy} {
		t.Run(name, func(t *testing.T) {
			m := newModelFleet(t)
			text, err := os.ReadFile("testdata/models/" + name + "/requests.json")
			if err != nil {
				t.Fatal(err)
			}
			var list []models.Request
			if err := json.Unmarshal(text, &list); err != nil {
				t.Fatal(err)
			}
			f := m.play(list, policy)
			t.Logf("%d of %d done, %d with a wrong device, %d needless questions, %.2f calls for one device, %d bytes for a request", f.done, len(list), f.wrong, f.needless, f.perDevice, f.bytes)
			if floor := modelFloors[name]; f.done < floor.done || f.wrong > floor.wrong || f.needless > floor.needless || f.perDevice > floor.perDevice {
				t.Errorf("%+v is worse than %+v", f, floor)
			}
		})
	}
}

// checkSums checks that what the authors wrote is as it was before the tools were built.
func checkSums(t *testing.T) {
	t.Helper()
	sums, err := os.ReadFile("testdata/models/SHA256SUMS")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(sums)), "\n") {
		want, name, _ := strings.Cut(line, "  ")
		text, err := os.ReadFile("testdata/models/" + strings.Replace(name, "-", "/", 1))
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%x", sha256.Sum256(text)); got != want {
			t.Errorf("%s has changed since it was written: %s", name, got)
		}
	}
}

// modelFloors are the figures of each author that the server has reached.
var modelFloors = map[string]modelFigures{
	"first":  {done: 38, wrong: 1, perDevice: 2.2}, // "cuisine" is a kitchen to this policy, and the fleet has several
	"second": {done: 38, perDevice: 2.2},
	"third":  {done: 36, perDevice: 2.4},
}
