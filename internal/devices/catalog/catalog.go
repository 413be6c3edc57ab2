// Package catalog holds tool lists by their content: what their tools are, whether
// arguments fit a tool's schema, how two lists differ, and which tools match words.
//
// A Cache has one lock, which is held for lookups alone; lists are parsed and
// compared outside it.
package catalog

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// Catalog is one distinct tool list, shared by every device that has it. It
// does not change.
type Catalog struct {
	Hash  devices.Hash
	JSON  []byte // the array as received, page borders left out
	Tools []Tool
	index map[string]int
	first func() []byte // fields of the event that a device has this as its first list
}

// UpgradeFirmware is the tool that installs another firmware image.
const UpgradeFirmware = "self.upgrade_firmware"

// Tool is one element of a catalog.
type Tool struct {
	Name     string
	Raw      json.RawMessage // exactly as sent; points into the catalog's JSON
	UserOnly bool            // annotations.audience is ["user"]: not meant for a language model
	schema   schema
}

// New parses a tool list, as mcpclient.ToolList.JSON. It keeps text.
func New(text []byte) (*Catalog, error) {
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

// Cache holds one copy of every list that a node has met. It is safe for
// concurrent use.
type Cache struct {
	room int64 // bytes, as Catalog.size counts them

	mu      sync.RWMutex
	byHash  map[devices.Hash]*Catalog
	byELF   map[string]*Catalog // the complete list of a firmware image; nil if devices with it disagree
	bytes   int64
	evicted time.Time // when room was last made
}

// NewCache returns a Cache for so many bytes of lists.
func NewCache(room int64) *Cache {
	return &Cache{room: room, byHash: map[devices.Hash]*Catalog{}, byELF: map[string]*Catalog{}}
}

// size is about what the catalog takes in memory.
func (c *Catalog) size() int64 { return int64(len(c.JSON) + 300*len(c.Tools) + 500) }

// Get returns the list with this hash; nil if it is not in memory.
func (c *Cache) Get(h devices.Hash) *Catalog {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.byHash[h]
}

// ToolNames are the names of all tools in all lists, each once.
func (c *Cache) ToolNames() []string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	names := map[string]struct{}{}
	for _, cat := range c.byHash {
		for i := range cat.Tools {
			names[cat.Tools[i].Name] = struct{}{}
		}
	}
	return slices.Collect(maps.Keys(names))
}

// ForELF returns the list that all devices with a firmware image had; nil if none
// is known, or they differ.
func (c *Cache) ForELF(elf string) *Catalog {
	if elf == "" {
		return nil
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.byELF[elf]
}

// Learn remembers that a firmware image had this list. What devices with the
// same image do not agree on is never shown for another: the image is what a
// device says of itself, and one could say it to put words into the others'
// mouths.
func (c *Cache) Learn(elf string, cat *Catalog) {
	if elf == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	known, ok := c.byELF[elf]
	switch {
	case ok && known != cat:
		cat = nil
	case !ok && len(c.byELF) >= maxImages:
		return
	}
	c.byELF[elf] = cat
}

// Intern returns the shared catalog with this text, parsing and copying it
// only if its hash is new. The error is ErrNoRoom, or that of New.
func (c *Cache) Intern(text []byte) (cat *Catalog, isNew bool, err error) {
	h := devices.Hash(sha256.Sum256(text))
	if cat := c.Get(h); cat != nil {
		return cat, false, nil
	}
	if _, bytes := c.Usage(); bytes+int64(len(text)) > c.room {
		return nil, false, ErrNoRoom // before it is copied and parsed for nothing
	}
	cat, err = New(bytes.Clone(text))
	if err != nil {
		return nil, false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if first := c.byHash[h]; first != nil {
		return first, false, nil
	}
	if c.bytes+cat.size() > c.room {
		return nil, false, ErrNoRoom
	}
	c.bytes += cat.size()
	c.byHash[h] = cat
	return cat, true, nil
}

// Bounds of what is kept in memory.
const (
	// maxCatalogs is how many lists are kept before those that nobody has any
	// more are dropped.
	maxCatalogs = 2000
	// maxImages is how many firmware images are known with their list. The
	// image is what a device says of itself, as often as it likes.
	maxImages = 10_000
	// evictEvery is how often room is made: that looks at every device.
	evictEvery = time.Second
)

// ErrNoRoom is the error of Intern for a list that does not fit.
var ErrNoRoom = errors.New("the node holds too many different tool lists; raise --catalog-memory")

// Evict drops the lists that no device has any more, and, if not enough room
// is left then, those of devices that are not connected here: the database has
// them. inUse names the lists that some device has, true if it is connected.
// It returns how many were dropped.
func (c *Cache) Evict(now time.Time, inUse func() map[devices.Hash]bool) (dropped int) {
	c.mu.Lock()
	due := now.Sub(c.evicted) >= evictEvery
	if due {
		c.evicted = now
	}
	c.mu.Unlock()
	if !due {
		return 0
	}
	used := inUse()
	c.mu.Lock()
	defer c.mu.Unlock()
	drop := func(h devices.Hash) {
		c.bytes -= c.byHash[h].size()
		delete(c.byHash, h)
		dropped++
	}
	for h := range c.byHash {
		if _, named := used[h]; !named {
			drop(h)
		}
	}
	for h := range c.byHash {
		if c.bytes <= c.room/4*3 {
			break
		}
		if !used[h] {
			drop(h)
		}
	}
	for elf, cat := range c.byELF {
		if cat != nil && c.byHash[cat.Hash] == nil {
			delete(c.byELF, elf)
		}
	}
	return dropped
}

// Many tells whether there are more lists than need to be kept.
func (c *Cache) Many() bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(c.byHash) > maxCatalogs
}

// Usage is how many lists are in memory, and how many bytes they take.
func (c *Cache) Usage() (lists int, bytes int64) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(c.byHash), c.bytes
}

// Text is the list as it is stored.
func (c *Catalog) Text(now time.Time) devices.CatalogText {
	return devices.CatalogText{Hash: c.Hash, Tools: c.JSON, Count: len(c.Tools), FirstSeen: now}
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

// MaxDiffNames bounds each list of names in a catalog event; the true sizes
// are in the catalogs themselves.
const MaxDiffNames = 200

// EventFields are the members of the event that a device has another list than
// before; before is nil if it had none.
func EventFields(before, after *Catalog, partial bool) []byte {
	if before == nil && !partial { // the same for every device that is new
		return after.first()
	}
	return diffFields(before, after, partial)
}

func diffFields(before, after *Catalog, partial bool) []byte {
	added, removed, changed := Diff(before, after)
	fields := jsonspan.AppendString([]byte(`"catalog":`), after.Hash.String())
	for _, part := range []struct {
		name  string
		names []string
	}{{"added", added}, {"removed", removed}, {"changed", changed}} {
		fields = append(fields, `,"`+part.name+`":[`...)
		for i, name := range part.names[:min(len(part.names), MaxDiffNames)] {
			if i > 0 {
				fields = append(fields, ',')
			}
			fields = jsonspan.AppendString(fields, name)
		}
		fields = append(fields, ']')
	}
	if partial {
		return append(fields, `,"partial":true`...)
	}
	return append(fields, `,"partial":false`...)
}
