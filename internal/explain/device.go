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
	unwellTime     = 10 * time.Minute // how long a symptom of a connected device counts
	unwellCalls    = 2
	disputeTime    = 10 * time.Minute
	evidenceLength = 6
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

var offlineRules = []rule{waitingApproval, unknownDevice, revoked, replaced, lastRefusal, endpointUnreachable, connectNotSeen, restarting, wakesByVoice, flapping, lastEnd, neverConnected}

var onlineRules = []rule{replaced, otherClient, mcpState, audioSilent, callsUnanswered, flapping, overLimit, deviates}

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
	if f.view.Pending == "" {
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
	return finding{cause, true, fmt.Sprintf("%s %s: %s.%s", what, ago(f.now, s.At), words(s.Cause), detail(s.Text))}, true
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

// restarting explains a connection that ended because of a call.
func restarting(f *facts) (finding, bool) {
	ended := f.endedAt()
	if f.now.Sub(ended) > restartTime {
		return finding{}, false
	}
	for _, c := range f.calls {
		if c.Outcome == outcomeRestarting && ended.Sub(c.At).Abs() < restartTime {
			return finding{"restarting", true, fmt.Sprintf("The call %s of %s restarted it %s.", c.Call, c.Tool, ago(f.now, c.At))}, true
		}
	}
	return finding{}, false
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
	case transport == devices.TransportWebSocket && (reason == devices.CloseGone || reason == devices.CloseIdle):
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
	if f.view.Pending == "" {
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
	if !ok || f.now.Sub(s.At) > unwellTime {
		return finding{}, false
	}
	return finding{"udp_silent", false, fmt.Sprintf("A conversation was open for 10 seconds and no audio arrived, %s.", ago(f.now, s.At))}, true
}

func callsUnanswered(f *facts) (finding, bool) {
	seen := map[string]bool{}
	for _, c := range f.calls {
		if f.now.Sub(c.At) <= unwellTime && (c.Late || c.Sent && c.Outcome == string(devices.CodeDeviceTimeout)) {
			seen[c.Call] = true
		}
	}
	if len(seen) < unwellCalls {
		return finding{}, false
	}
	return finding{"main_loop_busy", false, fmt.Sprintf("It is connected, but %d calls of the last 10 minutes were answered late or not at all.", len(seen))}, true
}

func flapping(f *facts) (finding, bool) {
	n := f.count(flapTime, func(s *devices.Step) bool { return s.Kind == devices.StepClosed })
	if n < flapCount {
		return finding{}, false
	}
	return finding{"flapping", true, fmt.Sprintf("Its connection ended %d times within 5 minutes.", n)}, true
}

func overLimit(f *facts) (finding, bool) {
	s, ok := f.last(devices.StepLimit)
	if !ok || f.now.Sub(s.At) > unwellTime {
		return finding{}, false
	}
	return finding{"rate_limited", true, fmt.Sprintf("It sends more %s than it may, last %s; the rest is dropped.", s.Text, ago(f.now, s.At))}, true
}

// deviates finds deviations from the protocol that have an effect on what fleetd shows.
func deviates(f *facts) (finding, bool) {
	for _, s := range f.steps {
		if s.Kind == devices.StepDeviation && f.now.Sub(s.At) <= unwellTime && s.Text != "late_reply" {
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
