package mcpserver

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/finder"
	"fleetd/internal/selector"
)

const maxExamples = 5 // devices listed for each tool in search results

func badArguments(detail string) error {
	return &devices.Error{Code: devices.CodeInvalidArguments, Detail: detail}
}

// wrongArgument describes a decoding error in terms of JSON, not of Go.
func wrongArgument(err error) string {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		return fmt.Sprintf("%s has the wrong type %s", cmp.Or(wrong.Field, "the value"), wrong.Value)
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

// device is one device as models see it.
type device struct {
	ID         string            `json:"id"`
	Name       string            `json:"name,omitempty"`
	State      devices.State     `json:"state"`
	Board      string            `json:"board,omitempty"`
	Firmware   string            `json:"firmware,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Tools      int               `json:"tools"`
	ToolsState string            `json:"tools_state"`
	Transport  string            `json:"transport,omitempty"`
	Node       string            `json:"node,omitempty"`
	LastSeen   string            `json:"last_seen,omitempty"`
	Error      string            `json:"mcp_error,omitempty"`
}

// summary is a device in lists.
type summary struct {
	ID       string            `json:"id"`
	Name     string            `json:"name,omitempty"`
	State    devices.State     `json:"state"`
	Labels   map[string]string `json:"labels,omitempty"`
	Board    string            `json:"board,omitempty"`
	LastSeen string            `json:"last_seen,omitempty"` // of a device that is not connected
}

func summarize(v devices.View) summary {
	b := summary{ID: string(v.Device.ID), Name: cleantext.Short(v.Device.Name, maxTitle), State: v.State, Labels: v.Device.Labels, Board: cleantext.Short(v.Device.Board, maxTitle)}
	if p := v.Presence; !p.Online && !p.LastSeen.IsZero() {
		b.LastSeen = p.LastSeen.UTC().Format(time.RFC3339)
	}
	return b
}

func describe(v devices.View) device {
	d := device{ID: string(v.Device.ID), Name: cleantext.Short(v.Device.Name, maxTitle), State: v.State, Board: cleantext.Short(v.Device.Board, maxTitle),
		Firmware: cleantext.Short(v.Device.Firmware, maxTitle), Labels: v.Device.Labels, Tools: v.Presence.Tools, ToolsState: string(v.CatalogState),
		Transport: string(v.Presence.Transport), Node: v.Presence.Node, Error: cleantext.Short(v.Presence.MCPError, maxWord)}
	switch {
	case v.Presence.Online:
		d.LastSeen = clock.Now().Format(time.RFC3339)
	case !v.Presence.LastSeen.IsZero():
		d.LastSeen = v.Presence.LastSeen.UTC().Format(time.RFC3339)
	}
	return d
}

// The number of the core's list pages that one search reads. Pages may be short or
// empty, with more to follow.
const (
	fewPages = 10
	allPages = math.MaxInt
)

// find lists at most q.Limit devices that a caller may see, from at most the given
// number of the core's pages. next is the cursor of the next page, empty at the end.
func (s *Server) find(ctx context.Context, by access.Principal, q devices.ListQuery, pages int) (found []devices.View, next string, err error) {
	if err := s.opt.Service.Permit(ctx, by, access.ScopeRead, ""); err != nil {
		return nil, "", err
	}
	q.Select, q.Members = selector.And(by.Caller.Devices, q.Select), by.Caller.NeedsLabels()
	limit := q.Limit
	for page := 0; page < pages && len(found) < limit; page++ {
		q.Limit = limit - len(found)
		views, next, err := s.opt.Service.List(ctx, q)
		if err != nil {
			return nil, "", err
		}
		found = append(found, views...)
		if q.After = next; next == "" {
			break
		}
	}
	return found, q.After, nil
}

type findArgs struct {
	Query  string `json:"query"`
	State  string `json:"state"`
	Select string `json:"select"`
	Limit  int    `json:"limit"`
	Cursor string `json:"cursor"`
}

// selector returns the selector of all filters.
func (a *findArgs) selector() (sel selector.Selector, err error) {
	if sel, err = selector.Parse(a.Select); err == nil && a.State != "" {
		sel = selector.And(sel, selector.In(selector.FieldState, a.State))
	}
	return sel, err
}

// listed is the result of find_devices.
type findResult struct {
	Devices []summary           `json:"devices"`
	Matched int                 `json:"matched,omitempty"`
	Weaker  int                 `json:"weaker,omitempty"`
	ReadAs  map[string]string   `json:"read_as,omitempty"`
	Unknown []string            `json:"unknown_words,omitempty"`
	Counts  map[string]int      `json:"devices_by_word,omitempty"`
	Total   int                 `json:"total,omitempty"`
	Labels  map[string][]string `json:"labels,omitempty"`
	Next    string              `json:"next_cursor,omitempty"`
}

func (s *Server) findDevices(ctx context.Context, _ *mcp.CallToolRequest, args findArgs) (*mcp.CallToolResult, error) {
	limit := cmp.Or(args.Limit, 20)
	sel, err := args.selector()
	if err != nil {
		return nil, badArguments(err.Error())
	}
	by := requestInfoOf(ctx).by()
	list := fmt.Sprintf("find_devices %q %q %q", args.Query, args.State, args.Select)
	place, err := s.place(list, args.Cursor)
	if err != nil {
		return nil, badArguments(devices.ErrCursor.Error())
	}
	var answer findResult
	var views []devices.View
	if strings.TrimSpace(args.Query) == "" {
		if views, answer.Next, err = s.find(ctx, by, devices.ListQuery{Select: sel, After: place, Limit: limit}, fewPages); err != nil {
			return nil, err
		}
	} else {
		found, err := s.search(ctx, by, args.Query, sel, place, limit)
		if err != nil {
			return nil, err
		}
		views, answer.Next = found.devices, found.next
		answer.Weaker, answer.ReadAs, answer.Unknown, answer.Counts = found.Weaker, found.ReadAs, found.Unknown, found.Counts
		if answer.Next != "" {
			answer.Matched = len(found.Found)
		}
	}
	answer.Next = s.cursor(list, answer.Next)
	answer.Devices = make([]summary, len(views))
	for i := range views {
		answer.Devices[i] = summarize(views[i])
	}
	if len(views) == 0 && answer.Next == "" {
		if err := s.describeFleet(ctx, by, &answer); err != nil {
			return nil, err
		}
	}
	return structured(answer), nil
}

// describeFleet adds to an empty result the number of devices, and their labels.
func (s *Server) describeFleet(ctx context.Context, by access.Principal, answer *findResult) error {
	index, err := s.wordIndex.keeper.Index(ctx)
	if errors.Is(err, finder.ErrTooMany) {
		return nil
	}
	if err != nil {
		return err
	}
	labels, total := index.Labels(visibleTo(by), maxKeys, maxValues)
	answer.Total, answer.Labels = total, map[string][]string{}
	for _, l := range labels {
		for _, value := range l.Values {
			answer.Labels[l.Key] = append(answer.Labels[l.Key], cleantext.Short(value, maxTitle))
		}
		if l.More {
			answer.Labels[l.Key] = append(answer.Labels[l.Key], "...")
		}
	}
	return nil
}

// toolInfo is one tool as models see it.
type toolInfo struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	InputSchema json.RawMessage `json:"input_schema,omitempty"`
	Confirm     bool            `json:"needs_confirmation,omitempty"`
}

type toolList struct {
	Device device     `json:"device"`
	Tools  []toolInfo `json:"tools"`
	More   bool       `json:"more,omitempty"`
}

func infoOf(t *indexedTool) toolInfo {
	name := t.name
	if cleantext.Short(name, maxTitle) != name { // the name cannot be shown; use the one for hosts
		name = t.tool.Name
	}
	input, _ := t.tool.InputSchema.(json.RawMessage)
	return toolInfo{Name: name, Description: t.tool.Description, InputSchema: input}
}

// toolsOf lists at most limit tools, best matches of the query first. Tools without a
// match are left out, unless none matches.
func toolsOf(v *view, query string, limit int) toolList {
	list := toolList{Device: describe(v.device), Tools: []toolInfo{}}
	tools := slices.Clone(v.tools)
	rank := finder.Rank(query)
	fit := make(map[*indexedTool]int, len(tools))
	for _, t := range tools {
		if n := rank(t.name, t.tool.Description); n > 0 {
			fit[t.indexedTool] = n
		}
	}
	if len(fit) > 0 {
		tools = slices.DeleteFunc(tools, func(t viewedTool) bool { return fit[t.indexedTool] == 0 })
		slices.SortStableFunc(tools, func(a, b viewedTool) int { return fit[b.indexedTool] - fit[a.indexedTool] })
	}
	for _, t := range tools {
		if len(list.Tools) == limit {
			list.More = true
			break
		}
		info := infoOf(t.indexedTool)
		info.Confirm = t.confirm
		list.Tools = append(list.Tools, info)
	}
	return list
}

type describeArgs struct {
	Device string `json:"device"`
	Query  string `json:"query"`
	Limit  int    `json:"limit"`
}

func (s *Server) describeDevice(ctx context.Context, _ *mcp.CallToolRequest, args describeArgs) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	view, err := s.namedView(ctx, by, args.Device)
	if err != nil {
		return nil, err
	}
	return structured(toolsOf(view, args.Query, cmp.Or(args.Limit, 50))), nil
}

type searchArgs struct {
	Query string `json:"query"`
	Limit int    `json:"limit"`
}

// foundTool is a tool definition that one or more devices have.
type foundTool struct {
	toolInfo
	Count   int          `json:"device_count"`
	Devices []devices.ID `json:"devices"`
}

func (s *Server) searchTools(ctx context.Context, _ *mcp.CallToolRequest, args searchArgs) (*mcp.CallToolResult, error) {
	if strings.TrimSpace(args.Query) == "" {
		return nil, badArguments("query must have a word")
	}
	by := requestInfoOf(ctx).by()
	if err := s.opt.Service.Permit(ctx, by, access.ScopeRead, ""); err != nil {
		return nil, err
	}
	matches, err := s.opt.Service.SearchTools(ctx, by, args.Query, cmp.Or(args.Limit, 10), maxExamples)
	if err != nil {
		return nil, err
	}
	answer := struct {
		Tools []foundTool `json:"tools"`
	}{[]foundTool{}}
	for _, m := range matches {
		info := infoOf(&indexedTool{name: m.Tool.Name, tool: newTool(m.Tool, func() {})})
		if cleantext.Short(m.Tool.Name, maxTitle) != m.Tool.Name {
			info.Name = hashedName(hostName(m.Tool.Name), m.Tool.Name) // describe_device has the name to call
		}
		answer.Tools = append(answer.Tools, foundTool{info, m.Count, m.Devices})
	}
	return structured(answer), nil
}
