package explain

import (
	"fmt"
	"strings"
	"time"

	"fleetd/internal/devices"
)

// leastWait is from when the wait of a call that succeeded is worth a word.
const leastWait = time.Second

// Outcomes of calls: outcomeSent is that of a message, outcomeRestarting that of a call or message that restarts the device.
const (
	outcomeOK         = "ok"
	outcomeSent       = "sent"
	outcomeToolError  = "tool_error"
	outcomeRestarting = "restarting"
)

// merged is a call as all nodes recorded it.
type merged struct {
	first  devices.CallStep  // of the node that answered the caller
	holder *devices.CallStep // of the node that holds the device
	late   *devices.CallStep
}

// mergeCall merges the records of one call; there is at least one.
func mergeCall(steps []devices.CallStep) merged {
	var m merged
	for i := range steps {
		s := &steps[i]
		switch {
		case s.Late:
			m.late = s
		case s.Holder:
			m.holder = s
		default:
			m.first = *s
		}
	}
	switch {
	case m.first.Call == "" && m.holder != nil:
		m.first = *m.holder
	case m.first.Call == "":
		m.first = *m.late // the record of its end was overwritten
	}
	return m
}

// callRule is one row of the table: the first one that finds something decides.
type callRule func(m *merged) (finding, bool)

var callRules = []callRule{answeredLate, succeeded, callerLeft, notAllowed, byOutcome, timedOut, failedOnDevice}

// explainCall applies the rules.
func explainCall(m *merged) finding {
	for _, r := range callRules {
		if found, ok := r(m); ok {
			return found
		}
	}
	return finding{"unknown", false, fmt.Sprintf("It ended as %s.%s", m.first.Outcome, detail(m.first.Detail))}
}

func answeredLate(m *merged) (finding, bool) {
	if m.late == nil {
		return finding{}, false
	}
	return finding{"answered_late", true, fmt.Sprintf("The device answered (%s) %s after the call was sent; the caller had left after %s.", m.late.Outcome, seconds(m.late.Took), seconds(m.first.Took))}, true
}

func succeeded(m *merged) (finding, bool) {
	switch m.first.Outcome {
	case outcomeOK:
	case outcomeSent:
		return finding{"well", true, "The message was written to the device, which does not answer messages."}, true
	case outcomeRestarting:
		return finding{"restarting", true, "It restarts the device, which therefore does not answer."}, true
	default:
		return finding{}, false
	}
	if m.holder != nil && m.holder.Waited >= leastWait {
		return finding{"waited_behind", true, fmt.Sprintf("It succeeded after %s, of which it waited %s for the call %s on the device.", seconds(m.first.Took), seconds(m.holder.Waited), m.holder.Ahead)}, true
	}
	return finding{"well", true, fmt.Sprintf("The device answered after %s.", seconds(m.first.Took))}, true
}

func callerLeft(m *merged) (finding, bool) {
	if m.first.Detail != devices.DetailCancelled {
		return finding{}, false
	}
	return finding{"caller_left", true, fmt.Sprintf("The caller cancelled the request after %s.", seconds(m.first.Took))}, true
}

func notAllowed(m *merged) (finding, bool) {
	switch devices.Code(m.first.Outcome) {
	case devices.CodeToolDenied, devices.CodeForbidden, devices.CodeUnauthorized:
		return finding{"policy_denied", true, fmt.Sprintf("The rule %q refused it.%s", m.first.Rule, detail(m.first.Detail))}, true
	case devices.CodeConfirmation:
		if strings.Contains(m.first.Detail, devices.DetailConfirmationEnded) {
			return finding{"confirmation_expired", true, fmt.Sprintf("The rule %q requires the confirmation of a person; the one that was sent belongs to another call, was used, or has expired.", m.first.Rule)}, true
		}
		return finding{"confirmation_missing", true, fmt.Sprintf("The rule %q requires the confirmation of a person.", m.first.Rule)}, true
	}
	return finding{}, false
}

// outcomeCauses are the outcomes that are causes by themselves.
var outcomeCauses = map[devices.Code]Cause{
	devices.CodeInvalidArguments: "arguments_refused", devices.CodeBadRequest: "arguments_refused", devices.CodeTooLarge: "arguments_refused",
	devices.CodeToolUnknown: "tool_unknown", devices.CodeDeviceUnknown: "device_offline", devices.CodeDeviceOffline: "device_offline",
	devices.CodeDeviceBusy: "queue_full", devices.CodeRateLimited: "queue_full", devices.CodeConnectionLost: "connection_lost", devices.CodeSuperseded: "superseded", devices.CodeUnavailable: "hop_lost",
}

func byOutcome(m *merged) (finding, bool) {
	cause := outcomeCauses[devices.Code(m.first.Outcome)]
	if cause == "" {
		return finding{}, false
	}
	return finding{cause, true, infos[cause].Meaning + detail(m.first.Detail)}, true
}

func timedOut(m *merged) (finding, bool) {
	if devices.Code(m.first.Outcome) != devices.CodeDeviceTimeout {
		return finding{}, false
	}
	at := &m.first
	if m.holder != nil {
		at = m.holder
	}
	switch {
	case at.Sent && isCamera(at.Tool):
		return finding{"camera_not_ready", false, fmt.Sprintf("The camera was requested to take a photo, and nothing came within %s.", seconds(at.Took))}, true
	case at.Sent:
		return finding{"sent_no_answer", true, fmt.Sprintf("It was sent to the device, which did not answer within %s.", seconds(at.Took))}, true
	case at.Ahead != "":
		return finding{"waited_behind", true, fmt.Sprintf("It waited %s for the call %s on the device and was not sent.", seconds(at.Waited), at.Ahead)}, true
	}
	return finding{"not_sent", true, fmt.Sprintf("It was not sent to the device within %s.", seconds(at.Took))}, true
}

func isCamera(tool string) bool {
	return strings.Contains(tool, "camera") || strings.HasSuffix(tool, "take_photo")
}

func failedOnDevice(m *merged) (finding, bool) {
	text := m.first.Detail
	switch {
	case m.first.Outcome == outcomeToolError && m.first.Tool == toolUpgrade:
		return finding{"upgrade_failed", true, infos["upgrade_failed"].Meaning}, true
	case m.first.Outcome == outcomeToolError && isCamera(m.first.Tool):
		return finding{"camera_not_ready", false, "The camera tool failed on the device."}, true
	case m.first.Outcome == outcomeToolError:
		return finding{"device_error", true, "The tool failed on the device; its answer has the reason."}, true
	case devices.Code(m.first.Outcome) != devices.CodeDeviceError:
		return finding{}, false
	case strings.Contains(text, "malformed"), strings.Contains(text, "not valid"):
		return finding{"answer_malformed", true, "The answer of the device could not be read." + detail(text)}, true
	case strings.Contains(text, "too large"), strings.Contains(text, "limit"):
		return finding{"answer_too_large", true, "The answer of the device was over the limit." + detail(text)}, true
	}
	return finding{"device_error", true, "The device answered with an error." + detail(text)}, true
}

// seconds writes a time, one under a second in milliseconds.
func seconds(d time.Duration) string {
	if ms := d.Round(time.Millisecond).Milliseconds(); ms < 1000 {
		return fmt.Sprintf("%d ms", max(ms, 1))
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}
