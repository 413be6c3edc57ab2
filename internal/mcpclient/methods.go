package mcpclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"fleetd/internal/jsonspan"
)

// Limits of a tool list. The firmware pages at 8,000 bytes
// (mcp_server.cc:452-506); the richest board has some 60 tools.
const (
	MaxPages     = 128
	MaxListBytes = 1 << 20
	MaxTools     = 2000
	MaxCursor    = 1024             // bytes; the firmware's is a tool name
	maxPageBytes = 2 * MaxListBytes // of all pages of a list, whatever is in them
	maxBadTools  = 100
)

// InitParams are the parameters of `initialize`. Without a vision URL the device's
// camera cannot send photos; a URL without a token clears the token
// (mcp_server.cc:331-348).
type InitParams struct {
	VisionURL   string
	VisionToken string
	Version     string // of fleetd
}

// ServerInfo is the device's answer to `initialize`.
type ServerInfo struct {
	Name    string // board name
	Version string // firmware version
}

// Initialize sends `initialize` and, after the answer,
// `notifications/initialized`, within StepTimeout. The firmware needs it after
// every reboot to learn the vision URL, and keeps no other state.
func (c *Client) Initialize(ctx context.Context, p InitParams) (ServerInfo, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, StepTimeout, NoAnswer(StepTimeout))
	defer cancel()
	params := []byte(`{"protocolVersion":"` + ProtocolVersion + `","capabilities":{`)
	if p.VisionURL != "" {
		params = append(params, `"vision":{"url":`...)
		params = jsonspan.AppendString(params, p.VisionURL)
		params = append(params, `,"token":`...)
		params = jsonspan.AppendString(params, p.VisionToken)
		params = append(params, '}')
	}
	params = append(params, `},"clientInfo":{"name":"fleetd","version":`...)
	params = jsonspan.AppendString(params, p.Version)
	params = append(params, "}}"...)
	result, err := c.Request(ctx, "initialize", params)
	if err != nil {
		return ServerInfo{}, fmt.Errorf("initialize: %w", err)
	}
	var info ServerInfo
	if err := info.parse(result); err != nil {
		return ServerInfo{}, fmt.Errorf("initialize: %w: %w", ErrMalformed, err)
	}
	if err := c.Notify("notifications/initialized"); err != nil {
		return ServerInfo{}, fmt.Errorf("initialize: %w", err)
	}
	return info, nil
}

func (s *ServerInfo) parse(result []byte) error {
	walk := jsonspan.Object(result)
	for walk.Next() {
		if string(walk.Key()) != "serverInfo" {
			continue
		}
		inner := jsonspan.Object(walk.Value())
		for inner.Next() {
			switch string(inner.Key()) {
			case "name":
				s.Name, _ = jsonspan.String(inner.Value())
			case "version":
				s.Version, _ = jsonspan.String(inner.Value())
			}
		}
	}
	return walk.Err()
}

// ToolList is what ListTools read.
type ToolList struct {
	// JSON is the array of tool objects exactly as sent, page borders left
	// out: `[`, the objects joined by `,`, `]`. Its SHA-256 names the list.
	JSON    []byte
	Count   int
	Partial bool   // the list could not be read to its end
	Reason  string // why, for people

	read, bad int // bytes of all pages, elements that are not tools
	buf       *[]byte
}

// lists holds the buffers of lists being read: most turn out to be known by
// their hash and are never kept.
var lists = sync.Pool{New: func() any { b := make([]byte, 0, 32<<10); return &b }}

// Release gives the list's memory back; JSON is invalid from then on.
func (l *ToolList) Release() {
	if l.buf != nil && cap(l.JSON) <= 256<<10 {
		*l.buf = l.JSON[:0]
		lists.Put(l.buf)
	}
	l.buf, l.JSON = nil, nil
}

// failedToAdd… are the firmware's two meanings of one sentence (mcp_server.cc:492-497): with an empty name, the cursor was not
// found; with a name, that tool alone is over the page size.
const (
	failedToAddPrefix = "Failed to add tool "
	failedToAddSuffix = " because of payload size limit"
)

// ListTools reads the whole list, user-only tools included
// (`withUserTools:true`; firmware before v2.0.0 ignores it), each page within
// StepTimeout. What the device itself cannot list to its end is returned as
// Partial; an error means that a page got no answer, or no usable one. Guards: a
// cursor seen before, MaxPages, MaxListBytes, MaxTools. An empty-name error on
// a cursor the device gave restarts the list once, since the device may have
// changed its tools meanwhile. The caller releases the list.
func (c *Client) ListTools(ctx context.Context) (ToolList, error) {
	for attempt := 0; ; attempt++ {
		list, err := c.listOnce(ctx)
		if err == nil || !errors.Is(err, errCursorRefused) {
			return list, err
		}
		c.peer.DeviateMCP(DeviationCursorRefused)
		if attempt == 0 {
			list.Release()
		} else {
			list.Partial, list.Reason = true, "the device refuses a cursor it gave itself"
			return list, nil
		}
	}
}

var errCursorRefused = errors.New("device refuses its own cursor")

func (c *Client) listOnce(ctx context.Context) (ToolList, error) {
	list := ToolList{buf: lists.Get().(*[]byte)}
	list.JSON = append((*list.buf)[:0], '[')
	seen := map[string]struct{}{}
	cursor := ""
	for page := 1; ; page++ {
		next, err := c.listPage(ctx, cursor, &list)
		rpc := (*RPCError)(nil)
		switch {
		case err == nil:
		case errors.As(err, &rpc) && (page > 1 || isNamed(oversizeTool(rpc.Message))):
			switch oversizeTool(rpc.Message) {
			case "":
			case unnamed:
				list.end()
				return list, errCursorRefused
			default:
				c.peer.DeviateMCP(DeviationOversizeTool)
			}
			return list.cut("the device fails on page " + fmt.Sprint(page) + ": " + rpc.Message), nil
		case errors.Is(err, errListTooLong):
			c.peer.DeviateMCP(DeviationListTooLong)
			return list.cut(err.Error()), nil
		default:
			list.Release()
			return ToolList{}, fmt.Errorf("tools/list page %d: %w", page, err)
		}
		if next == "" {
			list.end()
			return list, nil
		}
		if len(next) > MaxCursor || list.read > maxPageBytes || list.bad > maxBadTools {
			c.peer.DeviateMCP(DeviationListTooLong)
			return list.cut("the device's pages contain too much data that is not a tool"), nil
		}
		if _, again := seen[next]; again {
			c.peer.DeviateMCP(DeviationCursorLoop)
			return list.cut("the device repeats a cursor"), nil
		}
		seen[next] = struct{}{}
		if page == MaxPages {
			c.peer.DeviateMCP(DeviationListTooLong)
			return list.cut(fmt.Sprintf("the list has more than %d pages", MaxPages)), nil
		}
		cursor = next
	}
}

// unnamed is what oversizeTool returns for the sentence without a name.
const unnamed = " "

// oversizeTool returns the name in the firmware's sentence about a tool that
// does not fit, empty for any other text.
func oversizeTool(message string) string {
	name, failed := strings.CutPrefix(message, failedToAddPrefix)
	name, limited := strings.CutSuffix(name, failedToAddSuffix)
	switch {
	case !failed || !limited:
		return ""
	case name == "":
		return unnamed
	}
	return name
}

func isNamed(tool string) bool { return tool != "" && tool != unnamed }

func (l *ToolList) end() { l.JSON = append(l.JSON, ']') }

func (l ToolList) cut(reason string) ToolList {
	l.end()
	l.Partial, l.Reason = true, reason
	return l
}

var errListTooLong = fmt.Errorf("the list is over %d bytes or %d tools", MaxListBytes, MaxTools)

// listPage appends one page's tools to the list and returns the next cursor,
// empty at the end.
func (c *Client) listPage(ctx context.Context, cursor string, list *ToolList) (next string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, StepTimeout, NoAnswer(StepTimeout))
	defer cancel()
	params := append([]byte(`{"cursor":`), jsonspan.AppendString(nil, cursor)...)
	a, err := c.request(ctx, "tools/list", append(params, `,"withUserTools":true}`...), nil)
	if err != nil {
		return "", err
	}
	list.read += len(a.result)
	if p := a.page; p != nil && list.addPage(p) {
		return p.next, nil
	}
	result, from, before, bad := a.result, len(list.JSON), list.Count, list.bad
	defer releasePage(result)
	listed := false
	walk := jsonspan.CheckedObject(result)
	for walk.NextKey() {
		switch string(walk.Key()) {
		case "tools":
			elements := walk.Enter()
			if err := c.addTools(list, &elements); err != nil {
				return "", err
			}
			walk.Leave(&elements)
			listed = true
		case "nextCursor":
			walk.Skip()
			next, _ = jsonspan.String(walk.Value())
		default:
			walk.Skip()
		}
	}
	if walk.Err() != nil || !listed {
		return "", fmt.Errorf("%w: no array \"tools\" in %.80s", ErrMalformed, result)
	}
	if list.Count > before && list.bad == bad {
		known.add(result, bytes.TrimPrefix(list.JSON[from:], comma), list.Count-before, next)
	}
	return next, nil
}

var comma = []byte{','}

// addPage appends the tools of a page that came before; false if there is no room for
// all of them.
func (l *ToolList) addPage(p *knownPage) bool {
	if len(l.JSON)+1+len(p.tools) > MaxListBytes || l.Count+p.count > MaxTools {
		return false
	}
	if l.Count > 0 {
		l.JSON = append(l.JSON, ',')
	}
	l.JSON = append(l.JSON, p.tools...)
	l.Count += p.count
	return true
}

// addTools appends the tools of one page.
func (c *Client) addTools(list *ToolList, elements *jsonspan.Walk) error {
	for elements.Next() {
		tool := elements.Value()
		if !isTool(tool) {
			if list.bad++; list.bad > maxBadTools {
				return errListTooLong
			}
			c.peer.DeviateMCP(DeviationBadTool)
			list.Partial, list.Reason = true, "an element of the list is not a tool"
			continue
		}
		if len(list.JSON)+len(tool) > MaxListBytes || list.Count == MaxTools {
			return errListTooLong
		}
		if list.Count > 0 {
			list.JSON = append(list.JSON, ',')
		}
		list.JSON = append(list.JSON, tool...)
		list.Count++
	}
	return nil
}

// isTool reports whether an element has what makes it callable: a name.
func isTool(element []byte) bool {
	if jsonspan.KindOf(element) != jsonspan.KindObject {
		return false
	}
	walk := jsonspan.CheckedObject(element)
	for walk.Next() {
		if string(walk.Key()) == "name" {
			name, ok := jsonspan.StringBytes(walk.Value())
			return ok && len(name) > 0
		}
	}
	return false
}

// Result is what a tool answered: content items as in MCP.
type Result struct {
	Content json.RawMessage
	IsError bool
}

// CallTool sends `tools/call`. args is a JSON object or nil for none. The
// firmware answers with exactly one item and never with isError
// (mcp_server.h:272-311); a tool's failure is an *RPCError. late, if not nil,
// takes what comes after ctx has ended, see Late.
func (c *Client) CallTool(ctx context.Context, name string, args json.RawMessage, late func(Result, error)) (Result, error) {
	buf := buffers.Get().(*[]byte)
	params := append((*buf)[:0], `{"name":`...)
	params = jsonspan.AppendString(params, name)
	params = append(params, `,"arguments":`...)
	if len(args) == 0 {
		args = emptyObject
	}
	params = append(params, args...)
	params = append(params, '}')
	*buf = params
	var take Late
	if late != nil {
		take = func(raw json.RawMessage, err error) {
			var r Result
			if err == nil {
				r, err = c.parseResult(raw)
			}
			late(r, err)
		}
	}
	raw, err := c.RequestLate(ctx, "tools/call", params, take)
	putBuffer(buf)
	if err != nil {
		return Result{}, err
	}
	return c.parseResult(raw)
}

var emptyObject = json.RawMessage("{}")

func (c *Client) parseResult(raw json.RawMessage) (Result, error) {
	var r Result
	walk := jsonspan.Object(raw)
	for walk.Next() {
		switch string(walk.Key()) {
		case "content":
			r.Content = walk.Value()
		case "isError":
			r.IsError = jsonspan.KindOf(walk.Value()) == jsonspan.KindTrue
		}
	}
	if walk.Err() != nil || jsonspan.KindOf(r.Content) != jsonspan.KindArray {
		return Result{}, fmt.Errorf("%w: no array \"content\" in %.80s", ErrMalformed, raw)
	}
	if bytes.Contains(r.Content, imageMark) {
		r.Content = c.decodeImages(r.Content)
	}
	return r, nil
}

var imageMark = []byte(`"image":"`)

// decodeImages turns the firmware's images, a string of JSON text in the
// member `image` (mcp_server.h:278-284), into MCP image items. Items it cannot
// read stay as they are.
func (c *Client) decodeImages(content json.RawMessage) json.RawMessage {
	out := []byte{'['}
	items := jsonspan.Array(content)
	for items.Next() {
		if len(out) > 1 {
			out = append(out, ',')
		}
		item := items.Value()
		if image := imageText(item); image != nil {
			if decoded, err := jsonspan.Value(image); err == nil && jsonspan.KindOf(decoded) == jsonspan.KindObject {
				c.peer.DeviateMCP(DeviationImageEncoding)
				item = decoded
			}
		}
		out = append(out, item...)
	}
	return append(out, ']')
}

func imageText(item []byte) []byte {
	if jsonspan.KindOf(item) != jsonspan.KindObject {
		return nil
	}
	walk := jsonspan.Object(item)
	for walk.Next() {
		if string(walk.Key()) == "image" {
			text, _ := jsonspan.StringBytes(walk.Value())
			return text
		}
	}
	return nil
}
