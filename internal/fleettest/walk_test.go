package fleettest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/jsontest"
)

// openAPI is the part of the OpenAPI document that a walk reads.
type openAPI struct {
	Paths      map[string]map[string]*operation
	Components struct{ Schemas map[string]*jsonSchema }
}

// operation is one operation of the document.
type operation struct {
	OperationID string
	Parameters  []struct {
		Name, In string
		Required bool
		Schema   jsonSchema
	}
	RequestBody struct {
		Content map[string]struct{ Schema *jsonSchema }
	}
	Security []map[string][]string

	method, path string
}

// jsonSchema is the part of a schema that is needed to make up a value.
type jsonSchema struct {
	Ref        string `json:"$ref"`
	Type       any    // a name, or several
	Enum       []any
	Required   []string
	Properties map[string]*jsonSchema
	Items      *jsonSchema
}

// readDocument reads the document of a node, for requests and for comparing their answers.
func readDocument(t testing.TB, n *Node) (d openAPI, described *jsontest.Document) {
	t.Helper()
	answer, err := http.Get(n.Info.API + "/openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil {
		err = json.Unmarshal(text, &d)
	}
	if err == nil {
		described, err = jsontest.NewDocument(string(text))
	}
	if err != nil {
		t.Fatal(err)
	}
	for path, item := range d.Paths {
		for method, op := range item {
			op.method, op.path = strings.ToUpper(method), path
		}
	}
	return d, described
}

// operations returns the operations in the order of a walk: what only reads, what changes, and what ends something.
func (d *openAPI) operations() (list []*operation) {
	for _, path := range slices.Sorted(maps.Keys(d.Paths)) {
		for _, method := range slices.Sorted(maps.Keys(d.Paths[path])) {
			list = append(list, d.Paths[path][method])
		}
	}
	slices.SortStableFunc(list, func(a, b *operation) int { return a.phase() - b.phase() })
	return list
}

// Phases of a walk.
const (
	phaseReads = iota
	phaseChanges
	phaseEnds
)

// ending are the paths of what ends something by POST.
var ending = regexp.MustCompile(`/(revoke|rotate|approve|cancel)$`)

// needs reports whether the operation needs this scope.
func (op *operation) needs(scope string) bool {
	return slices.ContainsFunc(op.Security, func(s map[string][]string) bool { return slices.Contains(s["token"], scope) })
}

func (op *operation) phase() int {
	switch {
	case op.method == http.MethodGet:
		return phaseReads
	case op.method == http.MethodDelete, ending.MatchString(op.path):
		return phaseEnds
	}
	return phaseChanges
}

// sides are what a walk inserts: things of the one room, of the other one, and what does not exist.
var sides = []string{"lab", "hall", "absent"}

// own is the side of what the key has made itself.
const own = "own"

// walked is one request of a walk.
type walked struct {
	op           *operation
	side         string // of sides; empty if the request names nothing of a room
	target, body string
	contentType  string
}

func (c *walked) String() string {
	return strings.TrimSpace(c.op.method + " " + c.target + " " + c.body)
}

// placeholders are the parameters in a path.
var placeholders = regexp.MustCompile(`\{(\w+)\}`)

// calls returns the requests for an operation: each without a query and with each parameter alone.
func (w *world) calls(op *operation, key *walker) (list []*walked) {
	named := placeholders.MatchString(op.path)
	for _, side := range append(sides, own) {
		if side == own && key.own == nil {
			continue
		}
		path := placeholders.ReplaceAllStringFunc(op.path, func(p string) string {
			return url.PathEscape(w.value(op, strings.Trim(p, "{}"), side, key))
		})
		bodies := []body{{}}
		if op.RequestBody.Content != nil {
			bodies = w.bodies(op, side, key)
		}
		for _, b := range bodies {
			for _, query := range w.queries(op, side, key) {
				c := &walked{op: op, target: path, body: b.text, contentType: b.contentType}
				if len(query) > 0 {
					c.target += "?" + query.Encode()
				}
				if named || b.named || w.names(c.target, side, key) {
					c.side = side
				}
				if !slices.ContainsFunc(list, func(other *walked) bool { return other.target == c.target && other.body == c.body }) {
					list = append(list, c)
				}
			}
		}
	}
	return list
}

// names reports whether a request names something of the side.
func (w *world) names(request, side string, key *walker) bool {
	if strings.Contains(request, "mark"+side) || rooms.MatchString(request) {
		return true
	}
	for name, id := range w.of(side, key) {
		if name != "tool" && (strings.Contains(request, id) || strings.Contains(request, url.QueryEscape(id))) {
			return true
		}
	}
	return false
}

// of returns the things of a side, by the name of a parameter.
func (w *world) of(side string, key *walker) map[string]string {
	if side == own {
		return key.own
	}
	return w.things[side]
}

// value is what a path parameter stands for.
func (w *world) value(op *operation, name, side string, key *walker) string {
	if name == "id" {
		name = strings.Trim(strings.Split(op.path, "/")[2], "s")
	}
	if name == "device" {
		switch {
		case side == own && op.OperationID == "forgetDevice":
			return roomDevice(key.rooms[0], 25+int(key.index))
		case side == own && op.OperationID == "rotateDevice":
			return roomDevice(key.rooms[0], 33+int(key.index))
		case side == own:
		case op.OperationID == "forgetDevice":
			return w.victim(side, key)
		case op.OperationID == "revokeDevice", op.OperationID == "rotateDevice":
			return w.outcast(side, key)
		}
	}
	if v, ok := w.of(side, key)[name]; ok {
		return v
	}
	return "1"
}

// queries returns the queries of an operation: the usual one, and that with each further parameter alone.
func (w *world) queries(op *operation, side string, key *walker) (list []url.Values) {
	usual := url.Values{}
	for _, p := range op.Parameters {
		switch {
		case p.In != "query":
		case p.Name == "limit":
			usual.Set(p.Name, "1000")
		case p.Name == "last_event_id":
			usual.Set(p.Name, "0")
		case p.Required:
			usual.Set(p.Name, w.queryValues(p.Name, &p.Schema, side, key)[0])
		}
	}
	list = append(list, usual)
	for _, p := range op.Parameters {
		if p.In != "query" || usual.Has(p.Name) || p.Name == "cursor" {
			continue
		}
		for _, value := range w.queryValues(p.Name, &p.Schema, side, key) {
			q := maps.Clone(usual)
			q.Set(p.Name, value)
			list = append(list, q)
		}
	}
	return list
}

func (w *world) queryValues(name string, s *jsonSchema, side string, key *walker) (values []string) {
	switch name {
	case "select":
		return []string{"room=" + side, "room!=" + side, "device=" + w.of(side, key)["device"], "mark" + side + "tag=mark" + side + "label", "state=offline"}
	case "label":
		return []string{"room=" + side}
	case "q":
		return []string{"mark", "mark" + side + "name"}
	case "board":
		return []string{"mark" + side + "board"}
	case "since", "until", "before":
		return []string{"1h"}
	}
	if v, ok := w.of(side, key)[name]; ok {
		return []string{v}
	}
	for _, v := range s.Enum {
		values = append(values, fmt.Sprint(v))
	}
	if values == nil {
		values = []string{strings.Trim(fmt.Sprint(w.made(s, name, side)), `"`)}
	}
	return values
}

// made is a value for a schema: what the name stands for, or the least that the schema permits.
func (w *world) made(s *jsonSchema, name, side string) any {
	if ref, ok := strings.CutPrefix(s.Ref, "#/components/schemas/"); ok {
		s = w.document.Components.Schemas[ref]
	}
	if v, ok := w.things[side][name]; ok {
		return v
	}
	if len(s.Enum) > 0 {
		return s.Enum[0]
	}
	kind, _ := s.Type.(string)
	if kinds, ok := s.Type.([]any); ok {
		kind = fmt.Sprint(kinds[0])
	}
	switch kind {
	case "object":
		o := map[string]any{}
		for _, member := range s.Required {
			o[member] = w.made(s.Properties[member], member, side)
		}
		return o
	case "array":
		if s.Items == nil {
			return []any{}
		}
		return []any{w.made(s.Items, strings.TrimSuffix(name, "s"), side)}
	case "integer", "number":
		return 1
	case "boolean":
		return true
	}
	return "x"
}

// reply is what a walk received.
type reply struct {
	status int
	text   string
}

// patience is how long a walk reads a stream that has nothing more to say.
const patience = 500 * time.Millisecond

// do makes a request, again if the node has no time for it.
func (w *world) do(ctx context.Context, token string, c *walked) (reply, error) {
	for {
		r, wait, err := w.once(ctx, token, c)
		if err != nil || !wait {
			return r, err
		}
		select {
		case <-ctx.Done():
			return r, ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

func (w *world) once(ctx context.Context, token string, c *walked) (r reply, wait bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, c.op.method, w.node.Info.API+c.target, strings.NewReader(c.body))
	if err != nil {
		return r, false, err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	if c.contentType != "" {
		request.Header.Set("Content-Type", c.contentType)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return r, false, fmt.Errorf("%s: %w", c, err)
	}
	defer answer.Body.Close()
	var text bytes.Buffer
	if strings.HasPrefix(answer.Header.Get("Content-Type"), "text/event-stream") {
		idle := time.AfterFunc(patience, cancel)
		_, _ = io.Copy(&text, &pulse{answer.Body, func() { idle.Reset(patience) }}) // it ends by cancel
	} else if _, err := io.Copy(&text, answer.Body); err != nil {
		return r, false, fmt.Errorf("%s: %w", c, err)
	}
	var head bytes.Buffer
	if err := answer.Header.Write(&head); err != nil {
		return r, false, err
	}
	if lie := w.described.Lie(request, answer.StatusCode, answer.Header, text.Bytes()); lie != "" {
		w.found.add("not as the OpenAPI document describes it: "+c.op.OperationID, lie)
	}
	wait = answer.Header.Get("Retry-After") != ""
	return reply{answer.StatusCode, head.String() + "\n" + text.String()}, wait, nil
}

// pulse reads, and calls beat after each read.
type pulse struct {
	r    io.Reader
	beat func()
}

// Read implements io.Reader.
func (p *pulse) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	p.beat()
	return n, err
}

// follow collects a stream until the test ends.
func (w *world) follow(t testing.TB, key *walker, path string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.node.Info.API+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+key.token)
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	if answer.StatusCode != http.StatusOK {
		t.Fatalf("%s as %s: %s", path, key.name, answer.Status)
	}
	out := &Output{}
	key.streams[path] = out
	go func() {
		defer answer.Body.Close()
		_, _ = io.Copy(out, answer.Body) // it ends with the test
	}()
}

// rooms are selections of rooms.
var rooms = regexp.MustCompile(`room(!?=|!?%3D)(lab|hall|absent)`)

// varying are parts of answers that differ without telling anything of what the request names: times, and names of
// what the request itself has made.
var varying = regexp.MustCompile(`(?m)^(Date|Fleetd-Call|Content-Length): .*$|\d{4}-\d\d-\d\dT[\d:.]+Z|\\*"(call|id|job|next_cursor|secret)\\*": *\\*"[^"\\]+\\*"|\\*"duration_ms\\*": *[\d.]+|revision \d+`)

// unnamed is an answer without what the request said, so that answers to requests for different things can be compared.
func (w *world) unnamed(side, text string, key *walker) string {
	text = rooms.ReplaceAllString(varying.ReplaceAllString(text, "VARYING"), "ROOM")
	names := slices.Collect(maps.Values(w.of(side, key)))
	names = append(names, w.victim(side, key), w.outcast(side, key), "mark"+side)
	slices.SortFunc(names, func(a, b string) int { return len(b) - len(a) })
	for _, name := range names {
		if name == "" || name == "1" {
			continue
		}
		for _, form := range []string{name, url.PathEscape(name), url.QueryEscape(name)} {
			text = strings.ReplaceAll(text, form, "NAME")
		}
	}
	return text
}

// hostOf opens an MCP session with a key, and notes what is sent to it.
func (w *world) hostOf(t testing.TB, key *walker, path string) (*mcp.ClientSession, error) {
	t.Helper()
	notes := &Output{}
	key.streams["notifications of "+path] = notes
	note := func(v any) {
		text, _ := json.Marshal(v)
		_, _ = notes.Write(text)
	}
	client := mcp.NewClient(&mcp.Implementation{Name: "walker", Version: "1"}, &mcp.ClientOptions{
		ResourceUpdatedHandler: func(_ context.Context, r *mcp.ResourceUpdatedNotificationRequest) { note(r.Params) },
		//lint:ignore SA1019 The revision of this session has it, and whatever is said to a host is searched.
		LoggingMessageHandler: func(_ context.Context, r *mcp.LoggingMessageRequest) { note(r.Params) },
	})
	session, err := client.Connect(t.Context(), w.node.mcpTransport(path, key.token), &mcp.ClientSessionOptions{ProtocolVersion: "2025-11-25"})
	if err == nil {
		t.Cleanup(func() { _ = session.Close() })
	}
	return session, err
}

// walkMCP asks an MCP server for all it has, of each side.
func (w *world) walkMCP(t testing.TB, key *walker) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	answers := map[string]map[string]string{} // by request without its side, then by side
	check := func(what, side, asked string, result any, err error) {
		text, _ := json.Marshal(result)
		if err != nil {
			text = []byte(err.Error())
		}
		w.check(key, "mcp "+what, what+" "+asked, string(text), true)
		if !w.names(asked, side, key) || side == "" {
			return
		}
		if answers[what] == nil {
			answers[what] = map[string]string{}
		}
		answers[what][side] += w.unnamed(side, string(text), key)
	}
	session, err := w.hostOf(t, key, "/mcp")
	if key.token == "" {
		if err == nil {
			t.Error("MCP without a token")
		}
		return
	}
	if err != nil {
		check("connect", "", "", nil, err)
		return
	}
	tools, err := session.ListTools(ctx, nil)
	check("tools/list", "", "", tools, err)
	resources, err := session.ListResources(ctx, nil)
	check("resources/list", "", "", resources, err)
	templates, err := session.ListResourceTemplates(ctx, nil)
	check("resources/templates/list", "", "", templates, err)
	prompts, err := session.ListPrompts(ctx, nil)
	check("prompts/list", "", "", prompts, err)
	for _, side := range sides {
		device, photo := w.things[side]["device"], w.things[side]["photo"]
		for what, uri := range map[string]string{"device": "fleet://devices/" + device, "status": "fleet://devices/" + device + "/status",
			"tools": "fleet://devices/" + device + "/tools", "photo": "fleet://photos/" + photo} {
			read, err := session.ReadResource(ctx, &mcp.ReadResourceParams{URI: uri})
			check("resources/read of "+what, side, uri, read, err)
			check("resources/subscribe of "+what, side, uri, nil, session.Subscribe(ctx, &mcp.SubscribeParams{URI: uri}))
		}
		for _, prefix := range []string{"", device, "mark" + side} {
			complete, err := session.Complete(ctx, &mcp.CompleteParams{Ref: &mcp.CompleteReference{Type: "ref/resource", URI: "fleet://devices/{device}"},
				Argument: mcp.CompleteParamsArgument{Name: "device", Value: prefix}})
			check("completion/complete", side, prefix, complete, err)
		}
		for _, p := range prompts.Prompts {
			filled := map[string]string{}
			for _, a := range p.Arguments {
				filled[a.Name] = fmt.Sprint(w.made(&jsonSchema{}, a.Name, side))
			}
			got, err := session.GetPrompt(ctx, &mcp.GetPromptParams{Name: p.Name, Arguments: filled})
			check("prompts/get "+p.Name, side, fmt.Sprint(filled), got, err)
		}
		for _, tool := range tools.Tools {
			for what, arguments := range w.toolArguments(t, tool, side) {
				asked, _ := json.Marshal(arguments)
				got, err := session.CallTool(ctx, &mcp.CallToolParams{Name: tool.Name, Arguments: arguments})
				check(tool.Name+" by "+what, side, string(asked), got, err)
			}
		}
		if one, err := w.hostOf(t, key, "/mcp/devices/"+device); err == nil {
			list, err := one.ListTools(ctx, nil)
			check("tools/list of a device", side, device, list, err)
			found, err := one.ListResources(ctx, nil)
			check("resources/list of a device", side, device, found, err)
		} else {
			check("connect to a device", side, device, nil, err)
		}
	}
	for what, of := range answers {
		w.compare(key, "mcp "+what, of)
	}
}

// toolArguments returns arguments for a tool of the fleet's server: what it needs, and that with each further member alone.
func (w *world) toolArguments(t testing.TB, tool *mcp.Tool, side string) map[string]map[string]any {
	t.Helper()
	text, err := json.Marshal(tool.InputSchema)
	var s jsonSchema
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		t.Fatal(err)
	}
	value := func(name string) any {
		switch name {
		case "job":
			if tool.Name == "cancel_job" { // the walk over REST cancels the others, by the same way
				return w.things["absent"]["job"]
			}
		case "select":
			return "room=" + side
		case "query":
			return "mark" + side + "name"
		case "timeout_seconds":
			return 1
		case "later":
			return "1h"
		}
		return w.made(s.Properties[name], name, side)
	}
	needed := map[string]any{}
	for _, name := range s.Required {
		needed[name] = value(name)
	}
	all := map[string]map[string]any{"required": needed}
	for name := range s.Properties {
		if !slices.Contains(s.Required, name) && name != "cursor" {
			more := maps.Clone(needed)
			more[name] = value(name)
			all[name] = more
		}
	}
	if _, ok := s.Properties["device"]; ok {
		byName := maps.Clone(needed)
		byName["device"] = "mark" + side + "name"
		all["name"] = byName
	}
	return all
}

// found collects what a walk found.
type found struct {
	mu    sync.Mutex
	lines map[string]string // by kind of finding, the first
}

func (f *found) add(kind, detail string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.lines[kind]; !ok {
		f.lines[kind] = detail
	}
}
