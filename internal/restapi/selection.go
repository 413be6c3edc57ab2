package restapi

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/api"
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

// selectionOf writes the selection of a key: as an object of labels where that is equivalent.
func selectionOf(sel selector.Selector) api.Selection {
	text, err := sel.MarshalJSON() // json.Marshal would escape for HTML
	if err != nil {                // a selector of a key marshals
		return api.Selection{Text: sel.String()}
	}
	return api.Selection{Text: sel.String(), JSON: text}
}

// otherValues is the name of the less frequent values of a dimension.
const otherValues = "other"

func newFleetCounts(c devices.Counts) api.FleetCounts {
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
	return api.FleetCounts{Total: c.Total, AsOf: api.At(c.AsOf), State: values("state"), OfflineReason: values("offline_reason"), Transport: values("transport"),
		Board: values("board"), Firmware: values("firmware"), Node: values("node"), MCPState: values("mcp_state")}
}

type selectionEditInput struct {
	Selection
	Body api.SelectionEdit
}

func (s *Server) selectionRoutes() {
	away := []devices.Code{devices.CodeUnavailable}
	register(s, s.operation(http.MethodGet, "/v1/fleet", about{id: "getFleet", scope: access.ScopeRead, tag: tagDevices, summary: "Count devices",
		text:   "Counts of a selection, and those of a key for some devices, may be up to 10 s old. Each dimension has its 200 most frequent values.",
		answer: "How many devices have which values.", codes: away}), s.getFleet)
	register(s, s.operation(http.MethodPatch, "/v1/devices", about{id: "editDevices", scope: access.ScopeWrite, tag: tagDevices, summary: "Change many devices",
		text: "Refused without select; device=* selects all. Devices are changed in groups, each of which is changed as a whole: " +
			"a request that fails in between may be made again.",
		answer: "How many devices it was for.", codes: append(away, devices.CodeTooLarge)}), s.editDevices)
}

func (s *Server) getFleet(ctx context.Context, in *Selection) (*answer[api.FleetCounts], error) {
	sel, err := in.selector()
	if err != nil {
		return nil, err
	}
	by := caller(ctx)
	counts, err := s.opt.Service.Counts(ctx, by, sel)
	if err != nil {
		return nil, err
	}
	pending, contested, err := s.opt.Service.CountsInMemory(ctx, by, sel)
	if err != nil {
		return nil, err
	}
	body := newFleetCounts(counts)
	body.State[string(devices.StatePending)], body.State[string(devices.StateContested)] = pending, contested
	return &answer[api.FleetCounts]{body}, nil
}

func (s *Server) editDevices(ctx context.Context, in *selectionEditInput) (*answer[api.SelectionEdited], error) {
	sel, err := in.selector()
	if err != nil {
		return nil, err
	}
	if sel.IsZero() {
		return nil, badRequest("select is missing: say which devices to change; device=* selects all")
	}
	if len(in.Body.Labels) == 0 && in.Body.TransportWanted == nil {
		return nil, badRequest("the body changes nothing: give labels or transport_wanted")
	}
	edit, changes := editOf(&api.DeviceEdit{Labels: in.Body.Labels, TransportWanted: in.Body.TransportWanted})
	matched, changed, err := s.opt.Service.EditAll(ctx, caller(ctx), sel, edit)
	s.opt.Service.NoteChange(caller(ctx), "edit", "", fmt.Sprintf("select %s: %s: %d matched, %d changed", sel, strings.Join(changes, ", "), matched, changed), err)
	if err != nil {
		p := *s.problem(ctx, err)
		switch {
		case matched == 0:
		case p.Code == string(devices.CodeBadRequest): // it fits some devices, and will not fit the others
			p.Detail = fmt.Sprintf("%s; %d of %s that match were changed, leave the others out of select", p.Detail, changed, count(matched, "device"))
		default:
			p.Detail = fmt.Sprintf("%s; %s changed before that, make the same request again to go on", p.Detail, count(changed, "device"))
		}
		return nil, &p
	}
	return &answer[api.SelectionEdited]{api.SelectionEdited{Matched: matched, Changed: changed}}, nil
}

// count writes a number of things.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprint(n, " ", thing, "s")
}
