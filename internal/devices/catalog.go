package devices

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"fleetd/internal/jsonspan"
)

// Catalog is one distinct tool list, shared by every device that has it. It
// does not change.
type Catalog struct {
	Hash  Hash
	JSON  []byte // the array as received, page borders left out
	Tools []Tool
	index map[string]int
	first func() []byte // fields of the event that a device has this as its first list
}

// Tool is one element of a catalog.
type Tool struct {
	Name     string
	Raw      json.RawMessage // exactly as sent; points into the catalog's JSON
	UserOnly bool            // annotations.audience is ["user"]: not meant for a language model
	schema   schema
}

// NewCatalog parses a tool list, as mcpclient.ToolList.JSON. It keeps text.
func NewCatalog(text []byte) (*Catalog, error) {
	c := &Catalog{Hash: sha256.Sum256(text), JSON: text, index: map[string]int{}}
	walk := jsonspan.Array(text)
	for walk.Next() {
		tool, err := parseTool(walk.Value())
		if err != nil {
			return nil, fmt.Errorf("tool %d: %w", len(c.Tools), err)
		}
		if _, dup := c.index[tool.Name]; !dup { // the device runs the first of that name
			c.index[tool.Name] = len(c.Tools)
		}
		c.Tools = append(c.Tools, tool)
	}
	c.first = sync.OnceValue(func() []byte { return diffFields(nil, c, false) })
	return c, walk.Err()
}

// Tool returns the tool with this name, nil if the list has none.
func (c *Catalog) Tool(name string) *Tool {
	if i, ok := c.index[name]; ok {
		return &c.Tools[i]
	}
	return nil
}

func parseTool(raw []byte) (Tool, error) {
	t := Tool{Raw: raw}
	walk := jsonspan.Object(raw)
	for walk.Next() {
		switch string(walk.Key()) {
		case "name":
			if t.Name == "" {
				t.Name, _ = jsonspan.String(walk.Value())
			}
		case "annotations":
			t.UserOnly = isUserOnly(walk.Value())
		case "inputSchema":
			t.schema = parseSchema(walk.Value())
		}
	}
	return t, walk.Err()
}

// isUserOnly reads annotations {"audience":["user"]} (mcp_server.h:232-270).
func isUserOnly(annotations []byte) bool {
	walk := jsonspan.Object(annotations)
	for walk.Next() {
		if string(walk.Key()) != "audience" {
			continue
		}
		user, other := false, false
		audience := jsonspan.Array(walk.Value())
		for audience.Next() {
			who, _ := jsonspan.StringBytes(audience.Value())
			if string(who) == "user" {
				user = true
			} else {
				other = true
			}
		}
		return user && !other
	}
	return false
}

// catalogs holds one copy of every list this node has met.
type catalogs struct {
	mu     sync.RWMutex
	byHash map[Hash]*Catalog
	byELF  map[string]*Catalog // the complete list of a firmware image; nil if devices with it disagree
}

func newCatalogs() *catalogs {
	return &catalogs{byHash: map[Hash]*Catalog{}, byELF: map[string]*Catalog{}}
}

func (c *catalogs) get(h Hash) *Catalog {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.byHash[h]
}

func (c *catalogs) forELF(elf string) *Catalog {
	if elf == "" {
		return nil
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.byELF[elf]
}

// learn remembers that a firmware image had this list. What devices with the
// same image do not agree on is never shown for another: the image is what a
// device says of itself, and one could say it to put words into the others'
// mouths.
func (c *catalogs) learn(elf string, cat *Catalog) {
	if elf == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if known, ok := c.byELF[elf]; ok && known != cat {
		cat = nil
	}
	c.byELF[elf] = cat
}

// intern returns the shared catalog with this text, parsing and copying it
// only if its hash is new.
func (c *catalogs) intern(text []byte) (cat *Catalog, isNew bool, err error) {
	h := Hash(sha256.Sum256(text))
	if cat := c.get(h); cat != nil {
		return cat, false, nil
	}
	cat, err = NewCatalog(bytes.Clone(text))
	if err != nil {
		return nil, false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if first := c.byHash[h]; first != nil {
		return first, false, nil
	}
	c.byHash[h] = cat
	return cat, true, nil
}

// maxCatalogs is how many lists are kept before those that nobody has any more
// are dropped.
const maxCatalogs = 2000

// drop forgets the lists that inUse does not name, once there are many.
func (c *catalogs) drop(inUse func() map[Hash]bool) {
	c.mu.RLock()
	many := len(c.byHash) > maxCatalogs
	c.mu.RUnlock()
	if !many {
		return
	}
	used := inUse()
	c.mu.Lock()
	defer c.mu.Unlock()
	for h := range c.byHash {
		if !used[h] {
			delete(c.byHash, h)
		}
	}
	for elf, cat := range c.byELF {
		if cat != nil && !used[cat.Hash] {
			delete(c.byELF, elf)
		}
	}
}

// catalogsInUse names the last list of every device.
func (s *Service) catalogsInUse() map[Hash]bool {
	used := map[Hash]bool{}
	s.hub.each(func(e *entry) {
		e.mu.Lock()
		used[e.catalog] = true
		e.mu.Unlock()
	})
	return used
}

func (c *Catalog) text(now time.Time) CatalogText {
	return CatalogText{Hash: c.Hash, Tools: c.JSON, Count: len(c.Tools), FirstSeen: now}
}

// Diff names the tools that are new in after, gone from it, or different in
// any byte.
func Diff(before, after *Catalog) (added, removed, changed []string) {
	if before == nil {
		before = &Catalog{}
	}
	for i := range after.Tools {
		tool := &after.Tools[i]
		old := before.Tool(tool.Name)
		switch {
		case old == nil:
			added = append(added, tool.Name)
		case !bytes.Equal(old.Raw, tool.Raw):
			changed = append(changed, tool.Name)
		}
	}
	for i := range before.Tools {
		if name := before.Tools[i].Name; after.Tool(name) == nil {
			removed = append(removed, name)
		}
	}
	return added, removed, changed
}
