package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/mcpclient"
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

const (
	volume  = "self.audio_speaker.set_volume"
	upgrade = "self.upgrade_firmware"
)

func overWebSocket(v devices.View) devices.View {
	v.Presence.Transport = devices.TransportWebSocket
	return v
}

func overWebSocketToo(s devices.Step) devices.Step {
	s.Transport = devices.TransportWebSocket
	return s
}

func deviation(kind string) devices.Step {
	return text(kind, step(20*secs, devices.StepDeviation, ""))
}

// made returns a call that began that long ago and was answered, or had this outcome, 2 s later.
func made(ago time.Duration, tool, outcome string) devices.CallStep {
	return devices.CallStep{Call: fmt.Sprint(tool, ago), Tool: tool, Outcome: outcome, Sent: true, At: before(ago), Took: 2 * secs}
}

// unanswered returns a call that began that long ago and was not answered within 30 s.
func unanswered(ago time.Duration) devices.CallStep {
	return devices.CallStep{Call: fmt.Sprint("u", ago), Tool: volume, Outcome: "device_timeout", Sent: true, At: before(ago), Took: 30 * secs}
}

// boot returns the OTA check of a start.
func boot(ago time.Duration, transport devices.Transport) devices.Step {
	s := step(ago, devices.StepCheck, "offers_"+string(transport))
	s.Transport, s.Image, s.Text = transport, "0a1b2c3d", "fleet.example"
	return s
}

// boots returns OTA checks, the last of them 4 s ago.
func boots(n int, every time.Duration, transport devices.Transport) (steps []devices.Step) {
	for i := range n {
		steps = append(steps, boot(4*secs+time.Duration(i)*every, transport))
	}
	return steps
}

// crashes returns starts, each followed by a connection that ended.
func crashes(n int, every time.Duration, transport devices.Transport) (steps []devices.Step) {
	for i := range n {
		at := 25*secs + time.Duration(i)*every
		for _, s := range []devices.Step{step(at-20*secs, devices.StepClosed, "gone"), step(at-2*secs, devices.StepConnected, "")} {
			s.Transport = transport
			steps = append(steps, s)
		}
		steps = append(steps, boot(at, transport))
	}
	return steps
}

// conversations returns connections over WebSocket of 5 s each.
func conversations(n int, every time.Duration) (steps []devices.Step) {
	for i := range n {
		at := 10*secs + time.Duration(i)*every
		steps = append(steps, overWebSocketToo(step(at, devices.StepClosed, "gone")), overWebSocketToo(step(at+5*secs, devices.StepConnected, "")))
	}
	return steps
}

func died(ago time.Duration, calls int) devices.Step {
	s := step(ago, devices.StepClosed, "gone")
	s.Calls = calls
	return s
}

// images gives each step another image.
func images(steps []devices.Step) []devices.Step {
	for i := range steps {
		steps[i].Image = fmt.Sprint("image", i)
	}
	return steps
}

func unproven(steps []devices.Step) []devices.Step {
	for i := range steps {
		steps[i].Proven, steps[i].Cause = false, devices.CausePending
	}
	return steps
}

var waiting = []devices.PendingClient{{ClientID: "c"}}

// deviceCases has a case for each rule and each cause of a device.
var deviceCases = []struct {
	name  string
	facts facts
	cause Cause
	text  string
}{
	{"connected and ready", facts{view: online()}, "well", "connected by mqtt"},
	{"speaks a code", facts{view: with(offline(""), func(v *devices.View) { v.Pending = waiting })}, "waiting_approval", "code"},
	{"known id, new client", facts{view: with(offline(""), func(v *devices.View) { v.Pending, v.Device.ClientID = waiting, "d" })}, "waiting_approval", "another client"},
	{"no device, a refusal", facts{view: devices.View{}, steps: []devices.Step{step(5*secs, devices.StepRefused, "unknown_device")}}, "stranger_refused", "unknown device"},
	{"no device, nothing", facts{view: devices.View{}}, "never_seen", "no device"},
	{"imported", facts{view: with(offline(""), func(v *devices.View) { v.Presence = devices.Presence{} })}, "never_seen", "never connected"},
	{"revoked by an operator", facts{view: with(offline("revoked"), func(v *devices.View) { v.Device.Admission = devices.AdmissionRevoked })}, "revoked", "operator"},
	{"state contested", facts{view: with(offline(""), func(v *devices.View) { v.State = devices.StateContested })}, "contested", "Two clients"},
	{"refused as contested", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "contested")}}, "contested", "Two clients"},
	{"replaced while online", facts{view: online(), steps: []devices.Step{times(3, step(9*secs, devices.StepClosed, "superseded"))}}, "cloned", "3 times"},
	{"replaced, now offline", facts{view: offline("superseded"), steps: []devices.Step{step(60*secs, devices.StepClosed, "superseded"), step(80*secs, devices.StepClosed, "superseded"), step(90*secs, devices.StepClosed, "superseded")}}, "cloned", "two clients"},
	{"another client waits", facts{view: with(online(), func(v *devices.View) { v.Pending = waiting })}, "cloned", "another Client-Id"},
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
	{"the last call unanswered", facts{view: online(), calls: []devices.CallStep{unanswered(31 * secs)}}, "main_loop_busy", "last call, which ended 1 s ago"},
	{"a call unanswered, the next answered", facts{view: online(), calls: []devices.CallStep{made(20*secs, volume, "ok"), unanswered(60 * secs)}}, "well", ""},
	{"a call unanswered, then a new connection", facts{view: online(), calls: []devices.CallStep{unanswered(60 * secs)}, steps: []devices.Step{step(20*secs, devices.StepConnected, "")}}, "well", ""},
	{"a call unanswered, then a message", facts{view: online(), calls: []devices.CallStep{made(secs, "alert", "sent"), unanswered(60 * secs)}}, "main_loop_busy", "last call"},
	{"a call that its caller cancelled", facts{view: online(), calls: []devices.CallStep{{Call: "a", Sent: true, Outcome: "device_timeout", Detail: devices.DetailCancelled, At: before(secs)}}}, "well", ""},

	// Stock firmware has none of these faults. Its errors have no code and are not escaped, its photos are JSON in a
	// string, and what it answers after a timeout is late.
	{"a stock tool failed", facts{view: online(), steps: []devices.Step{deviation("error_no_code")}, calls: []devices.CallStep{made(secs, volume, "tool_error")}}, "well", ""},
	{"a stock tool failed with a quote in its words", facts{view: online(), steps: []devices.Step{deviation("error_unescaped")}, calls: []devices.CallStep{made(secs, volume, "tool_error")}}, "well", ""},
	{"a stock camera took a photo", facts{view: online(), steps: []devices.Step{deviation("image_encoding")}}, "well", ""},
	{"a stock robot answered its local port", facts{view: online(), steps: []devices.Step{deviation("foreign_reply")}}, "well", ""},
	{"a call answered late", facts{view: online(), steps: []devices.Step{deviation("late_reply")}, calls: []devices.CallStep{{Call: unanswered(40 * secs).Call, Sent: true, Late: true, Outcome: "ok", At: before(40 * secs), Took: 34 * secs}, unanswered(40 * secs)}}, "well", ""},
	{"not stock firmware", facts{view: online(), steps: []devices.Step{deviation("no_version")}}, "protocol", "no_version"},

	// Over WebSocket stock firmware connects for each conversation, and a short one lasts some seconds.
	{"six short conversations over WebSocket", facts{view: overWebSocket(offline("gone")), steps: conversations(6, 40*secs)}, causeAsleep, "as after every conversation"},
	{"in the sixth short conversation over WebSocket", facts{view: overWebSocket(online()), steps: conversations(6, 40*secs)}, "well", ""},
	{"WebSocket that is closed for flooding", facts{view: overWebSocket(online()), steps: []devices.Step{overWebSocketToo(times(5, step(60*secs, devices.StepClosed, "flooding")))}}, "flapping", "5 times"},

	// Stock firmware makes its OTA check 5 to 20 s after its start, once per start, and connects to MQTT right after it.
	{"crashes right after its check, every 8 s", facts{view: offline("gone"), steps: boots(4, 8*secs, devices.TransportMQTT)}, "boot_loop", "4 times"},
	{"crashes 20 s after its start, connected by MQTT", facts{view: online(), steps: crashes(6, 30*secs, devices.TransportMQTT)}, "boot_loop", "6 times"},
	{"crashes 20 s after its start, over WebSocket", facts{view: overWebSocket(offline("gone")), steps: crashes(6, 30*secs, devices.TransportWebSocket)}, "boot_loop", "image 0a1b2c3d"},
	{"crashes 3 minutes after each start", facts{view: offline("gone"), steps: crashes(6, 180*secs, devices.TransportMQTT)}, "boot_loop", "4 times"},
	{"crashes for hours, its records combined", facts{view: offline("gone"), steps: []devices.Step{times(40, boot(300*secs, devices.TransportMQTT))}}, "boot_loop", "40 times"},
	{"its check is refused for its token, again and again", facts{view: offline("gone"), steps: []devices.Step{step(5*secs, devices.StepRefused, "wrong_token"), boot(6*secs, devices.TransportMQTT)}}, "wrong_token", "refused"},
	{"switched off and on twice", facts{view: overWebSocket(offline("gone")), steps: boots(3, 60*secs, devices.TransportWebSocket)}, causeAsleep, "wakes it"},
	{"four times within two hours", facts{view: overWebSocket(offline("gone")), steps: boots(4, 1800*secs, devices.TransportWebSocket)}, causeAsleep, "wakes it"},
	{"restarted four times by calls", facts{view: overWebSocket(offline("gone")), steps: boots(4, 60*secs, devices.TransportWebSocket),
		calls: []devices.CallStep{made(70*secs, "self.reboot", "restarting"), made(130*secs, "system", "restarting")}}, causeAsleep, "wakes it"},
	{"another image after each start", facts{view: overWebSocket(offline("gone")), steps: images(boots(4, 60*secs, devices.TransportWebSocket))}, causeAsleep, "wakes it"},
	{"somebody who knows its id makes checks", facts{view: offline("dead"), steps: unproven(boots(20, 10*secs, devices.TransportMQTT))}, "dead", "no power"},

	// A crash ends the connection without a word. It is seen when the device sends a FIN, or at its next start.
	{"dies in a call", facts{view: overWebSocket(offline("gone")), steps: []devices.Step{overWebSocketToo(died(5*secs, 1))}}, "gone", "while a call was running"},
	{"dies in a call, and starts again", facts{view: overWebSocket(offline("gone")), steps: []devices.Step{boot(4*secs, devices.TransportWebSocket), overWebSocketToo(died(16*secs, 1))}}, "crashed", "while a call was running, and it started again"},
	{"dies while its tools are listed", facts{view: overWebSocket(offline("gone")), steps: []devices.Step{overWebSocketToo(text(devices.TextListing, died(5*secs, 0)))}}, "gone", "while its tools were listed"},
	{"dies while its tools are listed, and starts again", facts{view: overWebSocket(offline("gone")), steps: []devices.Step{boot(4*secs, devices.TransportWebSocket), overWebSocketToo(text(devices.TextListing, died(16*secs, 0)))}}, "crashed", "tools were listed"},
	{"died in a call, and talked since", facts{view: overWebSocket(offline("gone")), steps: append(conversations(1, 40*secs), overWebSocketToo(died(200*secs, 1)))}, causeAsleep, "as after every conversation"},

	{"restarted by a command a minute ago", facts{view: offline("gone"), calls: []devices.CallStep{made(70*secs, "system", "restarting")}}, "restarting", "restart command"},
	{"restarted by a command over WebSocket, and started again", facts{view: overWebSocket(offline("gone")), steps: []devices.Step{boot(40*secs, devices.TransportWebSocket)}, calls: []devices.CallStep{made(70*secs, "system", "restarting")}}, causeAsleep, "wakes it"},
	{"restarted by a command, and not seen for an hour", facts{view: with(offline("gone"), func(v *devices.View) { v.Presence.LastSeen = before(time.Hour) }), calls: []devices.CallStep{made(time.Hour, "system", "restarting")}}, "gone", "1.0 h ago"},

	// After a failed self.upgrade_firmware stock firmware stays in its state upgrading.
	{"an upgrade failed", facts{view: online(), calls: []devices.CallStep{made(300*secs, upgrade, "tool_error")}}, "upgrade_failed", "button and wake word"},
	{"an upgrade failed a day ago", facts{view: online(), calls: []devices.CallStep{made(24*time.Hour, upgrade, "tool_error")}}, "upgrade_failed", "button and wake word"},
	{"an upgrade failed, then a restart command", facts{view: online(), steps: []devices.Step{boot(40*secs, devices.TransportMQTT)}, calls: []devices.CallStep{made(60*secs, "system", "restarting"), made(300*secs, upgrade, "tool_error")}}, "well", ""},
	{"an upgrade failed, and somebody switched it off and on", facts{view: online(), steps: []devices.Step{boot(40*secs, devices.TransportMQTT)}, calls: []devices.CallStep{made(300*secs, upgrade, "tool_error")}}, "well", ""},
	{"an upgrade over WebSocket is loading", facts{view: overWebSocket(with(offline("gone"), func(v *devices.View) { v.Presence.LastSeen = before(300 * secs) })), calls: []devices.CallStep{made(301*secs, upgrade, "restarting")}}, "restarting", "self.upgrade_firmware"},
	{"an upgrade over WebSocket failed", facts{view: overWebSocket(with(offline("gone"), func(v *devices.View) { v.Presence.LastSeen = before(1200 * secs) })), calls: []devices.CallStep{made(1201*secs, upgrade, "restarting")}}, "upgrade_failed", "has not started since"},
	{"an upgrade succeeded", facts{view: online(), steps: []devices.Step{boot(40*secs, devices.TransportMQTT)}, calls: []devices.CallStep{made(1201*secs, upgrade, "restarting")}}, "well", ""},
	{"flapping", facts{view: online(), steps: []devices.Step{times(5, step(60*secs, devices.StepClosed, "gone"))}}, "flapping", "5 times"},
	{"over a limit", facts{view: online(), steps: []devices.Step{text("messages", step(60*secs, devices.StepLimit, ""))}}, "rate_limited", "messages"},
	{"deviates", facts{view: online(), steps: []devices.Step{text("cursor_loop", step(60*secs, devices.StepDeviation, ""))}}, "protocol", "cursor_loop"},
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
		{[]devices.CallStep{call("tool_error", sent, atHolder, func(c *devices.CallStep) { c.Tool = upgrade })}, "upgrade_failed"},
		{[]devices.CallStep{call("sent", sent)}, "well"},
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

// Of what anybody can cause who knows the id of a device, no explanation is certain; and an update is not the first thing to
// try for a device that sends no hello.
func TestUncertainCauses(t *testing.T) {
	f := facts{now: now, found: true, view: offline("dead"), steps: []devices.Step{step(5*secs, devices.StepRefused, "wrong_token")}}
	f.steps[0].Proven = false
	if got := explainDevice(&f); got.cause != "wrong_token" || got.certain {
		t.Errorf("a wrong token: %+v", got)
	}
	f.steps[0].Cause = devices.CauseOldToken
	if got := explainDevice(&f); got.cause != "old_generation" || !got.certain {
		t.Errorf("former credentials: %+v", got)
	}
	if next := Cause("hello_failed").next("d"); slices.ContainsFunc(next[:len(next)-1], func(text string) bool { return strings.Contains(text, "firmware") }) {
		t.Errorf("an update is not the last thing to try: %q", next)
	}
}

// Every record has a text as evidence, and deviations of stock firmware are known ones.
func TestEvidenceHasText(t *testing.T) {
	for _, kind := range devices.StepKinds {
		if e := evidenceOf(&devices.Step{Kind: kind}, true); e.Text == "" || kindTexts[kind] == "" {
			t.Errorf("%s has no text", kind)
		}
	}
	if e := evidenceOfEvent(devices.StreamEvent{Kind: devices.EventOnline}); e.Text == "" {
		t.Error("an event without details has no text")
	}
	known := []mcpclient.Deviation{mcpclient.DeviationErrorNoCode, mcpclient.DeviationErrorUnescaped, mcpclient.DeviationUnparsable, mcpclient.DeviationLateReply, mcpclient.DeviationForeignReply, mcpclient.DeviationImageEncoding}
	for _, text := range stockDeviations {
		if !slices.Contains(known, mcpclient.Deviation(text)) {
			t.Errorf("%s is no deviation", text)
		}
	}
}

func values[K comparable](m map[K]Cause) (list []Cause) {
	for _, v := range m {
		list = append(list, v)
	}
	return list
}
