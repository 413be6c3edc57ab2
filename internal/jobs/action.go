package jobs

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// Action is what a job does on each device: the member of an api.JobAction that is given. Whatever differs between kinds of
// actions is in these methods, and a new kind is a new type in actionsOf and a name in kinds.
type Action interface {
	// Name is that of the member.
	Name() string
	// String describes the action, as the command line takes it.
	String() string
	// NeedsTools reports whether an action begins only after the device's tools were read.
	NeedsTools() bool
	// Permit returns an error if the caller may not have the action done, and the rules that require a confirmation.
	Permit(by Rights) (confirm []string, err error)
	// Judge returns why a device would refuse the action now, or nil.
	Judge(by Target) *devices.Error
	// Begin does the action on a device, and returns what the device answers. A message has no answer: its Outcome is CodeSent.
	Begin(on Sender) (devices.ToolResult, error)

	// check checks the action as given, and fills in its defaults and those that the job has with it.
	check(spec *api.JobSpec, f *faults)
}

// Rights are those of a caller, whatever the devices are.
type Rights interface {
	Call(tool string, arguments json.RawMessage) (confirm []string, err error)
	Message(body json.RawMessage) error
}

// Target judges what a caller does to one device, by its last known tools.
type Target interface {
	Call(tool string, arguments json.RawMessage) *devices.Error
}

// Sender sends to one device.
type Sender interface {
	// Call calls a tool. timeout is zero for the tool's default.
	Call(tool string, arguments json.RawMessage, timeout time.Duration) (devices.ToolResult, error)
	Message(body json.RawMessage) error
}

// kinds are the names of the members, as Action.Name returns them.
var kinds = []string{"call", "message", "restart"}

// actionsOf returns the members that are given, in the order of kinds.
func actionsOf(a *api.JobAction) (list []Action) {
	if a.Call != nil {
		list = append(list, call{a.Call})
	}
	if len(a.Message) > 0 {
		list = append(list, message(a.Message))
	}
	if a.Restart != nil {
		list = append(list, restart{a.Restart})
	}
	return list
}

// ActionOf returns the action that is given; false if there is none, or none that this version knows.
func ActionOf(a *api.JobAction) (Action, bool) {
	list := actionsOf(a)
	if len(list) == 0 {
		return nil, false
	}
	return list[0], true
}

// IsAction reports whether a text is the name of a kind that this version knows.
func IsAction(name string) bool { return slices.Contains(kinds, name) }

func checkAction(spec *api.JobSpec, f *faults) {
	list := actionsOf(&spec.Action)
	for _, a := range list {
		a.check(spec, f)
	}
	if len(list) != 1 {
		f.add("/action", "must have exactly one of %s", strings.Join(kinds, ", "))
	}
}

type call struct{ *api.JobCall }

func (c call) Name() string     { return "call" }
func (c call) String() string   { return "call " + c.Tool + membersText(c.Arguments, "") }
func (c call) NeedsTools() bool { return true }

func (c call) Permit(by Rights) ([]string, error) { return by.Call(c.Tool, c.Arguments) }
func (c call) Judge(by Target) *devices.Error     { return by.Call(c.Tool, c.Arguments) }
func (c call) Begin(on Sender) (devices.ToolResult, error) {
	return on.Call(c.Tool, c.Arguments, durationOf(c.Timeout, 0))
}

func (c call) check(_ *api.JobSpec, f *faults) {
	if !devices.IsToolName(c.Tool) {
		f.add("/action/call/tool", "must be the name of a tool: 1 to 256 bytes without control characters")
	}
	switch {
	case len(c.Arguments) > maxArgumentBytes:
		f.add("/action/call/arguments", "may have %d KiB", maxArgumentBytes>>10)
	case len(c.Arguments) > 0 && jsonspan.KindOf(c.Arguments) != jsonspan.KindObject:
		f.add("/action/call/arguments", "must be an object")
	default:
		var text *devices.Error
		if errors.As(devices.CheckText("arguments", c.Arguments), &text) {
			for _, fault := range text.Faults {
				f.add("/action/call/arguments"+fault.Pointer, "%s", fault.Detail)
			}
		}
	}
	span(c.Timeout, "/action/call/timeout", time.Second, 300*time.Second, f)
}

type message json.RawMessage

func (m message) Name() string { return "message" }

func (m message) String() string {
	name, _ := jsonspan.String(jsonspan.Member(m, "type"))
	return strings.TrimRight("message "+name, " ") + membersText(json.RawMessage(m), "type")
}

func (m message) NeedsTools() bool                   { return false }
func (m message) Permit(by Rights) ([]string, error) { return nil, by.Message(json.RawMessage(m)) }
func (m message) Judge(Target) *devices.Error        { return nil }

func (m message) Begin(on Sender) (devices.ToolResult, error) {
	return devices.ToolResult{Outcome: CodeSent}, on.Message(json.RawMessage(m))
}

func (m message) check(_ *api.JobSpec, f *faults) {
	if jsonspan.KindOf(json.RawMessage(m)) != jsonspan.KindObject {
		f.add("/action/message", "must be an object with a member type")
	}
}

type restart struct{ *api.JobRestart }

// theRestart is the message that a restart is.
var theRestart = message(devices.RestartMessage)

func (r restart) Name() string                                { return "restart" }
func (r restart) String() string                              { return "restart " + r.When }
func (r restart) NeedsTools() bool                            { return false }
func (r restart) Permit(by Rights) ([]string, error)          { return theRestart.Permit(by) }
func (r restart) Judge(by Target) *devices.Error              { return theRestart.Judge(by) }
func (r restart) Begin(on Sender) (devices.ToolResult, error) { return theRestart.Begin(on) }

func (r restart) check(spec *api.JobSpec, f *faults) {
	switch r.When {
	case "":
		r.When = "idle"
	case "idle", "now":
	default:
		f.add("/action/restart/when", "must be idle or now")
	}
	if r.When == "idle" && spec.Busy == "" {
		spec.Busy = "wait"
	}
}

// membersText writes the members of an object as the command line takes them, in order of their names, but for one.
func membersText(object json.RawMessage, without string) (text string) {
	var members map[string]json.RawMessage
	if len(object) == 0 || json.Unmarshal(object, &members) != nil {
		return ""
	}
	for _, key := range slices.Sorted(maps.Keys(members)) {
		value := string(members[key])
		var plain string
		if json.Unmarshal(members[key], &plain) == nil && plain != "" && !strings.ContainsAny(plain, " \t\r\n\"") {
			value = plain
		}
		if key != without {
			text += " " + key + "=" + value
		}
	}
	return text
}
