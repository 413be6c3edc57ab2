package restapi

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
)

// Selection is the parameter that selects devices.
type Selection struct {
	Select string `query:"select" example:"room=lab,firmware<2.4.2" doc:"Selects devices: terms joined by commas, all of which must hold. room=lab, room!=lab, room in (a,b), room, !room for labels and the fields device, name, board, chip, firmware, elf, transport, state, node, reason, tool; firmware<2.4.2; seen>2h; * in a value stands for any characters."`
}

func (in *Selection) selector() (selector.Selector, error) { return parseSelect(in.Select) }

// parseSelect reads the text of a selection. A mistake is named with its position.
func parseSelect(text string) (selector.Selector, error) {
	sel, err := selector.Parse(text)
	if err != nil {
		return sel, badRequest("select: " + err.Error())
	}
	return sel, nil
}

// fleetCounts are the numbers of devices by their values.
type fleetCounts struct {
	Total         int64            `json:"total" doc:"Devices that are known. Those that wait for their first approval are not among them."`
	AsOf          stamp            `json:"as_of" doc:"When they were counted."`
	State         map[string]int64 `json:"state" doc:"online and offline make up the total. revoked, pending and contested are counted beside these; pending includes devices that were never members."`
	OfflineReason map[string]int64 `json:"offline_reason" doc:"Of the devices that are offline. As in all members below, other has the number of devices with any less frequent value, and an empty name that of those without one."`
	Transport     map[string]int64 `json:"transport" doc:"Of the devices that are online."`
	Board         map[string]int64 `json:"board"`
	Firmware      map[string]int64 `json:"firmware"`
	Node          map[string]int64 `json:"node" doc:"Of the devices that are online."`
	MCPState      map[string]int64 `json:"mcp_state"`
}

// otherValues is the name of the less frequent values of a dimension.
const otherValues = "other"

func newFleetCounts(c devices.Counts) fleetCounts {
	values := func(dimension string) map[string]int64 {
		d := c.Dimensions[dimension]
		out := make(map[string]int64, len(d.Top)+1)
		for _, one := range d.Top {
			out[one.Value] += one.N
		}
		if d.Other > 0 {
			out[otherValues] += d.Other
		}
		return out
	}
	return fleetCounts{Total: c.Total, AsOf: stamp(c.AsOf), State: values("state"), OfflineReason: values("offline_reason"), Transport: values("transport"),
		Board: values("board"), Firmware: values("firmware"), Node: values("node"), MCPState: values("mcp_state")}
}

type selectionEditInput struct {
	Selection
	Body selectionEdit
}

// selectionEdit is what an operator may write on many devices.
type selectionEdit struct {
	Labels    map[string]*string `json:"labels,omitempty" doc:"Merged into the labels of each device; null removes one."`
	Transport *string            `json:"transport,omitempty" enum:"websocket,mqtt," doc:"What the devices are offered at their next boot; empty for the node's default."`
}

// selectionEdited says how many devices an edit was for, and how many it changed.
type selectionEdited struct {
	Matched int `json:"matched" doc:"Devices that the selection selects and the key is for."`
	Changed int `json:"changed" doc:"Those of them that are different now."`
}

func (s *Server) selectionRoutes() {
	away := []devices.Code{devices.CodeUnavailable}
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/fleet", about{id: "getFleet", scope: access.ScopeRead, tag: tagDevices, summary: "Count devices",
		text:   "Counts of a selection, and those of a key for some devices, may be up to 10 s old. Each dimension has its 200 most frequent values.",
		answer: "How many devices have which values.", codes: away}), s.getFleet)
	huma.Register(s.api, s.operation(http.MethodPatch, "/v1/devices", about{id: "editDevices", scope: access.ScopeWrite, tag: tagDevices, summary: "Change many devices",
		text: "Refused without select; device=* selects all. Devices are changed in groups, each of which is changed as a whole: " +
			"a request that fails in between may be made again.",
		answer: "How many devices it was for.", codes: append(away, devices.CodeTooLarge)}), s.editDevices)
}

func (s *Server) getFleet(ctx context.Context, in *Selection) (*answer[fleetCounts], error) {
	sel, err := in.selector()
	if err != nil {
		return nil, err
	}
	by := caller(ctx)
	counts, err := s.opt.Service.Counts(ctx, by, sel)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	pending, contested, err := s.opt.Service.CountsInMemory(ctx, by, sel)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	body := newFleetCounts(counts)
	body.State[string(devices.StatePending)], body.State[string(devices.StateContested)] = pending, contested
	return &answer[fleetCounts]{body}, nil
}

func (s *Server) editDevices(ctx context.Context, in *selectionEditInput) (*answer[selectionEdited], error) {
	sel, err := in.selector()
	if err != nil {
		return nil, err
	}
	if sel.IsZero() {
		return nil, badRequest("select is missing: say which devices to change; device=* selects all")
	}
	if len(in.Body.Labels) == 0 && in.Body.Transport == nil {
		return nil, badRequest("the body changes nothing: give labels or transport")
	}
	edit, changes := (&deviceEdit{Transport: in.Body.Transport}).edit()
	if edit.Merge = in.Body.Labels; len(edit.Merge) > 0 {
		changes = slices.Insert(changes, 0, "labels "+labelText(edit.Merge))
	}
	matched, changed, err := s.opt.Service.EditAll(ctx, caller(ctx), sel, edit)
	s.opt.Service.NoteChange(caller(ctx), "edit", "", fmt.Sprintf("select %s: %s: %d matched, %d changed", sel, strings.Join(changes, ", "), matched, changed), err)
	if err != nil {
		p := *s.problem(ctx, err)
		if matched > 0 {
			p.Detail = fmt.Sprintf("%s; %s changed before that, make the same request again to go on", p.Detail, count(changed, "device"))
		}
		return nil, &p
	}
	return &answer[selectionEdited]{selectionEdited{matched, changed}}, nil
}

// count writes a number of things.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprint(n, " ", thing, "s")
}
