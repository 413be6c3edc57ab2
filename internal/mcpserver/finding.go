package mcpserver

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/devices"
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

func describe(v devices.View) device {
	d := device{ID: string(v.Device.ID), Name: clean(v.Device.Name, maxTitle), State: v.State, Board: clean(v.Device.Board, maxTitle),
		Firmware: clean(v.Device.Firmware, maxTitle), Labels: v.Device.Labels, Tools: v.Presence.Tools, ToolsState: string(v.CatalogState),
		Transport: string(v.Presence.Transport), Node: v.Presence.Node, Error: clean(v.Presence.MCPError, maxWord)}
	if !v.Presence.LastSeen.IsZero() {
		d.LastSeen = v.Presence.LastSeen.UTC().Format(time.RFC3339)
	}
	return d
}

// find lists the devices that a caller may see. next is where the page after
// begins; empty on the last one.
func (s *Server) find(ctx context.Context, by access.By, q devices.Query) (found []devices.View, next string, err error) {
	if err := s.opt.Service.Permit(by, access.ScopeRead, ""); err != nil {
		return nil, "", err
	}
	q.Selector = by.Who.Devices
	found, more, err := s.opt.Service.List(ctx, q)
	if err != nil {
		return nil, "", err
	}
	if more && len(found) > 0 {
		next = string(found[len(found)-1].Device.ID)
	}
	return found, next, nil
}

type findArgs struct {
	Query    string `json:"query"`
	State    string `json:"state"`
	Board    string `json:"board"`
	Firmware string `json:"firmware"`
	Label    string `json:"label"`
	Limit    int    `json:"limit"`
	Cursor   string `json:"cursor"`
}

func (s *Server) findDevices(ctx context.Context, _ *mcp.CallToolRequest, args findArgs) (*mcp.CallToolResult, error) {
	limit, err := within("limit", args.Limit, 20, 100)
	if err != nil {
		return nil, err
	}
	if args.State != "" && !slices.Contains([]string{"online", "offline", "pending", "contested"}, args.State) {
		return nil, badArguments("state is one of online, offline, pending, contested")
	}
	after, err := base64.RawURLEncoding.DecodeString(args.Cursor)
	if err != nil {
		return nil, badArguments("cursor is none of ours: give next_cursor of the page before, or leave it out")
	}
	found, next, err := s.find(ctx, visitOf(ctx).by(), devices.Query{State: args.State, Board: args.Board, Firmware: args.Firmware, Label: args.Label,
		Text: args.Query, After: devices.ID(after), Limit: limit})
	if err != nil {
		return nil, err
	}
	answer := struct {
		Devices []device `json:"devices"`
		Next    string   `json:"next_cursor,omitempty"`
	}{[]device{}, base64.RawURLEncoding.EncodeToString([]byte(next))}
	for _, d := range found {
		answer.Devices = append(answer.Devices, describe(d))
	}
	return structured(answer), nil
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

// toolsOf lists tools with these words, at most limit.
func toolsOf(v *view, query string, limit int) toolList {
	list := toolList{Device: describe(v.device), Tools: []toolInfo{}}
	words := strings.Fields(strings.ToLower(query))
	for _, t := range v.tools {
		text := strings.ToLower(t.name + " " + t.tool.Description)
		if slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) }) {
			continue
		}
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
	id, err := deviceID(args.Device)
	if err != nil {
		return nil, err
	}
	view, err := s.viewOf(ctx, visitOf(ctx).by(), id)
	if err != nil {
		return nil, err
	}
	return structured(toolsOf(view, args.Query, limit)), nil
}

func deviceID(text string) (devices.ID, error) {
	if text == "" {
		return "", badArguments("device is missing: give the id of one, as find_devices tells it")
	}
	id, err := devices.ParseID(text)
	if err != nil {
		return "", badArguments(err.Error())
	}
	return id, nil
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
	if err := s.opt.Service.Permit(by, access.ScopeRead, ""); err != nil {
		return nil, err
	}
	answer := struct {
		Tools []foundTool `json:"tools"`
	}{[]foundTool{}}
	for _, m := range s.opt.Service.SearchTools(by, args.Query, limit, maxExamples) {
		info := infoOf(&indexed{name: m.Tool.Name, tool: newTool(m.Tool, func() {})})
		if clean(m.Tool.Name, maxTitle) != m.Tool.Name {
			info.Name = hashedName(hostName(m.Tool.Name), m.Tool.Name) // describe_device tells how it is called
		}
		answer.Tools = append(answer.Tools, foundTool{info, m.Count, m.Devices})
	}
	return structured(answer), nil
}
