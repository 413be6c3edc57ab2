package explain

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"fleetd/internal/devices"
)

// Times that rules compare with.
const (
	connectTime    = 30 * time.Second // from an OTA check to the connection
	restartTime    = 3 * time.Minute
	replaceTime    = time.Minute
	replaceCount   = 3 // takeovers within replaceTime
	flapTime       = 5 * time.Minute
	flapCount      = 5
	symptomTime    = 10 * time.Minute // how long a symptom of a connected device counts
	symptomCalls   = 2
	disputeTime    = 10 * time.Minute
	evidenceLength = 6
	// A device that makes bootCount OTA checks of one image within bootTime is in a boot loop. Stock firmware checks once
	// per boot, and its fastest boot, with Wi-Fi, takes about 5 s: a device that crashes right after its check is found
	// within half a minute, one that crashes 3 minutes after each start within 10. Somebody who looks for a fault may
	// switch a device off and on twice, so that three checks are not enough.
	bootCount = 4
	bootTime  = 10 * time.Minute
	// upgradeTime is how long a device may load and start an image for self.upgrade_firmware.
	upgradeTime = 15 * time.Minute
)

// facts are what is known about a device, from all nodes.
type facts struct {
	now   time.Time
	view  devices.View // zero without a row
	found bool         // the fleet has the device
	steps []devices.Step
	calls []devices.CallStep
}

// finding is what a rule found.
type finding struct {
	cause    Cause
	certain  bool
	sentence string
}

// rule is one row of the table: the first one that finds something decides.
type rule func(f *facts) (finding, bool)

var offlineRules = []rule{waitingApproval, unknownDevice, revoked, replaced, bootLoop, lastRefusal, endpointUnreachable, connectNotSeen, restarting, upgradeFailed, crashed, wakesByVoice, flapping, lastEnd, neverConnected}

var onlineRules = []rule{replaced, otherClient, bootLoop, upgradeFailed, mcpState, audioSilent, callsUnanswered, flapping, overLimit, deviates}

// explainDevice applies the rules.
func explainDevice(f *facts) finding {
	rules := offlineRules
	if f.online() {
		rules = onlineRules
	}
	for _, r := range rules {
		if found, ok := r(f); ok {
			return found
		}
	}
	if f.online() {
		return finding{"well", true, fmt.Sprintf("It is connected by %s to node %s; the connection began %s.", f.view.Presence.Transport, f.view.Presence.Node, ago(f.now, f.view.Presence.ConnectedAt))}
	}
	return finding{"unknown", false, "It is not connected, and nothing that is recorded explains it."}
}

func (f *facts) online() bool { return f.view.Presence.Online }

// recorded returns the presence of a device by the records alone: connected, if nothing ended its newest connection.
func (f *facts) recorded() (p devices.Presence) {
	if s, ok := f.last(devices.StepConnected, devices.StepClosed); ok && s.Kind == devices.StepConnected {
		p.Online, p.Node, p.Transport, p.ConnectedAt = true, s.Node, s.Transport, s.At
	}
	return p
}

// last returns the newest step of these kinds.
func (f *facts) last(kinds ...devices.StepKind) (devices.Step, bool) {
	for _, s := range f.steps {
		if slices.Contains(kinds, s.Kind) {
			return s, true
		}
	}
	return devices.Step{}, false
}

// count returns how many steps within a time match.
func (f *facts) count(within time.Duration, match func(*devices.Step) bool) (n int) {
	for i := range f.steps {
		if s := &f.steps[i]; f.now.Sub(s.At) <= within && match(s) {
			n += s.Count
		}
	}
	return n
}

// endedAt is when the device was last connected.
func (f *facts) endedAt() time.Time {
	at := f.view.Presence.LastSeen
	if s, ok := f.last(devices.StepClosed); ok && s.At.After(at) {
		at = s.At
	}
	return at
}

func waitingApproval(f *facts) (finding, bool) {
	if len(f.view.Pending) == 0 {
		return finding{}, false
	}
	text := "The device waits for approval: it speaks or shows a code."
	if f.found && f.view.Device.ClientID != "" {
		text = "The device id is known, but another client (a new Client-Id, as after erasing the flash) uses it and waits for approval."
	}
	return finding{"waiting_approval", true, text}, true
}

func unknownDevice(f *facts) (finding, bool) {
	if f.found {
		return finding{}, false
	}
	if len(f.steps) > 0 {
		s := f.steps[0]
		return finding{"stranger_refused", true, fmt.Sprintf("The fleet has no device with this id. One that uses it was refused %s: %s.", ago(f.now, s.At), words(s.Cause))}, true
	}
	return finding{"never_seen", true, "The fleet has no device with this id, and nothing that uses it has contacted a node."}, true
}

func revoked(f *facts) (finding, bool) {
	if f.view.Device.Admission != devices.AdmissionRevoked {
		return finding{}, false
	}
	return finding{"revoked", true, "An operator revoked the device: its credentials are invalid until it is approved."}, true
}

// replaced finds clients with one id.
func replaced(f *facts) (finding, bool) {
	isSuperseded := func(s *devices.Step) bool {
		return s.Kind == devices.StepClosed && s.Cause == devices.StepCause(devices.CloseSuperseded)
	}
	contested := f.view.State == devices.StateContested || f.count(disputeTime, func(s *devices.Step) bool {
		return s.Kind == devices.StepRefused && s.Cause == devices.StepCause(devices.CloseContested)
	}) > 0
	var newest time.Time
	for i := range f.steps {
		if isSuperseded(&f.steps[i]) {
			newest = f.steps[i].At
			break
		}
	}
	times := 0
	if f.now.Sub(newest) < disputeTime {
		for i := range f.steps {
			if s := &f.steps[i]; isSuperseded(s) && newest.Sub(s.At) <= replaceTime {
				times += s.Count
			}
		}
	}
	switch {
	case contested && !f.online():
		return finding{"contested", true, "Two clients use this device id: the connection of one of them is kept, and the other is refused."}, true
	case contested || times >= replaceCount:
		return finding{"cloned", true, fmt.Sprintf("Connections with this device id replaced each other %d times within a minute: two clients use it.", max(times, replaceCount))}, true
	}
	return finding{}, false
}

// refusalCauses are the causes of refused connections and OTA checks.
var refusalCauses = map[devices.StepCause]Cause{
	devices.CauseWrongToken: "wrong_token", devices.CauseOldToken: "old_generation", devices.CauseUnknownDevice: "stranger_refused",
	devices.StepCause(devices.CloseRevoked): "revoked", devices.StepCause(devices.CloseNoHello): "hello_failed", devices.StepCause(devices.CloseProtocol): "protocol",
	devices.StepCause(devices.CloseTooLarge): "too_large", devices.StepCause(devices.CloseCrowded): "crowded", devices.StepCause(devices.CloseFlooding): "rate_limited",
	devices.StepCause(devices.CloseDraining): "draining", devices.CauseRateLimited: "rate_limited", devices.CauseTooManyNew: "rate_limited",
	devices.CauseBadRequest: "check_refused", devices.CauseUnavailable: "check_refused", devices.CauseUnsafe: "wrong_endpoint",
}

// lastRefusal explains a device whose last attempt was refused. An OTA check that was
// answered ends the time of refused credentials only if a connection follows.
func lastRefusal(f *facts) (finding, bool) {
	s, ok := f.last(devices.StepRefused, devices.StepClosed, devices.StepConnected)
	if check, checked := f.last(devices.StepCheck); checked && refusalCauses[check.Cause] != "" && check.At.After(s.At) {
		s, ok = check, true
	}
	cause := refusalCauses[s.Cause]
	if !ok || s.Kind == devices.StepClosed || s.Kind == devices.StepConnected || cause == "" || s.At.Before(f.endedAt().Add(-time.Second)) {
		return finding{}, false
	}
	what := "Its last connection was refused"
	if s.Kind == devices.StepCheck {
		what = "Its last OTA check was refused"
	}
	// Whoever knows the id can be refused. Only a former owner has old credentials.
	certain := s.Proven || s.Cause == devices.CauseOldToken
	return finding{cause, certain, fmt.Sprintf("%s %s: %s.%s", what, ago(f.now, s.At), words(s.Cause), detail(s.Text))}, true
}

// lastOffer is the newest OTA check that offered a server since the last connection.
func (f *facts) lastOffer() (devices.Step, bool) {
	s, ok := f.last(devices.StepCheck)
	ok = ok && (s.Cause == devices.CauseOffersMQTT || s.Cause == devices.CauseOffersWebSocket) && s.At.After(f.endedAt())
	return s, ok
}

func endpointUnreachable(f *facts) (finding, bool) {
	s, ok := f.lastOffer()
	if !ok || !s.Remote.IsValid() || s.Remote.IsLoopback() {
		return finding{}, false
	}
	host := hostOf(s.Text)
	ip, err := netip.ParseAddr(host)
	if host != "localhost" && (err != nil || !ip.IsLoopback() && !ip.IsUnspecified()) {
		return finding{}, false
	}
	return finding{"wrong_endpoint", true, fmt.Sprintf("Its OTA check %s was answered with the address %s, which is the device itself.", ago(f.now, s.At), s.Text)}, true
}

// hostOf returns the host of a URL, or of a host:port.
func hostOf(endpoint string) string {
	if u, err := url.Parse(endpoint); err == nil && u.Host != "" {
		return u.Hostname()
	}
	if host, _, err := net.SplitHostPort(endpoint); err == nil {
		return host
	}
	return endpoint
}

func connectNotSeen(f *facts) (finding, bool) {
	s, ok := f.lastOffer()
	switch {
	case !ok || s.Cause != devices.CauseOffersMQTT:
		return finding{}, false
	case f.now.Sub(s.At) < connectTime:
		return finding{"restarting", false, fmt.Sprintf("It received its configuration %s and may be connecting.", ago(f.now, s.At))}, true
	}
	return finding{"connect_not_seen", false, fmt.Sprintf("It received its configuration %s, with MQTT at %s, and no connection from it has arrived since.", ago(f.now, s.At), s.Text)}, true
}

// bootLoop finds a device that starts again and again with one image, unless calls restarted it.
func bootLoop(f *facts) (finding, bool) {
	newest, ok := f.last(devices.StepCheck)
	if !ok || newest.Image == "" {
		return finding{}, false
	}
	n := f.count(bootTime, func(s *devices.Step) bool { return isBoot(s) && s.Image == newest.Image })
	restarts := map[string]bool{}
	for _, c := range f.calls {
		if c.Outcome == outcomeRestarting && f.now.Sub(c.At) <= bootTime {
			restarts[c.Call] = true
		}
	}
	if n -= len(restarts); n < bootCount {
		return finding{}, false
	}
	image := newest.Image
	if d := &f.view.Device; d.Firmware != "" && strings.HasPrefix(d.ELF, newest.Image) {
		image += " (" + d.Firmware + ")"
	}
	return finding{"boot_loop", true, fmt.Sprintf("It started %d times within 10 minutes with the image %s: it crashes, or its power fails.", n, image)}, true
}

// isBoot reports whether a step is the OTA check of a member that has started.
func isBoot(s *devices.Step) bool {
	return s.Kind == devices.StepCheck && s.Proven && (s.Cause == devices.CauseOffersMQTT || s.Cause == devices.CauseOffersWebSocket)
}

// hasStarted reports whether the device made an OTA check after a time.
func (f *facts) hasStarted(since time.Time) bool {
	return slices.ContainsFunc(f.steps, func(s devices.Step) bool { return isBoot(&s) && s.At.After(since) })
}

// restarting explains a connection that ended because of a call or message.
func restarting(f *facts) (finding, bool) {
	ended := f.endedAt()
	if _, started := f.lastOffer(); started {
		return finding{}, false
	}
	for _, c := range f.calls {
		lasts := restartTime
		if c.Tool == toolUpgrade {
			lasts = upgradeTime
		}
		if c.Outcome == outcomeRestarting && ended.Sub(c.At).Abs() < restartTime && f.now.Sub(ended) <= lasts {
			return finding{"restarting", true, fmt.Sprintf("%s restarted it %s.", restartText(c.Tool), ago(f.now, c.At))}, true
		}
	}
	return finding{}, false
}

// restartText names what restarted a device.
func restartText(tool string) string {
	switch tool {
	case messageSystem:
		return "A restart command"
	case "":
		return "A call of another key"
	}
	return "A call of " + tool
}

// The tool that replaces the firmware, and the type of the message that restarts a device.
const (
	toolUpgrade   = "self.upgrade_firmware"
	messageSystem = "system"
)

// upgradeFailed finds a device that failed to load an image for self.upgrade_firmware: it remains in its state
// `upgrading`, in which it ignores its button and wake word (application.cc:1057 to 1083). Over WebSocket its answer
// is lost, because it closes its connection first; then the missing start shows it.
func upgradeFailed(f *facts) (finding, bool) {
	for _, c := range f.calls { // newest first
		ended := c.At.Add(c.Took)
		switch {
		case c.Outcome == outcomeRestarting && c.Tool != toolUpgrade:
			return finding{}, false // it has been restarted since
		case c.Tool != toolUpgrade || f.hasStarted(ended):
		case c.Outcome == outcomeToolError:
			return finding{"upgrade_failed", true, fmt.Sprintf("The call of %s failed %s, and the device has not started since: its button and wake word do not work until it restarts.", toolUpgrade, ago(f.now, ended))}, true
		case c.Outcome == outcomeRestarting && f.now.Sub(ended) > upgradeTime:
			return finding{"upgrade_failed", false, fmt.Sprintf("The device received the call of %s %s and has not started since: the upgrade failed, and its button and wake word do not work until it restarts.", toolUpgrade, ago(f.now, ended))}, true
		}
	}
	return finding{}, false
}

// crashed explains a connection that ended while the device worked on a request.
func crashed(f *facts) (finding, bool) {
	s, ok := f.last(devices.StepClosed, devices.StepConnected)
	if !ok || s.Kind != devices.StepClosed || s.Cause != devices.StepCause(devices.CloseGone) || s.Calls == 0 && s.Text != devices.TextListing || f.wasRestarted(s.At) {
		return finding{}, false
	}
	what := "its tools were listed"
	if s.Calls > 0 {
		what = "a call was running"
	}
	if f.hasStarted(s.At) {
		return finding{"crashed", s.Calls > 0, fmt.Sprintf("Its connection ended %s while %s, and it started again after that: its firmware crashed, or its power failed.", ago(f.now, s.At), what)}, true
	}
	return finding{"gone", false, fmt.Sprintf("Its connection ended %s while %s, and it has not returned: it crashed, or has no power or no network.", ago(f.now, s.At), what)}, true
}

// wasRestarted reports whether a call restarted the device at about this time.
func (f *facts) wasRestarted(at time.Time) bool {
	return slices.ContainsFunc(f.calls, func(c devices.CallStep) bool {
		return c.Outcome == outcomeRestarting && at.Sub(c.At).Abs() < restartTime
	})
}

// wakesByVoice explains a WebSocket device, which connects only when somebody wakes it.
func wakesByVoice(f *facts) (finding, bool) {
	transport, reason := f.view.Presence.Transport, devices.CloseReason(f.view.Presence.Reason)
	if s, ok := f.last(devices.StepClosed); ok && transport == "" {
		transport, reason = s.Transport, devices.CloseReason(s.Cause)
	}
	offer, offered := f.lastOffer()
	switch {
	case offered && offer.Cause == devices.CauseOffersWebSocket:
		return finding{causeAsleep, true, fmt.Sprintf("It received its configuration %s, with WebSocket at %s. It connects when somebody wakes it.", ago(f.now, offer.At), offer.Text)}, true
	case transport == devices.TransportWebSocket && isWebSocketEnd(reason):
		return finding{causeAsleep, true, fmt.Sprintf("Its connection over WebSocket ended %s, as after every conversation. It connects when somebody wakes it.", ago(f.now, f.endedAt()))}, true
	}
	return finding{}, false
}

// endCauses are the reasons of an end that are causes by themselves.
var endCauses = map[string]Cause{"gone": "gone", "dead": "dead", "idle": "idle", "node_lost": "node_lost", "draining": "draining", "slow": "slow", "protocol": "protocol",
	"too_large": "too_large", "flooding": "rate_limited", "contested": "contested", "revoked": "revoked", "crowded": "crowded", "no_hello": "hello_failed"}

func lastEnd(f *facts) (finding, bool) {
	reason := f.view.Presence.Reason
	if s, ok := f.last(devices.StepClosed); ok && (reason == "" || s.At.After(f.view.Presence.LastSeen.Add(time.Second))) {
		reason = string(s.Cause)
	}
	cause := endCauses[reason]
	if cause == "" {
		return finding{}, false
	}
	return finding{cause, true, fmt.Sprintf("It was connected until %s. %s", ago(f.now, f.endedAt()), infos[cause].Meaning)}, true
}

func neverConnected(f *facts) (finding, bool) {
	if f.view.Presence.Epoch != 0 || len(f.steps) > 0 {
		return finding{}, false
	}
	return finding{"never_seen", true, "It is a member of the fleet and has never connected; no OTA check of it is recorded either."}, true
}

// otherClient finds a client that waits for approval while another one is connected.
func otherClient(f *facts) (finding, bool) {
	if len(f.view.Pending) == 0 {
		return finding{}, false
	}
	return finding{"cloned", false, "It is connected, and another client with this device id (another Client-Id) waits for approval: a copy of the device, or the device itself after erasing its flash."}, true
}

func mcpState(f *facts) (finding, bool) {
	p := &f.view.Presence
	switch {
	case p.MCP == devices.MCPUnresponsive:
		return finding{"mcp_silent", true, "It is connected and does not answer MCP: " + cmp.Or(p.MCPError, "no answer in time") + "."}, true
	case p.MCP == devices.MCPError:
		return finding{"mcp_failed", true, "It is connected, and its tools cannot be listed: " + p.MCPError + "."}, true
	case p.MCP == devices.MCPNone:
		return finding{"tools_missing", true, "It is connected and reported that it has no MCP server: firmware before 1.7, or one built without it."}, true
	case p.Partial:
		return finding{"tools_missing", true, "Its list of tools could not be read to the end." + detail(p.MCPError)}, true
	}
	return finding{}, false
}

func audioSilent(f *facts) (finding, bool) {
	s, ok := f.last(devices.StepSilent)
	if !ok || f.now.Sub(s.At) > symptomTime {
		return finding{}, false
	}
	return finding{"udp_silent", false, fmt.Sprintf("A conversation was open for 10 seconds and no audio arrived, %s.", ago(f.now, s.At))}, true
}

// callsUnanswered finds a device that is slow to answer calls, or did not answer the last one.
func callsUnanswered(f *facts) (finding, bool) {
	seen := map[string]bool{}
	var answered, unanswered time.Time
	for _, c := range f.calls {
		timedOut := c.Sent && !c.Late && c.Outcome == string(devices.CodeDeviceTimeout) && c.Detail != devices.DetailCancelled
		switch ended := c.At.Add(c.Took); {
		case f.now.Sub(c.At) > symptomTime:
		case timedOut || c.Late:
			if seen[c.Call] = true; timedOut && ended.After(unanswered) {
				unanswered = ended
			} else if c.Late && ended.After(answered) {
				answered = ended
			}
		case (c.Outcome == outcomeOK || c.Outcome == outcomeToolError) && ended.After(answered):
			answered = ended
		}
	}
	switch connected, _ := f.last(devices.StepConnected); {
	case len(seen) >= symptomCalls:
		return finding{"main_loop_busy", false, fmt.Sprintf("It is connected, but %d calls of the last 10 minutes were answered late or not at all.", len(seen))}, true
	case unanswered.After(answered) && unanswered.After(connected.At):
		return finding{"main_loop_busy", false, fmt.Sprintf("It is connected, but did not answer its last call, which ended %s.", ago(f.now, unanswered))}, true
	}
	return finding{}, false
}

// flapping counts the ends of connections. Over WebSocket stock firmware connects for each conversation and ends the
// connection after it.
func flapping(f *facts) (finding, bool) {
	n := f.count(flapTime, func(s *devices.Step) bool {
		return s.Kind == devices.StepClosed && (s.Transport != devices.TransportWebSocket || !isWebSocketEnd(devices.CloseReason(s.Cause)))
	})
	if n < flapCount {
		return finding{}, false
	}
	return finding{"flapping", true, fmt.Sprintf("Its connection ended %d times within 5 minutes.", n)}, true
}

// isWebSocketEnd reports whether a conversation over WebSocket ends for this reason.
func isWebSocketEnd(reason devices.CloseReason) bool {
	return reason == devices.CloseGone || reason == devices.CloseIdle
}

func overLimit(f *facts) (finding, bool) {
	s, ok := f.last(devices.StepLimit)
	if !ok || f.now.Sub(s.At) > symptomTime {
		return finding{}, false
	}
	return finding{"rate_limited", true, fmt.Sprintf("It sends more %s than it may, last %s; the rest is dropped.", s.Text, ago(f.now, s.At))}, true
}

// stockDeviations are the deviations of unmodified firmware: the errors of its tools have no code and are not escaped,
// its images are JSON in a string, and robots answer the requests of their own local port.
var stockDeviations = []string{"error_no_code", "error_unescaped", "unparsable", "late_reply", "foreign_reply", "image_encoding"}

// deviates finds deviations from the protocol of a device that has other than stock firmware.
func deviates(f *facts) (finding, bool) {
	for _, s := range f.steps {
		if s.Kind == devices.StepDeviation && f.now.Sub(s.At) <= symptomTime && !slices.Contains(stockDeviations, s.Text) {
			return finding{"protocol", true, fmt.Sprintf("It works, but deviates from the protocol: %s, last %s.", s.Text, ago(f.now, s.At))}, true
		}
	}
	return finding{}, false
}

// ago returns how long ago a time was, for people.
func ago(now, at time.Time) string {
	if at.IsZero() {
		return "at an unknown time"
	}
	d := max(0, now.Sub(at))
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%d s ago", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%d min ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%.1f h ago", d.Hours())
	}
	return fmt.Sprintf("%d days ago", int(d.Hours()/24))
}

// words returns a cause as words.
func words(c devices.StepCause) string { return strings.ReplaceAll(string(c), "_", " ") }

// detail returns a text as a sentence.
func detail(text string) string {
	if text == "" {
		return ""
	}
	return " " + strings.TrimSuffix(text, ".") + "."
}
