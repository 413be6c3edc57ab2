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
	"fleetd/internal/devices"
	"fleetd/internal/finder"
	"fleetd/internal/selector"
)

const maxExamples = 5 // devices named with a tool that was found

func badArguments(detail string) error {
	return &devices.Error{Code: devices.CodeInvalidArguments, Detail: detail}
}

// wrongArgument says what a decoder found in the words of JSON, not of Go.
func wrongArgument(err error) string {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		return fmt.Sprintf("%s is of the type %s, which it must not be", cmp.Or(wrong.Field, "the whole"), wrong.Value)
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

// within returns n, or absent if it is zero; it fails outside 1 to most.
func within(name string, n, absent, most int) (int, error) {
	switch {
	case n == 0:
		return absent, nil
	case n < 0 || n > most:
		return 0, badArguments(name + " is out of its range")
	}
	return n, nil
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

// brief is a device as lists show it: what tells it from others.
type brief struct {
	ID       string            `json:"id"`
	Name     string            `json:"name,omitempty"`
	State    devices.State     `json:"state"`
	Labels   map[string]string `json:"labels,omitempty"`
	Board    string            `json:"board,omitempty"`
	LastSeen string            `json:"last_seen,omitempty"` // of one that is not connected
}

func briefly(v devices.View) brief {
	b := brief{ID: string(v.Device.ID), Name: clean(v.Device.Name, maxTitle), State: v.State, Labels: v.Device.Labels, Board: clean(v.Device.Board, maxTitle)}
	if p := v.Presence; !p.Online && !p.LastSeen.IsZero() {
		b.LastSeen = p.LastSeen.UTC().Format(time.RFC3339)
	}
	return b
}

func describe(v devices.View) device {
	d := device{ID: string(v.Device.ID), Name: clean(v.Device.Name, maxTitle), State: v.State, Board: clean(v.Device.Board, maxTitle),
		Firmware: clean(v.Device.Firmware, maxTitle), Labels: v.Device.Labels, Tools: v.Presence.Tools, ToolsState: string(v.CatalogState),
		Transport: string(v.Presence.Transport), Node: v.Presence.Node, Error: clean(v.Presence.MCPError, maxWord)}
	switch {
	case v.Presence.Online:
		d.LastSeen = time.Now().UTC().Format(time.RFC3339)
	case !v.Presence.LastSeen.IsZero():
		d.LastSeen = v.Presence.LastSeen.UTC().Format(time.RFC3339)
	}
	return d
}

// How many pages of the core's one list may take. They may be short, or empty, and
// have others after them.
const (
	fewPages = 10
	allPages = math.MaxInt
)

// find lists the devices that a caller may see, at most q.Limit, from at most so
// many pages of the core's. next is the cursor of what follows, empty at the end.
func (s *Server) find(ctx context.Context, by access.By, q devices.ListQuery, pages int) (found []devices.View, next string, err error) {
	if err := s.opt.Service.Permit(ctx, by, access.ScopeRead, ""); err != nil {
		return nil, "", err
	}
	q.Select, q.Members = selector.And(by.Who.Devices, q.Select), by.Who.NeedsLabels()
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

// selector is what the filters select.
func (a *findArgs) selector() (sel selector.Selector, err error) {
	if sel, err = selector.Parse(a.Select); err == nil && a.State != "" {
		sel = selector.And(sel, selector.In(selector.FieldState, a.State))
	}
	return sel, err
}

// listed is an answer of find_devices.
type listed struct {
	Devices []brief             `json:"devices"`
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
	limit, err := within("limit", args.Limit, 20, 100)
	if err != nil {
		return nil, err
	}
	if args.State != "" && !slices.Contains([]string{"online", "offline", "pending", "contested"}, args.State) {
		return nil, badArguments("state is one of online, offline, pending, contested")
	}
	sel, err := args.selector()
	if err != nil {
		return nil, badArguments(err.Error())
	}
	by := visitOf(ctx).by()
	var answer listed
	var views []devices.View
	if strings.TrimSpace(args.Query) == "" {
		if _, err := devices.ParseCursor(args.Cursor, devices.SortID); err != nil {
			return nil, badArguments(err.Error())
		}
		if views, answer.Next, err = s.find(ctx, by, devices.ListQuery{Select: sel, After: args.Cursor, Limit: limit}, fewPages); err != nil {
			return nil, err
		}
	} else {
		found, err := s.search(ctx, by, args.Query, sel, args.Cursor, limit)
		if err != nil {
			return nil, err
		}
		views, answer.Next = found.devices, found.next
		answer.Weaker, answer.ReadAs, answer.Unknown, answer.Counts = found.Weaker, found.ReadAs, found.Unknown, found.Counts
		if answer.Next != "" {
			answer.Matched = len(found.Found)
		}
	}
	answer.Devices = make([]brief, len(views))
	for i := range views {
		answer.Devices[i] = briefly(views[i])
	}
	if len(views) == 0 && answer.Next == "" {
		if err := s.sayWhatThereIs(ctx, by, &answer); err != nil {
			return nil, err
		}
	}
	return structured(answer), nil
}

// sayWhatThereIs puts into an empty answer how many devices there are, and which
// labels they have.
func (s *Server) sayWhatThereIs(ctx context.Context, by access.By, answer *listed) error {
	index, err := s.words.keeper.Index(ctx)
	if errors.Is(err, finder.ErrTooMany) {
		return nil
	}
	if err != nil {
		return err
	}
	labels, total := index.Labels(sees(by), maxKeys, maxValues)
	answer.Total, answer.Labels = total, map[string][]string{}
	for _, l := range labels {
		for _, value := range l.Values {
			answer.Labels[l.Key] = append(answer.Labels[l.Key], clean(value, maxTitle))
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

func infoOf(t *indexed) toolInfo {
	name := t.name
	if clean(name, maxTitle) != name { // it cannot be shown, but has another one
		name = t.tool.Name
	}
	input, _ := t.tool.InputSchema.(json.RawMessage)
	return toolInfo{Name: name, Description: t.tool.Description, InputSchema: input}
}

// toolsOf lists tools, at most limit: those that fit the words of a query best come
// first, those that have none of them not at all, unless all of them have none.
func toolsOf(v *view, query string, limit int) toolList {
	list := toolList{Device: describe(v.device), Tools: []toolInfo{}}
	tools := slices.Clone(v.tools)
	rank := finder.Rank(query)
	fit := make(map[*indexed]int, len(tools))
	for _, t := range tools {
		if n := rank(t.name, t.tool.Description); n > 0 {
			fit[t.indexed] = n
		}
	}
	if len(fit) > 0 {
		tools = slices.DeleteFunc(tools, func(t viewed) bool { return fit[t.indexed] == 0 })
		slices.SortStableFunc(tools, func(a, b viewed) int { return fit[b.indexed] - fit[a.indexed] })
	}
	for _, t := range tools {
		if len(list.Tools) == limit {
			list.More = true
			break
		}
		info := infoOf(t.indexed)
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
	limit, err := within("limit", args.Limit, 50, 100)
	if err != nil {
		return nil, err
	}
	by := visitOf(ctx).by()
	id, err := s.deviceOf(ctx, by, args.Device)
	if err != nil {
		return nil, err
	}
	view, err := s.viewOf(ctx, by, id)
	if err != nil {
		return nil, err
	}
	return structured(toolsOf(view, args.Query, limit)), nil
}

type searchArgs struct {
	Query string `json:"query"`
	Limit int    `json:"limit"`
}

// foundTool is a tool that devices have in the same words.
type foundTool struct {
	toolInfo
	Count   int          `json:"device_count"`
	Devices []devices.ID `json:"devices"`
}

func (s *Server) searchTools(ctx context.Context, _ *mcp.CallToolRequest, args searchArgs) (*mcp.CallToolResult, error) {
	limit, err := within("limit", args.Limit, 10, 50)
	if err != nil {
		return nil, err
	}
	if strings.TrimSpace(args.Query) == "" || len(args.Query) > 100 {
		return nil, badArguments("query needs 1 to 100 bytes")
	}
	by := visitOf(ctx).by()
	if err := s.opt.Service.Permit(ctx, by, access.ScopeRead, ""); err != nil {
		return nil, err
	}
	matches, err := s.opt.Service.SearchTools(ctx, by, args.Query, limit, maxExamples)
	if err != nil {
		return nil, err
	}
	answer := struct {
		Tools []foundTool `json:"tools"`
	}{[]foundTool{}}
	for _, m := range matches {
		info := infoOf(&indexed{name: m.Tool.Name, tool: newTool(m.Tool, func() {})})
		if clean(m.Tool.Name, maxTitle) != m.Tool.Name {
			info.Name = hashedName(hostName(m.Tool.Name), m.Tool.Name) // describe_device tells how it is called
		}
		answer.Tools = append(answer.Tools, foundTool{info, m.Count, m.Devices})
	}
	return structured(answer), nil
}
