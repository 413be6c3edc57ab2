package mcpserver

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/cleantext"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/finder"
	"fleetd/internal/jsonspan"
	"fleetd/internal/selector"
	"fleetd/internal/tasks"
)

// Limits of calls.
const (
	maxCallTargets = 100
	maxLeftOut     = 20  // devices that a group names as not reached
	maxNameBytes   = 512 // of a device and a tool: 128 characters
	maxSuggestions = 3   // suggestions in an error
	callWorkers    = 8
	waitPoll       = 5 * time.Second // between checks while no event arrives
)

type callArgs struct {
	Device    string          `json:"device"`
	Tool      string          `json:"tool"`
	Arguments json.RawMessage `json:"arguments"`
	Timeout   int             `json:"timeout_seconds"`
	Later     string          `json:"later"`
}

// decode decodes the arguments of call_device_tool, the most frequent call, without
// reflection. The SDK has checked that they are JSON.
func (a *callArgs) decode(raw []byte) error {
	walk := jsonspan.Object(raw)
	for walk.Next() {
		value, ok := walk.Value(), true
		switch key := walk.Key(); string(key) {
		case "device":
			a.Device, ok = jsonspan.String(value)
		case "tool":
			a.Tool, ok = jsonspan.String(value)
		case "arguments":
			a.Arguments = value
		case "timeout_seconds":
			var n int64
			n, ok = jsonspan.Int(value)
			a.Timeout = int(n)
			ok = ok && int64(a.Timeout) == n
		case "later":
			a.Later, ok = jsonspan.String(value)
		default:
			return badArguments("unknown argument " + strconv.Quote(cleantext.Short(string(key), maxTitle)) + "; valid ones are device, tool, arguments, timeout_seconds, later")
		}
		if !ok {
			return badArguments(string(walk.Key()) + " has the wrong type; see the tool's input schema")
		}
	}
	if walk.Err() != nil {
		return badArguments("the arguments must be an object")
	}
	return nil
}

// callResult is the result of a call. Images and audio are separate content items.
type callResult struct {
	Device   string   `json:"device"`
	Tool     string   `json:"tool"`
	Text     []string `json:"said_by_device,omitempty"`
	IsError  bool     `json:"is_error"`
	Outcome  string   `json:"outcome,omitempty"`
	Duration float64  `json:"duration_ms"`
	Node     string   `json:"node,omitempty"`
	Call     string   `json:"call,omitempty"`
	Error    *failure `json:"error,omitempty"`
}

// append appends the JSON that encoding/json would produce.
func (c *callResult) append(dst []byte) []byte {
	dst = jsonspan.AppendString(append(dst, `{"device":`...), c.Device)
	dst = jsonspan.AppendString(append(dst, `,"tool":`...), c.Tool)
	for i, text := range c.Text {
		sep := `,`
		if i == 0 {
			sep = `,"said_by_device":[`
		}
		dst = jsonspan.AppendString(append(dst, sep...), text)
	}
	if len(c.Text) > 0 {
		dst = append(dst, ']')
	}
	dst = strconv.AppendBool(append(dst, `,"is_error":`...), c.IsError)
	if c.Outcome != "" {
		dst = jsonspan.AppendString(append(dst, `,"outcome":`...), c.Outcome)
	}
	dst = strconv.AppendFloat(append(dst, `,"duration_ms":`...), c.Duration, 'f', -1, 64)
	dst = jsonspan.AppendString(append(dst, `,"node":`...), c.Node)
	return append(jsonspan.AppendString(append(dst, `,"call":`...), c.Call), '}')
}

func newCallResult(c devices.ToolCall, r devices.ToolResult, content []mcp.Content) (callResult, []mcp.Content) {
	out := callResult{Device: string(c.Device), Tool: c.Tool, IsError: r.IsError, Outcome: r.Outcome, Node: r.Node, Call: r.Call,
		Duration: float64(r.Duration.Microseconds()) / 1000}
	var other []mcp.Content
	for _, item := range content {
		if text, ok := item.(*mcp.TextContent); ok {
			out.Text = append(out.Text, text.Text)
		} else {
			other = append(other, item)
		}
	}
	if r.Outcome == dispatch.OutcomeRestarting && len(out.Text) == 0 {
		out.Text = []string{restarting}
	}
	return out, other
}

func (s *Server) callDeviceTool(ctx context.Context, req *mcp.CallToolRequest, args callArgs) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	id, asked, err := s.chosen(ctx, req, by, args.Device)
	if err != nil || asked != nil {
		return asked, err
	}
	call, timeout, err := s.prepare(ctx, args)
	if err != nil {
		return nil, err
	}
	call.Device = id
	later, err := parseLater(args.Later)
	if err != nil {
		return nil, err
	}
	call.Tool = s.deviceToolName(ctx, by, id, call.Tool)
	s.progress(req, 1)(ctx, 0, "the device was called")
	result, content, question, err := s.runConfirmed(ctx, req, call, timeout)
	switch {
	case err != nil && later > 0 && devices.AsError(err).Code == devices.CodeDeviceOffline:
		return s.later(ctx, req, call, timeout, later)
	case err != nil:
		f := s.failure(err)
		f.Device, f.Tool = string(id), cleantext.Short(call.Tool, maxTitle)
		f.suggest(ctx, s, by, id, args.Tool)
		return s.failed(f), nil
	case question != nil:
		s.stats.Calls.Add("asked", 1)
		return question, nil
	}
	s.stats.Calls.Add(outcomeOf(result), 1)
	answer, pictures := newCallResult(call, result, content)
	text := answer.append(nil)
	out := &mcp.CallToolResult{IsError: result.IsError, StructuredContent: json.RawMessage(text), Content: append([]mcp.Content{&mcp.TextContent{Text: string(text)}}, pictures...)}
	return out, nil
}

// prepare checks the arguments that call_device_tool and call_many share.
func (s *Server) prepare(ctx context.Context, args callArgs) (c devices.ToolCall, timeout time.Duration, err error) {
	seconds := args.Timeout
	switch limit := int(dispatch.MaxTimeout / time.Second); {
	case seconds < 0 || seconds > limit:
		return c, 0, badArguments(fmt.Sprintf("timeout_seconds must be from 1 to %d", limit))
	case args.Tool == "":
		return c, 0, badArguments("tool is missing")
	case len(args.Tool) > maxNameBytes || len(args.Device) > maxNameBytes:
		return c, 0, badArguments(fmt.Sprintf("device and tool may have %d bytes each", maxNameBytes))
	case len(args.Arguments) > 0 && jsonspan.KindOf(args.Arguments) != jsonspan.KindObject:
		if !bytes.Equal(args.Arguments, []byte("null")) {
			return c, 0, badArguments("arguments must be an object")
		}
		args.Arguments = nil
	case s.opt.Draining():
		return c, 0, errStopping()
	}
	return devices.ToolCall{Tool: args.Tool, Arguments: args.Arguments}, time.Duration(seconds) * time.Second, ctx.Err()
}

// suggest adds to a tool_unknown error the similarly named tools that the caller may
// call.
func (f *failure) suggest(ctx context.Context, s *Server, by access.Principal, id devices.ID, name string) {
	if f.Code != devices.CodeToolUnknown {
		return
	}
	f.Detail += "; describe_device lists its tools"
	view, err := s.viewOf(ctx, by, id)
	if err != nil {
		return
	}
	if similar := view.similar(name); len(similar) > 0 {
		f.Detail += "; similar names: " + strings.Join(similar, ", ")
	}
}

// similarTools returns the tools with the most similar names.
func (v *view) similar(name string) (names []string) {
	for _, t := range v.tools {
		names = append(names, infoOf(t.indexedTool).Name)
	}
	return finder.Nearest(name, names, maxSuggestions)
}

// deviceToolName returns the device's name of a tool, given that name or the one that hosts
// see. It returns unknown names unchanged; the device refuses them.
func (s *Server) deviceToolName(ctx context.Context, by access.Principal, id devices.ID, name string) string {
	if bytes.IndexByte([]byte(name), '.') >= 0 { // names for hosts contain no dot
		return name
	}
	view, err := s.viewOf(ctx, by, id)
	if err != nil || view.index == nil {
		return name
	}
	if t := view.index.find(name); t != nil {
		return t.name
	}
	return name
}

type callManyArgs struct {
	Devices   []string        `json:"devices"`
	Select    string          `json:"select"`
	Tool      string          `json:"tool"`
	Arguments json.RawMessage `json:"arguments"`
	Timeout   int             `json:"timeout_seconds"`
}

func (s *Server) callMany(ctx context.Context, req *mcp.CallToolRequest, args callManyArgs) (*mcp.CallToolResult, error) {
	call, timeout, err := s.prepare(ctx, callArgs{Tool: args.Tool, Arguments: args.Arguments, Timeout: args.Timeout})
	if err != nil {
		return nil, err
	}
	by := requestInfoOf(ctx).by()
	ids, left, err := s.targets(ctx, by, args.Devices, args.Select)
	if err != nil {
		return nil, err
	}
	answer := struct {
		OK      int          `json:"ok"`
		Failed  int          `json:"failed"`
		Results []callResult `json:"results"`
		LeftOut []leftOut    `json:"left_out,omitempty"`
		More    bool         `json:"more_left_out,omitempty"`
		Hint    string       `json:"hint,omitempty"`
	}{Results: make([]callResult, len(ids))}
	answer.LeftOut, answer.More = firstLeft(left)
	switch {
	case len(ids) == 0 && len(left) == 0:
		answer.Hint = noneSelected
	case len(left) > 0:
		answer.Hint = "the devices in left_out match, and were not called; run_job calls them when they are back"
	}
	pictures := make([][]mcp.Content, len(ids))
	room := maxPhoto // bytes left for images and audio of all results
	var mu sync.Mutex
	s.forEach(ctx, req, len(ids), "devices were called", func(i int) {
		one := call
		one.Device, one.Tool = ids[i], s.deviceToolName(ctx, by, ids[i], call.Tool)
		result, content, err := s.run(ctx, by, one, timeout)
		answer.Results[i], pictures[i] = newCallResult(one, result, content)
		if err != nil {
			f := s.failure(err)
			f.suggest(ctx, s, by, ids[i], call.Tool)
			if f.Code == devices.CodeConfirmation {
				f.Detail = "a person must confirm this call for each device; use call_device_tool"
			}
			answer.Results[i] = callResult{Device: string(ids[i]), Tool: cleantext.Short(one.Tool, maxTitle), IsError: true, Error: &f}
		}
		mu.Lock()
		defer mu.Unlock()
		for _, item := range pictures[i] {
			room -= sizeOf(item)
		}
		if room < 0 { // the texts contain the ids of photos
			pictures[i] = nil
		}
	})
	if ctx.Err() != nil {
		return nil, errCancelled()
	}
	for _, r := range answer.Results {
		if r.IsError {
			answer.Failed++
			continue
		}
		answer.OK++
	}
	s.stats.Calls.Add("ok", int64(answer.OK))
	s.stats.Calls.Add("failed_of_many", int64(answer.Failed))
	out := structured(answer)
	if room >= 0 {
		out.Content = append(out.Content, slices.Concat(pictures...)...)
	}
	out.IsError = answer.OK == 0 && answer.Failed > 0
	return out, nil
}

const noneSelected = "no device matches select; find_devices shows the labels that there are"

// leftOut is a device that a group has, and that was not reached.
type leftOut struct {
	Device string `json:"device"`
	Name   string `json:"name,omitempty"`
	Reason string `json:"reason"` // its state, or the code of an error
}

// firstLeft returns the devices of a list that are shown, and whether there are others.
func firstLeft(list []leftOut) (shown []leftOut, more bool) {
	return list[:min(len(list), maxLeftOut)], len(list) > maxLeftOut
}

// forEach calls f for 0 to n-1, several at a time, until the context ends, and reports the progress to the host. done says what was done with so
// many.
func (s *Server) forEach(ctx context.Context, req *mcp.CallToolRequest, n int, done string, f func(i int)) {
	report := s.progress(req, n)
	var mu sync.Mutex
	next, ended := 0, 0
	take := func() (int, bool) {
		mu.Lock()
		defer mu.Unlock()
		next++
		return next - 1, next <= n && ctx.Err() == nil
	}
	var workers sync.WaitGroup
	for range min(callWorkers, n) {
		workers.Go(func() {
			defer tasks.Contain(s.log, nil)
			for i, more := take(); more; i, more = take() {
				f(i)
				mu.Lock()
				ended++
				report(ctx, ended, fmt.Sprintf("%d of %d %s", ended, n, done))
				mu.Unlock()
			}
		})
	}
	workers.Wait()
}

// sizeOf returns the size of an image or audio item.
func sizeOf(item mcp.Content) int {
	switch c := item.(type) {
	case *mcp.ImageContent:
		return len(c.Data)
	case *mcp.AudioContent:
		return len(c.Data)
	}
	return 0
}

// targets returns the devices of a group that are connected, and those that a selector selects and that are not: at most one
// more of them than are shown.
func (s *Server) targets(ctx context.Context, by access.Principal, named []string, text string) (ids []devices.ID, left []leftOut, err error) {
	if (len(named) > 0) == (strings.TrimSpace(text) != "") {
		return nil, nil, badArguments("give either devices or select, not both")
	}
	if text == "" {
		ids, err = s.devicesOf(ctx, by, named)
		return ids, nil, err
	}
	sel, err := selectorOf(text)
	if err != nil {
		return nil, nil, err
	}
	inState := func(limit int, states ...string) ([]devices.View, string, error) {
		q := devices.ListQuery{Select: selector.And(sel, selector.In(selector.FieldState, states...)), Limit: limit}
		return s.find(ctx, by, q, allPages)
	}
	found, next, err := inState(maxCallTargets, string(devices.StateOnline))
	if next != "" {
		err = badArguments(fmt.Sprintf("the selector matches more than %d online devices; select fewer, list them in several calls, or use run_job", maxCallTargets))
	}
	if err != nil {
		return nil, nil, err
	}
	for _, d := range found {
		ids = append(ids, d.Device.ID)
	}
	found, _, err = inState(maxLeftOut+1, string(devices.StateOffline), string(devices.StatePending), string(devices.StateContested))
	for _, d := range found {
		left = append(left, leftOut{string(d.Device.ID), cleantext.Short(d.Device.Name, maxTitle), string(d.State)})
	}
	return ids, left, err
}

// devicesOf returns the devices with these ids or names, each once.
func (s *Server) devicesOf(ctx context.Context, by access.Principal, named []string) (ids []devices.ID, err error) {
	for _, text := range named {
		id, err := s.deviceOf(ctx, by, text)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// progress returns a function that reports progress to the host if the host asked for it.
func (s *Server) progress(req *mcp.CallToolRequest, total int) func(ctx context.Context, done int, message string) {
	token := req.Params.GetProgressToken()
	return func(ctx context.Context, done int, message string) {
		if token != nil {
			// Errors are ignored: the result contains everything.
			_ = req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: float64(done), Total: float64(total), Message: message})
		}
	}
}

type deviceArgs struct {
	Device string `json:"device"`
}

func (s *Server) getStatus(ctx context.Context, _ *mcp.CallToolRequest, args deviceArgs) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	view, err := s.namedView(ctx, by, args.Device)
	if err != nil {
		return nil, err
	}
	status, err := s.status(ctx, by, view.device)
	if err != nil {
		return nil, err
	}
	return structured(status), nil
}

type waitArgs struct {
	Device  string `json:"device"`
	Until   string `json:"until"`
	Timeout int    `json:"timeout_seconds"`
}

func (s *Server) waitForDevice(ctx context.Context, req *mcp.CallToolRequest, args waitArgs) (*mcp.CallToolResult, error) {
	by := requestInfoOf(ctx).by()
	id, err := s.deviceOf(ctx, by, args.Device)
	if err != nil {
		return nil, err
	}
	seconds, until := cmp.Or(args.Timeout, 60), cmp.Or(args.Until, "ready")
	event, end := s.watch.wait(id)
	defer end()
	deadline := time.NewTimer(time.Duration(seconds) * time.Second)
	defer deadline.Stop()
	look := time.NewTicker(waitPoll)
	defer look.Stop()
	report, begun := s.progress(req, seconds), time.Now()
	for over := false; ; {
		if err := s.opt.Service.Permit(ctx, by, access.ScopeRead, id); err != nil {
			return nil, err
		}
		d, err := s.opt.Service.Get(ctx, id)
		if err != nil {
			return nil, err
		}
		if reached := inState(d, until); reached || over {
			return structured(struct {
				Reached bool   `json:"reached"`
				Device  device `json:"device"`
			}{reached, describe(d)}), nil
		}
		report(ctx, int(time.Since(begun)/time.Second), "the device is not "+until+" yet")
		select {
		case <-ctx.Done():
			return nil, &devices.Error{Code: devices.CodeDeviceTimeout, Detail: "the caller cancelled the request"}
		case <-s.ctx.Done():
			return nil, errStopping()
		case <-event:
		case <-look.C:
		case <-deadline.C:
			over = true
		}
	}
}

func inState(d devices.View, state string) bool {
	switch state {
	case "online":
		return d.Presence.Online
	case "ready":
		return d.Presence.Online && d.CatalogState == devices.CatalogReady
	}
	return !d.Presence.Online
}
