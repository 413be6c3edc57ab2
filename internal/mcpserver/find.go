package mcpserver

import (
	"cmp"
	"context"
	"crypto/sha256"
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

// errStopping refuses what a stopping node no longer begins, and errCancelled ends what had begun when the caller gave up.
func errStopping() error {
	return &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "this node is stopping; send the request to another node"}
}

func errCancelled() error {
	return &devices.Error{Code: devices.CodeDeviceTimeout, Detail: "the caller cancelled the request", Sent: true, Outcome: devices.OutcomeUnknown}
}

// wrongArgument describes a decoding error in terms of JSON, not of Go.
func wrongArgument(err error) string {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Sprintf("%s has the wrong type %s", cmp.Or(wrong.Field, "the value"), wrong.Value)
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

// device is one device as models see it.
type device struct {
	ID         string            `json:"id"`
	Name       string            `json:"name,omitempty"`
	State      devices.State     `json:"state"`
	Labels     map[string]string `json:"labels,omitempty"`
	Tools      int               `json:"tools"`
	ToolsState string            `json:"tools_state"`
	Transport  string            `json:"transport,omitempty"`
	Node       string            `json:"node,omitempty"`
	LastSeen   string            `json:"last_seen,omitempty"`
	Said       deviceSaid        `json:"said_by_device"`
}

// deviceSaid has the texts of a device about itself: data to judge, never instructions.
type deviceSaid struct {
	Board    string `json:"board,omitempty"`
	Firmware string `json:"firmware,omitempty"`
	Error    string `json:"mcp_error,omitempty"`
}

// summary is a device in lists.
type summary struct {
	ID       string            `json:"id"`
	Name     string            `json:"name,omitempty"`
	Exact    bool              `json:"exact,omitempty"`   // it has exactly the name that was asked for
	Missing  []string          `json:"missing,omitempty"` // words of the query that it does not have
	State    devices.State     `json:"state"`
	Labels   map[string]string `json:"labels,omitempty"`
	LastSeen string            `json:"last_seen,omitempty"` // of a device that is not connected
	Tool     *toolInfo         `json:"tool,omitempty"`      // that fits best
}

func summarize(v devices.View) summary {
	b := summary{ID: string(v.Device.ID), Name: cleantext.Short(v.Device.Name, maxTitle), State: v.State, Labels: v.Device.Labels}
	if p := v.Presence; !p.Online && !p.LastSeen.IsZero() {
		b.LastSeen = p.LastSeen.UTC().Format(time.RFC3339)
	}
	return b
}

func describe(v devices.View) device {
	d := device{ID: string(v.Device.ID), Name: cleantext.Short(v.Device.Name, maxTitle), State: v.State, Labels: v.Device.Labels, Tools: v.Presence.Tools,
		ToolsState: string(v.CatalogState), Transport: string(v.Presence.Transport), Node: v.Presence.Node,
		Said: deviceSaid{cleantext.Short(v.Device.Board, maxTitle), cleantext.Short(v.Device.Firmware, maxTitle), cleantext.Short(v.Presence.MCPError, maxWord)}}
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
	Do     string `json:"do"`
	State  string `json:"state"`
	Select string `json:"select"`
	Limit  int    `json:"limit"`
	Cursor string `json:"cursor"`
}

// selector returns the selector of all filters.
func (a *findArgs) selector() (sel selector.Selector, err error) {
	if sel, err = selectorOf(a.Select); err == nil && a.State != "" {
		sel = selector.And(sel, selector.In(selector.FieldState, a.State))
	}
	return sel, err
}

// readState takes a state out of the query, unless a filter has one, and returns the word.
func (a *findArgs) readState() (word string) {
	if a.State != "" {
		return ""
	}
	words := strings.Fields(a.Query)
	for i, word := range words {
		state := strings.ToLower(strings.Trim(word, ".,;:!?"))
		if state == string(devices.StateOnline) || state == string(devices.StateOffline) {
			a.State, a.Query = state, strings.Join(slices.Delete(words, i, i+1), " ")
			return word
		}
	}
	return ""
}

// maxPartial is how many devices a result has that lack a word of the query, if no limit is asked for.
const maxPartial = 5

// findResult is the result of find_devices.
type findResult struct {
	Devices []summary           `json:"devices"`
	Matched int                 `json:"matched,omitempty"`
	Partial bool                `json:"partial,omitempty"` // no device has all words; see missing
	Hint    string              `json:"hint,omitempty"`
	Weaker  int                 `json:"weaker,omitempty"`
	Unable  int                 `json:"without_such_tool,omitempty"`
	ReadAs  map[string]string   `json:"read_as,omitempty"`
	OfTools []string            `json:"words_of_tools_only,omitempty"`
	Unknown []string            `json:"unknown_words,omitempty"`
	Total   int                 `json:"total,omitempty"`
	Labels  map[string][]string `json:"labels,omitempty"`
	Next    string              `json:"next_cursor,omitempty"`
}

func (s *Server) findDevices(ctx context.Context, _ *mcp.CallToolRequest, args findArgs) (*mcp.CallToolResult, error) {
	limit, stateWord := cmp.Or(args.Limit, 20), args.readState()
	sel, err := args.selector()
	if err != nil {
		return nil, err
	}
	by := requestInfoOf(ctx).by()
	list := fmt.Sprintf("find_devices %q %q %q %q", args.Query, args.Do, args.State, args.Select)
	place, err := s.place(list, args.Cursor)
	if err != nil {
		return nil, badArguments(devices.ErrCursor.Error())
	}
	var answer findResult
	var found searchResult
	if strings.TrimSpace(args.Query) != "" {
		if found, err = s.search(ctx, by, &args, sel, place, limit); err != nil {
			return nil, err
		}
		answer.Weaker, answer.Unable, answer.ReadAs, answer.Unknown, answer.OfTools = found.Weaker, found.Unable, found.ReadAs, found.Unknown, found.OfTools
		answer.Partial = len(found.Found) > 0 && len(found.Found[0].Missing) > 0
		if found.next != "" || answer.Partial {
			answer.Matched = len(found.Found)
		}
		if answer.Partial {
			answer.Hint = "no device has all words of the query: say so, or ask, before anything is done with these"
			found.devices, found.next = found.devices[:min(len(found.devices), cmp.Or(args.Limit, maxPartial))], ""
		}
	}
	if strings.TrimSpace(args.Query) == "" || found.Blank {
		if found.devices, found.next, err = s.find(ctx, by, devices.ListQuery{Select: sel, After: place, Limit: limit}, fewPages); err != nil {
			return nil, err
		}
	}
	if stateWord != "" {
		if answer.ReadAs == nil {
			answer.ReadAs = map[string]string{}
		}
		answer.ReadAs[stateWord] = "state=" + args.State
	}
	answer.Next = s.cursor(list, found.next)
	answer.Devices = make([]summary, len(found.devices))
	fitting := newFitting(args.Do)
	for i, v := range found.devices {
		d := &answer.Devices[i]
		*d = summarize(v)
		if m := found.matches[string(v.Device.ID)]; m != nil {
			d.Exact = m.Exact
			for _, word := range m.Missing {
				d.Missing = append(d.Missing, cleantext.Short(word, maxTitle))
			}
		}
		if args.Do != "" {
			view, err := s.viewOn(ctx, by, v)
			if err != nil {
				return nil, err
			}
			d.Tool = fitting.best(view)
		}
	}
	if len(found.devices) == 0 && answer.Next == "" {
		if err := s.describeFleet(ctx, by, &answer); err != nil {
			return nil, err
		}
	}
	return structured(answer), nil
}

// fitting looks for the tool of each device that fits best. Devices share lists of tools, so each tool is judged once.
type fitting struct {
	rank  func(name, text string) int
	ranks map[*indexedTool]int
	shown map[[sha256.Size]byte]bool
}

func newFitting(do string) *fitting {
	return &fitting{finder.Rank(do), map[*indexedTool]int{}, map[[sha256.Size]byte]bool{}}
}

func (f *fitting) rankOf(t *indexedTool) int {
	n, known := f.ranks[t]
	if !known {
		n = f.rank(t.name, t.tool.Description)
		f.ranks[t] = n
	}
	return n
}

// maxRepeated is the size of a schema, in bytes, up to which each device that has the tool shows it; a larger one is shown once.
const maxRepeated = 256

// best returns the tool that fits best, nil if none fits.
func (f *fitting) best(v *view) *toolInfo {
	var best viewedTool
	fit := 0
	for _, t := range v.tools {
		if n := f.rankOf(t.indexedTool); n > fit {
			best, fit = t, n
		}
	}
	if fit == 0 {
		return nil
	}
	info := infoOf(best.indexedTool)
	info.Description, info.Confirm = "", best.confirm
	if len(info.InputSchema) > maxRepeated && f.shown[best.sum] {
		info.InputSchema = nil
	}
	f.shown[best.sum] = true
	return &info
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
	Description string          `json:"said_by_device,omitempty"`
	InputSchema json.RawMessage `json:"input_schema,omitempty"`
	Confirm     bool            `json:"needs_confirmation,omitempty"`
}

type toolList struct {
	Device device     `json:"device"`
	Tools  []toolInfo `json:"tools"`
	Others []string   `json:"other_tools,omitempty"`
	More   bool       `json:"more,omitempty"`
}

func infoOf(t *indexedTool) toolInfo {
	name := t.name
	if cleantext.Short(name, maxTitle) != name { // the name cannot be shown; use the one for hosts
		name = t.tool.Name
	}
	input, _ := t.tool.InputSchema.(json.RawMessage)
	return toolInfo{Name: name, Description: strings.TrimPrefix(t.tool.Description, untrustedMark), InputSchema: input}
}

// Limits of describe_device.
const (
	maxDescribed = 10  // tools with their schemas
	maxNamed     = 100 // others by name
)

// toolsOf lists the tools, best matches of the query first: so many with their schemas, the others by name.
func toolsOf(v *view, query string, described int) toolList {
	list := toolList{Device: describe(v.device), Tools: []toolInfo{}}
	tools, fitting := slices.Clone(v.tools), newFitting(query)
	slices.SortStableFunc(tools, func(a, b viewedTool) int { return fitting.rankOf(b.indexedTool) - fitting.rankOf(a.indexedTool) })
	for i, t := range tools {
		info := infoOf(t.indexedTool)
		info.Confirm = t.confirm
		switch {
		case i < described:
			list.Tools = append(list.Tools, info)
		case i < described+maxNamed:
			list.Others = append(list.Others, info.Name)
		default:
			list.More = true
		}
	}
	return list
}

type describeArgs struct {
	Device string `json:"device"`
	Query  string `json:"query"`
}

func (s *Server) describeDevice(ctx context.Context, _ *mcp.CallToolRequest, args describeArgs) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	view, err := s.namedView(ctx, by, args.Device)
	if err != nil {
		return nil, err
	}
	return structured(toolsOf(view, args.Query, maxDescribed)), nil
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
	matches, err := s.opt.Service.SearchTools(ctx, by, finder.Rank(args.Query), cmp.Or(args.Limit, 10), maxExamples)
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
