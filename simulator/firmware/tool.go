package firmware

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"sync"
)

// Sizes of McpServer::GetToolsList (main/mcp_server.cc:452-506).
const (
	maxPagePayload = 8000
	pageReserve    = 30
)

type propertyType uint8

const (
	typeBoolean propertyType = iota
	typeInteger
	typeString
)

// property is one argument of a tool (main/mcp_server.h, class Property).
type property struct {
	name       string
	kind       propertyType
	hasDefault bool
	hasRange   bool
	defBool    bool
	defInt     int32
	defString  string
	min, max   int32
}

func boolean(name string) property { return property{name: name, kind: typeBoolean} }
func str(name string) property     { return property{name: name, kind: typeString} }

func ranged(name string, lo, hi int32) property {
	return property{name: name, kind: typeInteger, hasRange: true, min: lo, max: hi}
}

func (p property) or(def int32) property {
	p.hasDefault, p.defInt = true, def
	return p
}

func (p property) orString(def string) property {
	p.hasDefault, p.defString = true, def
	return p
}

// arg is a checked argument in the order of the tool's properties.
type arg struct {
	b bool
	n int32
	s string
}

// outcome is what a tool returns: text for bool, int, string and cJSON results alike, or the JSON text of an image.
type outcome struct {
	text  string
	image bool
}

// toolError is the text of a C++ exception: it goes onto the wire unchanged, capital letter included.
type toolError string

func (e toolError) Error() string { return string(e) }

func text(s string) (outcome, error)   { return outcome{text: s}, nil }
func flagText(b bool) (outcome, error) { return outcome{text: strconv.FormatBool(b)}, nil }

// tool is one MCP tool. run is called in the device's main loop; an error becomes the unescaped message of a JSON-RPC
// error.
type tool struct {
	name        string
	description string
	properties  []property
	userOnly    bool
	// blocking tools wait for the network or the clock: the main loop moves to a goroutine of its own for them, so that
	// the socket keeps being read and pings answered.
	blocking bool
	run      func(d *Device, args []arg) (outcome, error)
	json     string
}

// toolset is an ordered, immutable list of tools shared by all devices of one profile.
type toolset struct {
	list   []*tool
	byName map[string]*tool

	count, publicCount int
	sha, publicSHA     string
	mu                 sync.Mutex
	pages              map[pageKey]page
}

type pageKey struct {
	cursor string
	user   bool
	loop   bool
}

// page is a finished answer to tools/list: a result, or the text of an error.
type page struct {
	result string
	err    string
}

func newToolset(tools []*tool) *toolset {
	ts := &toolset{byName: make(map[string]*tool, len(tools)), pages: make(map[pageKey]page)}
	for _, t := range tools {
		// AddTool drops a second tool of the same name.
		if _, dup := ts.byName[t.name]; dup {
			continue
		}
		t.json = t.toJSON()
		ts.byName[t.name] = t
		ts.list = append(ts.list, t)
		ts.count++
		if !t.userOnly {
			ts.publicCount++
		}
	}
	ts.sha, ts.publicSHA = ts.hash(true), ts.hash(false)
	return ts
}

// hash is the SHA-256 of the JSON array of the tool objects, byte for byte as the pages carry them.
func (ts *toolset) hash(user bool) string {
	h := sha256.New()
	sep := "["
	for _, t := range ts.list {
		if t.userOnly && !user {
			continue
		}
		h.Write([]byte(sep))
		h.Write([]byte(t.json))
		sep = ","
	}
	if sep == "[" {
		h.Write([]byte(sep))
	}
	h.Write([]byte("]"))
	return hex.EncodeToString(h.Sum(nil))
}

// page returns one page, from memory after the first time. Only cursors that name a tool are kept, so the number of
// pages in memory is bounded whatever the server requests.
func (ts *toolset) page(cursor string, user, loop bool) page {
	if _, known := ts.byName[cursor]; cursor != "" && !known {
		return ts.build(cursor, user, loop)
	}
	key := pageKey{cursor, user, loop}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	p, ok := ts.pages[key]
	if !ok {
		p = ts.build(cursor, user, loop)
		ts.pages[key] = p
	}
	return p
}

// build is GetToolsList. With loop the last page points back to the first tool: the cursor-loop fault.
func (ts *toolset) build(cursor string, user, loop bool) page {
	b := []byte(`{"tools":[`)
	found := cursor == ""
	next := ""
	for _, t := range ts.list {
		if !found {
			if t.name != cursor {
				continue
			}
			found = true
		}
		if t.userOnly && !user {
			continue
		}
		if len(b)+len(t.json)+1+pageReserve > maxPagePayload {
			next = t.name
			break
		}
		b = append(append(b, t.json...), ',')
	}
	if b[len(b)-1] == ',' {
		b = b[:len(b)-1]
	}
	if b[len(b)-1] == '[' && len(ts.list) > 0 {
		return page{err: "Failed to add tool " + next + " because of payload size limit"}
	}
	if next == "" && loop && len(ts.list) > 0 {
		next = ts.list[0].name
	}
	if next == "" {
		return page{result: string(append(b, "]}"...))}
	}
	b = append(append(b, `],"nextCursor":"`...), next...)
	return page{result: string(append(b, `"}`...))}
}

// toJSON is McpTool::to_json.
func (t *tool) toJSON() string {
	b := append(make([]byte, 0, 256+len(t.description)), `{"name":`...)
	b = appendJSONString(b, t.name)
	b = append(b, `,"description":`...)
	b = appendJSONString(b, t.description)
	b = append(b, `,"inputSchema":{"type":"object","properties":{`...)
	required := []byte(nil)
	for i := range t.properties {
		p := &t.properties[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendJSONString(b, p.name), ':')
		b = p.appendJSON(b)
		if !p.hasDefault {
			if required != nil {
				required = append(required, ',')
			}
			required = appendJSONString(required, p.name)
		}
	}
	b = append(b, '}')
	if required != nil {
		b = append(append(append(b, `,"required":[`...), required...), ']')
	}
	b = append(b, '}')
	if t.userOnly {
		b = append(b, `,"annotations":{"audience":["user"]}`...)
	}
	return string(append(b, '}'))
}

func (p *property) appendJSON(b []byte) []byte {
	switch p.kind {
	case typeBoolean:
		b = append(b, `{"type":"boolean"`...)
		if p.hasDefault {
			b = strconv.AppendBool(append(b, `,"default":`...), p.defBool)
		}
	case typeInteger:
		b = append(b, `{"type":"integer"`...)
		if p.hasDefault {
			b = strconv.AppendInt(append(b, `,"default":`...), int64(p.defInt), 10)
		}
		if p.hasRange {
			b = strconv.AppendInt(append(b, `,"minimum":`...), int64(p.min), 10)
			b = strconv.AppendInt(append(b, `,"maximum":`...), int64(p.max), 10)
		}
	case typeString:
		b = append(b, `{"type":"string"`...)
		if p.hasDefault {
			b = appendJSONString(append(b, `,"default":`...), p.defString)
		}
	}
	return append(b, '}')
}

// arguments is the first half of McpServer::DoToolCall (main/mcp_server.cc:508-548): a wrong type silently becomes the
// default, and only an argument without one is missed. The second result is the error text, empty when all is well.
func (t *tool) arguments(given value) ([]arg, string) {
	if len(t.properties) == 0 {
		return nil, ""
	}
	args := make([]arg, len(t.properties))
	for i := range t.properties {
		p, a := &t.properties[i], &args[i]
		*a = arg{b: p.defBool, n: p.defInt, s: p.defString}
		found := false
		if given.is(jsonObject) {
			v := given.get(p.name)
			switch {
			case p.kind == typeBoolean && v.isBool():
				a.b, found = v.is(jsonTrue), true
			case p.kind == typeInteger && v.is(jsonNumber):
				a.n, found = v.int32(), true
				if p.hasRange && a.n < p.min {
					return nil, "Value is below minimum allowed: " + strconv.Itoa(int(p.min))
				}
				if p.hasRange && a.n > p.max {
					return nil, "Value exceeds maximum allowed: " + strconv.Itoa(int(p.max))
				}
			case p.kind == typeString && v.is(jsonString):
				a.s, found = v.string(), true
			}
		}
		if !found && !p.hasDefault {
			return nil, "Missing valid argument: " + p.name
		}
	}
	return args, ""
}

// resultJSON is McpTool::Call's envelope: always exactly one item, never an error flag.
func (o outcome) resultJSON() string {
	b := make([]byte, 0, len(o.text)+80)
	if o.image {
		b = append(b, `{"content":[{"type":"image","image":`...)
	} else {
		b = append(b, `{"content":[{"type":"text","text":`...)
	}
	b = appendJSONString(b, o.text)
	return string(append(b, `}],"isError":false}`...))
}
