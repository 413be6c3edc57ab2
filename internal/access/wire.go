package access

import (
	"encoding/json"
	"sync"

	"fleetd/internal/jsonspan"
	"fleetd/internal/selector"
)

// grants are a caller on its way to another node.
type grants struct {
	Key     string            `json:"key"`
	Name    string            `json:"name,omitempty"`
	Scopes  Scopes            `json:"scopes"`
	Devices selector.Selector `json:"devices,omitzero"`
	Tools   []string          `json:"tools,omitempty"`
}

func (c *Caller) encode() []byte {
	b, err := json.Marshal(grants{c.Key, c.Name, c.Scopes, c.Devices, c.Tools})
	if err != nil {
		return []byte(`{}`) // strings and lists of them marshal; nobody would have no rights
	}
	return b
}

// AppendBy appends who asks as one line of JSON, for a header that another node
// of the fleet reads. What is signed is for its sender to see to.
func AppendBy(dst []byte, b By) []byte {
	if b.Who == Fleet { // nodes of an earlier version write and read no more than that
		return append(dst, b.Via...)
	}
	dst = jsonspan.AppendString(append(dst, `{"via":`...), string(b.Via))
	dst = jsonspan.AppendString(append(dst, `,"from":`...), b.From)
	dst = append(dst, `,"who":`...)
	if b.Who == nil {
		return append(dst, "null}"...)
	}
	return append(append(dst, b.Who.wire...), '}')
}

// Reader reads what AppendBy wrote, and makes each caller once.
type Reader struct {
	mu    sync.Mutex
	known map[string]*Caller // by their bytes
}

// maxKnown bounds the callers kept: about as many as there can be keys in use.
const maxKnown = 4096

// Parse reads a header. Nodes of an earlier version named the way alone, and
// let in nobody but admins. A header that cannot be read is nobody.
func (r *Reader) Parse(header string) By {
	if len(header) == 0 || header[0] != '{' {
		return By{Who: Fleet, Via: Via(header)}
	}
	var b By
	walk := jsonspan.Object([]byte(header))
	var who []byte
	for walk.Next() {
		switch string(walk.Key()) {
		case "via":
			via, _ := jsonspan.String(walk.Value())
			b.Via = Via(via)
		case "from":
			b.From, _ = jsonspan.String(walk.Value())
		case "who":
			who = walk.Value()
		}
	}
	if walk.Err() != nil {
		return By{}
	}
	b.Who = r.caller(who)
	return b
}

func (r *Reader) caller(who []byte) *Caller {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.known[string(who)]; c != nil {
		return c
	}
	var g *grants
	if err := json.Unmarshal(who, &g); err != nil || g == nil || g.Key == "" {
		return nil
	}
	if r.known == nil || len(r.known) >= maxKnown {
		r.known = map[string]*Caller{}
	}
	c := NewCaller(g.Key, g.Name, g.Scopes, g.Devices, g.Tools)
	r.known[string(who)] = c
	return c
}
