package mcpserver

import (
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/json"
	"slices"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/jsonspan"
)

// maxIndexes is how many lists of tools are kept ready for hosts. Devices of one
// firmware share a list.
const maxIndexes = 256

// toolIndex is one list of tools as hosts see it. It does not change.
type toolIndex struct {
	hash   devices.Hash
	tools  []indexed
	byHost map[string]*indexed
	byName map[string]*indexed
}

// indexed is one tool of it.
type indexed struct {
	name     string            // the device's
	sum      [sha256.Size]byte // of all the device says of it
	userOnly bool
	tool     *mcp.Tool // cleaned, under a host's name
}

func newToolIndex(c *catalog.Catalog, replaced func()) *toolIndex {
	x := &toolIndex{hash: c.Hash, byHost: map[string]*indexed{}, byName: map[string]*indexed{}}
	var names []string
	for i := range c.Tools {
		t := &c.Tools[i]
		if t.Name == "" || c.Tool(t.Name) != t { // the device runs the first of a name
			continue
		}
		names = append(names, t.Name)
		x.tools = append(x.tools, indexed{name: t.Name, sum: sha256.Sum256(t.Raw), userOnly: t.UserOnly, tool: newTool(t, replaced)})
	}
	for i, name := range hostNames(names) {
		t := &x.tools[i]
		t.tool.Name = name
		x.byHost[name], x.byName[t.name] = t, t
	}
	return x
}

func newTool(t *catalog.Tool, replaced func()) *mcp.Tool {
	description, _ := jsonspan.String(jsonspan.Member(t.Raw, "description"))
	schema, note := cleanSchema(jsonspan.Member(t.Raw, "inputSchema"))
	tool := &mcp.Tool{Title: clean(t.Name, maxTitle), Description: untrustedMark + clean(description, maxDescription), InputSchema: json.RawMessage(schema),
		Meta: mcp.Meta{metaOriginal: clean(t.Name, maxTitle), metaUntrusted: true}, Annotations: annotate(t.Name, schema)}
	if note != "" {
		replaced()
		tool.Meta[metaNote] = note
		tool.Description += " (" + note + ")"
	}
	return tool
}

// readers are the tools of stock firmware that only read. They take no arguments:
// one that does is another tool under that name.
var readers = []string{"self.get_device_status", "self.get_system_info", "self.screen.get_info", "self.battery.get_level"}

// annotate tells hosts what is known of stock firmware's tools; of others they
// assume the worst, whatever they are called.
func annotate(name string, schema []byte) *mcp.ToolAnnotations {
	switch {
	case slices.Contains(readers, name) && membersOf(jsonspan.Member(schema, "properties")) == 0:
		return &mcp.ToolAnnotations{ReadOnlyHint: true, IdempotentHint: true}
	case access.IsUserTool(name):
		destructive := true
		return &mcp.ToolAnnotations{DestructiveHint: &destructive}
	}
	return nil
}

// find returns a tool by the device's name for it, or by a host's.
func (x *toolIndex) find(name string) *indexed {
	if t := x.byName[name]; t != nil {
		return t
	}
	return x.byHost[name]
}

// indexCache keeps the lists used last.
type indexCache struct {
	mu     sync.Mutex
	byHash map[devices.Hash]*list.Element // of *toolIndex
	recent *list.List
}

func newIndexCache() *indexCache {
	return &indexCache{byHash: map[devices.Hash]*list.Element{}, recent: list.New()}
}

func (c *indexCache) get(h devices.Hash) *toolIndex {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.byHash[h]
	if e == nil {
		return nil
	}
	c.recent.MoveToFront(e)
	return e.Value.(*toolIndex)
}

func (c *indexCache) put(x *toolIndex) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byHash[x.hash] != nil {
		return
	}
	c.byHash[x.hash] = c.recent.PushFront(x)
	if c.recent.Len() > maxIndexes {
		delete(c.byHash, c.recent.Remove(c.recent.Back()).(*toolIndex).hash)
	}
}

// view is what one caller sees of one device's tools.
type view struct {
	device devices.View
	index  *toolIndex // nil: none are known
	tools  []viewed
}

// viewed is a tool that the caller may call.
type viewed struct {
	*indexed
	confirm bool // a person has to say yes
}

// viewOf reads a device with the tools that its caller may call.
func (s *Server) viewOf(ctx context.Context, by access.By, id devices.ID) (*view, error) {
	if err := s.opt.Service.Permit(ctx, by, access.ScopeRead, id); err != nil {
		return nil, err
	}
	d, err := s.opt.Service.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	v := &view{device: d}
	hash := d.Presence.Catalog
	if hash == (devices.Hash{}) {
		return v, nil
	}
	if v.index = s.index.get(hash); v.index == nil {
		catalog, err := s.opt.Service.Catalog(ctx, hash)
		if err != nil {
			return nil, err
		}
		v.index = newToolIndex(catalog, func() { s.stats.Replaced.Add(1) })
		s.index.put(v.index)
	}
	guard := s.opt.Service.Guard()
	for i := range v.index.tools {
		t := &v.index.tools[i]
		decision := guard.Decide(access.Question{By: by, Device: string(id), Labels: d.Device.Labels, Tool: t.name, UserOnly: t.userOnly, Listed: true})
		if decision.Action != access.Deny {
			v.tools = append(v.tools, viewed{t, decision.Action == access.Confirm})
		}
	}
	return v, nil
}

// mark tells two views apart.
func (v *view) mark() (sum [sha256.Size]byte) {
	h := sha256.New()
	for _, t := range v.tools {
		h.Write(t.sum[:])
	}
	h.Sum(sum[:0])
	return sum
}
