package explain

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// before returns a time that long ago.
func before(d time.Duration) time.Time { return now.Add(-d) }

// step returns a step that long ago.
func step(ago time.Duration, kind devices.StepKind, cause string) devices.Step {
	return devices.Step{Kind: kind, Cause: devices.StepCause(cause), At: before(ago), Count: 1, Node: "b", Proven: true}
}

// offline returns the view of a device that was connected by MQTT until a minute ago.
func offline(reason string) devices.View {
	return devices.View{Device: devices.Device{ID: "02:00:00:00:00:07", Admission: devices.AdmissionMember}, State: devices.StateOffline,
		Presence: devices.Presence{Epoch: 1, Transport: devices.TransportMQTT, Reason: reason, LastSeen: before(time.Minute)}}
}

func online() devices.View {
	v := offline("")
	v.State, v.Presence.Online, v.Presence.MCP, v.Presence.ConnectedAt, v.Presence.LastSeen = devices.StateOnline, true, devices.MCPReady, before(time.Hour), before(time.Hour)
	return v
}

func with(v devices.View, change func(*devices.View)) devices.View {
	change(&v)
	return v
}

func times(n int, s devices.Step) devices.Step {
	s.Count = n
	return s
}

func text(t string, s devices.Step) devices.Step {
	s.Text = t
	return s
}

func from(address string, s devices.Step) devices.Step {
	s.Remote = netip.MustParseAddr(address)
	return s
}

const secs = time.Second

// deviceCases has a case for each rule and each cause of a device.
var deviceCases = []struct {
	name  string
	facts facts
	cause Cause
	text  string
}{
	{"connected and ready", facts{view: online()}, "well", "connected by mqtt"},
	{"speaks a code", facts{view: with(offline(""), func(v *devices.View) { v.Pending = "c" })}, "waiting_approval", "code"},
	{"known id, new client", facts{view: with(offline(""), func(v *devices.View) { v.Pending, v.Device.ClientID = "c", "d" })}, "waiting_approval", "another client"},
	{"no device, a refusal", facts{view: devices.View{}, steps: []devices.Step{step(5*secs, devices.StepRefused, "unknown_device")}}, "stranger_refused", "unknown device"},
	{"no device, nothing", facts{view: devices.View{}}, "never_seen", "no device"},
	{"imported", facts{view: with(offline(""), func(v *devices.View) { v.Presence = devices.Presence{} })}, "never_seen", "never connected"},
	{"revoked by an operator", facts{view: with(offline("revoked"), func(v *devices.View) { v.Device.Admission = devices.AdmissionRevoked })}, "revoked", "operator"},
	{"state contested", facts{view: with(offline(""), func(v *devices.View) { v.State = devices.StateContested })}, "contested", "Two clients"},
	{"refused as contested", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "contested")}}, "contested", "Two clients"},
	{"replaced while online", facts{view: online(), steps: []devices.Step{times(3, step(9*secs, devices.StepClosed, "superseded"))}}, "cloned", "3 times"},
	{"replaced, now offline", facts{view: offline("superseded"), steps: []devices.Step{step(60*secs, devices.StepClosed, "superseded"), step(80*secs, devices.StepClosed, "superseded"), step(90*secs, devices.StepClosed, "superseded")}}, "cloned", "two clients"},
	{"another client waits", facts{view: with(online(), func(v *devices.View) { v.Pending = "c" })}, "cloned", "another Client-Id"},
	{"flapping, now offline", facts{view: offline("gone"), steps: []devices.Step{times(5, step(60*secs, devices.StepClosed, "gone"))}}, "flapping", "5 times"},
	{"old token", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "old_token")}}, "old_generation", "old token"},
	{"old token, checked meanwhile", facts{view: offline("gone"), steps: []devices.Step{step(4*secs, devices.StepCheck, "offers_mqtt"), step(5*secs, devices.StepRefused, "old_token")}}, "old_generation", "old token"},
	{"wrong token", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "wrong_token")}}, "wrong_token", "5 s ago"},
	{"member of another fleet", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "unknown_device")}}, "stranger_refused", "refused"},
	{"revoked meanwhile", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "revoked")}}, "revoked", "refused"},
	{"no hello", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "no_hello")}}, "hello_failed", "no hello"},
	{"bad protocol", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "protocol")}}, "protocol", "refused"},
	{"hello too large", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "too_large")}}, "too_large", "refused"},
	{"crowded", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "crowded")}}, "crowded", "refused"},
	{"flooding", facts{view: offline("flooding"), steps: []devices.Step{step(5*secs, devices.StepRefused, "flooding")}}, "rate_limited", "refused"},
	{"checks too often", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepCheck, "rate_limited")}}, "rate_limited", "OTA check"},
	{"check refused", facts{view: offline("gone"), steps: []devices.Step{text("Client-Id has NUL", step(5*secs, devices.StepCheck, "bad_request"))}}, "check_refused", "NUL"},
	{"unsafe reply", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepCheck, "unsafe")}}, "wrong_endpoint", "OTA check"},
	{"loopback endpoint", facts{view: offline("gone"), steps: []devices.Step{from("192.0.2.4", text("127.0.0.1:1883", step(40*secs, devices.StepCheck, "offers_mqtt")))}}, "wrong_endpoint", "127.0.0.1"},
	{"firewall", facts{view: offline("gone"), steps: []devices.Step{from("192.0.2.4", text("fleet.example:1883", step(40*secs, devices.StepCheck, "offers_mqtt")))}}, "connect_not_seen", "fleet.example:1883"},
	{"checked a moment ago", facts{view: offline("gone"), steps: []devices.Step{text("fleet.example:1883", step(4*secs, devices.StepCheck, "offers_mqtt"))}}, "restarting", "may be connecting"},
	{"rebooted by a call", facts{view: offline("gone"), calls: []devices.CallStep{{Call: "c", Tool: "self.reboot", Outcome: "restarting", At: before(70 * secs)}}}, "restarting", "self.reboot"},
	{"websocket after a talk", facts{view: with(offline("gone"), func(v *devices.View) { v.Presence.Transport = devices.TransportWebSocket })}, causeAsleep, "wakes it"},
	{"websocket after a check", facts{view: offline("gone"), steps: []devices.Step{text("wss://x/", step(40*secs, devices.StepCheck, "offers_websocket"))}}, causeAsleep, "wss://x/"},
	{"dead", facts{view: offline("dead")}, "dead", "1 min ago"},
	{"gone", facts{view: offline("gone")}, "gone", "1 min ago"},
	{"idle", facts{view: offline("idle")}, "idle", "1 min ago"},
	{"slow", facts{view: offline("slow")}, "slow", "1 min ago"},
	{"node lost", facts{view: offline("node_lost")}, "node_lost", "node"},
	{"node stopped", facts{view: offline("draining")}, "draining", "node"},
	{"from the recorder alone", facts{view: devices.View{}, found: true, steps: []devices.Step{step(30*secs, devices.StepClosed, "dead")}}, "dead", "30 s ago"},
	{"nothing explains it", facts{view: offline("superseded")}, "unknown", "nothing"},
	{"mcp silent", facts{view: with(online(), func(v *devices.View) { v.Presence.MCP = devices.MCPUnresponsive })}, "mcp_silent", "does not answer"},
	{"mcp error", facts{view: with(online(), func(v *devices.View) { v.Presence.MCP, v.Presence.MCPError = devices.MCPError, "page 2" })}, "mcp_failed", "page 2"},
	{"no mcp", facts{view: with(online(), func(v *devices.View) { v.Presence.MCP = devices.MCPNone })}, "tools_missing", "no MCP"},
	{"partial list", facts{view: with(online(), func(v *devices.View) { v.Presence.Partial, v.Presence.MCPError = true, "cursor loop" })}, "tools_missing", "cursor loop"},
	{"no audio", facts{view: online(), steps: []devices.Step{step(60*secs, devices.StepSilent, "")}}, "udp_silent", "no audio"},
	{"no audio, long ago", facts{view: online(), steps: []devices.Step{step(time.Hour, devices.StepSilent, "")}}, "well", ""},
	{"calls unanswered", facts{view: online(), calls: []devices.CallStep{{Call: "a", Sent: true, Outcome: "device_timeout", At: before(secs)}, {Call: "b", Late: true, At: before(secs)}}}, "main_loop_busy", "2 calls"},
	{"one call unanswered", facts{view: online(), calls: []devices.CallStep{{Call: "a", Sent: true, Outcome: "device_timeout", At: before(secs)}}}, "well", ""},
	{"flapping", facts{view: online(), steps: []devices.Step{times(5, step(60*secs, devices.StepClosed, "gone"))}}, "flapping", "5 times"},
	{"over a limit", facts{view: online(), steps: []devices.Step{text("messages", step(60*secs, devices.StepLimit, ""))}}, "rate_limited", "messages"},
	{"deviates", facts{view: online(), steps: []devices.Step{text("duplicate_hello", step(60*secs, devices.StepDeviation, ""))}}, "protocol", "duplicate_hello"},
}

func TestDeviceRules(t *testing.T) {
	seen := map[Cause]bool{}
	for _, c := range deviceCases {
		t.Run(c.name, func(t *testing.T) {
			f := c.facts
			f.now = now
			f.found = f.found || f.view.Device.ID != ""
			got := explainDevice(&f)
			if got.cause != c.cause || !strings.Contains(got.sentence, c.text) {
				t.Errorf("%s: %s\nwant %s with %q", got.cause, got.sentence, c.cause, c.text)
			}
			seen[got.cause] = true
		})
	}
	for _, info := range Causes {
		if info.About != AboutCall && !seen[info.Cause] {
			t.Errorf("no case has the cause %s", info.Cause)
		}
	}
}

func call(outcome string, change ...func(*devices.CallStep)) devices.CallStep {
	c := devices.CallStep{Call: "c", Device: "d", Tool: "self.light.set", Outcome: outcome, Took: 30 * secs, At: now}
	for _, f := range change {
		f(&c)
	}
	return c
}

func sent(c *devices.CallStep)      { c.Sent = true }
func atHolder(c *devices.CallStep)  { c.Holder = true }
func late(c *devices.CallStep)      { c.Late, c.Holder, c.Took = true, true, 34*secs }
func camera(c *devices.CallStep)    { c.Tool = "self.camera.take_photo" }
func waited(c *devices.CallStep)    { c.Waited, c.Ahead = 27*secs, "x" }
func cancelled(c *devices.CallStep) { c.Detail = devices.DetailCancelled }
func ended(c *devices.CallStep)     { c.Detail = devices.DetailConfirmationEnded + "; again" }
func malformed(c *devices.CallStep) { c.Detail = "device sent a malformed answer" }
func over(c *devices.CallStep)      { c.Detail = "the answer is over the limit" }

func TestCallRules(t *testing.T) {
	seen := map[Cause]bool{}
	for _, c := range []struct {
		steps []devices.CallStep
		cause Cause
	}{
		{[]devices.CallStep{call("ok", sent, atHolder)}, "well"},
		{[]devices.CallStep{call("restarting", sent, atHolder)}, "restarting"},
		{[]devices.CallStep{call("ok", sent), call("ok", sent, atHolder, waited)}, "waited_behind"},
		{[]devices.CallStep{call("device_timeout", sent), call("device_timeout", sent, atHolder), call("ok", late)}, "answered_late"},
		{[]devices.CallStep{call("ok", late)}, "answered_late"},
		{[]devices.CallStep{call("device_timeout", sent, atHolder)}, "sent_no_answer"},
		{[]devices.CallStep{call("device_timeout"), call("device_timeout", atHolder, waited)}, "waited_behind"},
		{[]devices.CallStep{call("device_timeout", atHolder)}, "not_sent"},
		{[]devices.CallStep{call("device_timeout", sent, atHolder, camera)}, "camera_not_ready"},
		{[]devices.CallStep{call("tool_error", sent, atHolder, camera)}, "camera_not_ready"},
		{[]devices.CallStep{call("tool_error", sent, atHolder)}, "device_error"},
		{[]devices.CallStep{call("device_error", sent, atHolder)}, "device_error"},
		{[]devices.CallStep{call("device_error", sent, atHolder, malformed)}, "answer_malformed"},
		{[]devices.CallStep{call("device_error", sent, atHolder, over)}, "answer_too_large"},
		{[]devices.CallStep{call("device_timeout", sent, cancelled)}, "caller_left"},
		{[]devices.CallStep{call("tool_denied")}, "policy_denied"},
		{[]devices.CallStep{call("confirmation_required")}, "confirmation_missing"},
		{[]devices.CallStep{call("confirmation_required", ended)}, "confirmation_expired"},
		{[]devices.CallStep{call("invalid_arguments")}, "arguments_refused"},
		{[]devices.CallStep{call("tool_unknown")}, "tool_unknown"},
		{[]devices.CallStep{call("device_offline")}, "device_offline"},
		{[]devices.CallStep{call("device_busy")}, "queue_full"},
		{[]devices.CallStep{call("connection_lost", sent)}, "connection_lost"},
		{[]devices.CallStep{call("superseded", sent)}, "superseded"},
		{[]devices.CallStep{call("unavailable")}, "hop_lost"},
		{[]devices.CallStep{call("internal")}, "unknown"},
	} {
		m := mergeCall(c.steps)
		got := explainCall(&m)
		if got.cause != c.cause || got.sentence == "" {
			t.Errorf("%+v: %s: %s\nwant %s", c.steps, got.cause, got.sentence, c.cause)
		}
		seen[got.cause] = true
	}
	for _, info := range Causes {
		if info.About == AboutCall && !seen[info.Cause] {
			t.Errorf("no case has the cause %s", info.Cause)
		}
	}
}

func TestTimesInSentences(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "1 ms", 300 * time.Microsecond: "1 ms", 12600 * time.Microsecond: "13 ms", 999600 * time.Microsecond: "1.0 s", 27 * time.Second: "27.0 s"} {
		if got := seconds(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

// Every cause that rules name is listed, with what to do.
func TestCauses(t *testing.T) {
	for _, causes := range [][]Cause{values(refusalCauses), values(endCauses), values(outcomeCauses)} {
		for _, cause := range causes {
			if infos[cause] == nil {
				t.Errorf("%s is not listed", cause)
			}
		}
	}
	for _, info := range Causes {
		if info.Meaning == "" || len(info.Next) == 0 && info.Cause != "well" {
			t.Errorf("%s has no meaning or nothing to do", info.Cause)
		}
	}
	if next := Cause("revoked").next("d"); !slices.Contains(next, "fleetd devices approve d") {
		t.Errorf("next is %q", next)
	}
}

func values[K comparable](m map[K]Cause) (list []Cause) {
	for _, v := range m {
		list = append(list, v)
	}
	return list
}
