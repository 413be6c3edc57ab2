package jobs

import (
	"cmp"
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
	Firmware() error
}

// Target judges what a caller does to one device, by its last known tools.
type Target interface {
	Call(tool string, arguments json.RawMessage) *devices.Error
	Firmware(f *api.JobFirmware) *devices.Error
}

// Sender sends to one device.
type Sender interface {
	// Call calls a tool. timeout is zero for the tool's default.
	Call(tool string, arguments json.RawMessage, timeout time.Duration) (devices.ToolResult, error)
	Message(body json.RawMessage) error
}

// kinds are the names of the members, as Action.Name returns them.
var kinds = []string{"call", "message", "restart", "firmware"}

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
	if a.Firmware != nil {
		list = append(list, firmware{a.Firmware})
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
		if text, ok := errors.AsType[*devices.Error](devices.CheckText("arguments", c.Arguments)); ok {
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

// Restarts reports whether an action restarts the device: as such, or by the message of it.
func Restarts(a *api.JobAction) bool {
	if a.Restart != nil {
		return true
	}
	kind, _ := jsonspan.String(jsonspan.Member(a.Message, "type"))
	command, _ := jsonspan.String(jsonspan.Member(a.Message, "command"))
	return kind == "system" && command == "reboot"
}

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

// firmware gives a device an image. Its tasks are not sent: package rollout moves their rows on, and Begin is only the restart, after
// which the device asks for the image.
type firmware struct{ *api.JobFirmware }

func (f firmware) Name() string { return "firmware" }

func (f firmware) String() string {
	return "firmware " + f.Image[:min(len(f.Image), 12)]
}

func (f firmware) NeedsTools() bool                            { return false }
func (f firmware) Permit(by Rights) ([]string, error)          { return nil, by.Firmware() }
func (f firmware) Judge(by Target) *devices.Error              { return by.Firmware(f.JobFirmware) }
func (f firmware) Begin(on Sender) (devices.ToolResult, error) { return theRestart.Begin(on) }

// Defaults of firmware jobs.
const (
	defaultStay     = "10m"
	defaultTogether = 10 // concurrency
	shareFailed     = "5%"
)

func (f firmware) check(spec *api.JobSpec, g *faults) {
	at := "/action/firmware/"
	if f.Image == "" {
		g.add(at+"image", "is missing; give the SHA-256 of an image, or its first 12 digits")
	}
	oneOf := func(value *string, name, otherwise, other string) {
		*value = cmp.Or(*value, otherwise)
		if *value != otherwise && *value != other {
			g.add(at+name, "must be %s or %s", otherwise, other)
		}
	}
	oneOf(&f.Restart, "restart", "idle", "never")
	oneOf(&f.OnHalt, "on_halt", "stop", "rollback")
	if len(f.Gates) == 0 {
		f.Gates = Gates
	}
	for _, gate := range f.Gates {
		if !slices.Contains(Gates, gate) {
			g.add(at+"gates", "must be some of %s", strings.Join(Gates, ", "))
		}
	}
	f.Stay = cmp.Or(f.Stay, defaultStay)
	span(f.Stay, at+"stay", time.Second, 24*time.Hour, g)
	for _, code := range f.Allow {
		if !slices.Contains(Allowable, code) {
			g.add(at+"allow", "must be some of %s", strings.Join(Allowable, ", "))
		}
	}
	for _, other := range []struct {
		given bool
		name  string
	}{{spec.When != nil && spec.When.Cron != "", "/when/cron"}, {spec.Retry != nil, "/retry"}, {spec.Repeatable, "/repeatable"}, {spec.Busy != "", "/busy"}} {
		if other.given {
			g.add(other.name, "cannot be combined with a firmware image")
		}
	}
	f.paceOf(spec)
}

// paceOf fills in how a rollout begins with one device, goes on with some, and stops by itself.
func (f firmware) paceOf(spec *api.JobSpec) {
	if spec.Pace == nil {
		spec.Pace = &api.JobPace{}
	}
	spec.Pace.Concurrency = cmp.Or(spec.Pace.Concurrency, defaultTogether)
	first := &api.JobStop{Failed: 1}
	switch {
	case f.RollbackOf != "": // what brings devices back does not wait for one of them
	case len(spec.Stages) == 0:
		spec.Stages = []api.JobStage{{OK: api.Amount{Number: 1}, Soak: "30m"}, {OK: api.Amount{Percent: 5}, Soak: "2h"}, {OK: api.Amount{Percent: 100}}}
		fallthrough
	case spec.Stages[0].Stop == nil && spec.Stop == nil:
		if spec.Stages = slices.Clone(spec.Stages); spec.Stop == nil {
			spec.Stages[0].Stop = first
		}
	}
	if spec.Stop == nil {
		spec.Stop = &api.JobStop{Share: shareFailed}
	}
}

// Allowable are the findings of a check that a job may allow.
var Allowable = []string{"project", "layout", "version_too_old", "ota_url"}

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
