package mcpserver

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"slices"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/cleantext"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/jsonspan"
)

// maxIndexes is the number of tool lists that are kept prepared for hosts. Devices
// with the same firmware share a list.
const maxIndexes = 256

// toolIndex is one list of tools as hosts see it. It is immutable.
type toolIndex struct {
	hash   devices.Hash
	tools  []indexedTool
	byHost map[string]*indexedTool
	byName map[string]*indexedTool
}

// indexedTool is one tool of a toolIndex.
type indexedTool struct {
	name     string            // the device's
	sum      [sha256.Size]byte // of the device's definition of the tool
	userOnly bool
	tool     *mcp.Tool // cleaned, with its name for hosts
}

func newToolIndex(c *catalog.Catalog, replaced func()) *toolIndex {
	x := &toolIndex{hash: c.Hash, byHost: map[string]*indexedTool{}, byName: map[string]*indexedTool{}}
	var names []string
	for i := range c.Tools {
		t := &c.Tools[i]
		if t.Name == "" || c.Tool(t.Name) != t { // of several tools with one name, the device runs the first
			continue
		}
		names = append(names, t.Name)
		x.tools = append(x.tools, indexedTool{name: t.Name, sum: sha256.Sum256(t.Raw), userOnly: t.UserOnly, tool: newTool(t, replaced)})
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
	tool := &mcp.Tool{Title: cleantext.Short(t.Name, maxTitle), Description: untrustedMark + cleantext.Short(description, maxDescription), InputSchema: json.RawMessage(schema),
		Meta: mcp.Meta{metaOriginal: cleantext.Short(t.Name, maxTitle), metaUntrusted: true}, Annotations: annotate(t.Name, schema)}
	if note != "" {
		replaced()
		tool.Meta[metaNote] = note
		tool.Description += " (" + note + ")"
	}
	return tool
}

// readOnlyTools are the read-only tools of stock firmware. They take no arguments: a tool of
// the same name with arguments is a different one.
var readOnlyTools = []string{"self.get_device_status", "self.get_system_info", "self.screen.get_info", "self.battery.get_level"}

// annotate returns the hints for tools of stock firmware. For other tools hosts assume
// the worst, whatever their name is.
func annotate(name string, schema []byte) *mcp.ToolAnnotations {
	switch {
	case slices.Contains(readOnlyTools, name) && countMembers(jsonspan.Member(schema, "properties")) == 0:
		return &mcp.ToolAnnotations{ReadOnlyHint: true, IdempotentHint: true}
	case access.IsUserTool(name):
		destructive := true
		return &mcp.ToolAnnotations{DestructiveHint: &destructive}
	}
	return nil
}

// find returns a tool by the device's name or by its name for hosts.
func (x *toolIndex) find(name string) *indexedTool {
	if t := x.byName[name]; t != nil {
		return t
	}
	return x.byHost[name]
}

// view contains the tools of a device that one caller sees.
type view struct {
	device devices.View
	index  *toolIndex // nil: the tools are unknown
	tools  []viewedTool
}

// viewedTool is a tool that the caller may call.
type viewedTool struct {
	*indexedTool
	confirm bool // a person must confirm calls
}

// namedView returns what a caller may see of the device with this id or name.
func (s *Server) namedView(ctx context.Context, by access.Principal, text string) (*view, error) {
	id, err := s.deviceOf(ctx, by, text)
	if err != nil {
		return nil, err
	}
	return s.viewOf(ctx, by, id)
}

// viewOf returns a device with the tools that the caller may call.
func (s *Server) viewOf(ctx context.Context, by access.Principal, id devices.ID) (*view, error) {
	if err := s.opt.Service.Permit(ctx, by, access.ScopeRead, id); err != nil {
		return nil, err
	}
	d, err := s.opt.Service.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	return s.viewOn(ctx, by, d)
}

// viewOn is viewOf for a device that has been read for the caller.
func (s *Server) viewOn(ctx context.Context, by access.Principal, d devices.View) (*view, error) {
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
		s.index.put(hash, v.index)
	}
	guard := s.opt.Service.Guard()
	for i := range v.index.tools {
		t := &v.index.tools[i]
		decision := guard.Decide(access.Query{By: by, Device: string(d.Device.ID), Labels: d.Device.Labels, Tool: t.name, UserOnly: t.userOnly, Listed: true})
		if decision.Action != access.Deny {
			v.tools = append(v.tools, viewedTool{t, decision.Action == access.Confirm})
		}
	}
	return v, nil
}

// fingerprint returns a hash by which views are compared.
func (v *view) fingerprint() (sum [sha256.Size]byte) {
	h := sha256.New()
	for _, t := range v.tools {
		h.Write(t.sum[:])
	}
	h.Sum(sum[:0])
	return sum
}

// countMembers returns the number of members of an object.
func countMembers(object []byte) (n int) {
	for walk := jsonspan.Object(object); walk.Next(); n++ {
	}
	return n
}
