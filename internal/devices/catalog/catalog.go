// Package catalog holds tool lists by content: their tools, the check of arguments against a
// tool's schema, the differences of two lists, and the search for tools.
//
// A Cache has one lock, which is held only for lookups; lists are parsed and compared
// without it.
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

// Catalog is one distinct tool list, shared by every device that has it. It is immutable.
type Catalog struct {
	Hash  devices.Hash
	JSON  []byte // the array as received, pages joined
	Tools []Tool
	index map[string]int
	first func() []byte // event fields of a device that has this as its first list
}

// UpgradeFirmware is the tool that installs a firmware image.
const UpgradeFirmware = "self.upgrade_firmware"

// Tool is one element of a catalog.
type Tool struct {
	Name     string
	Raw      json.RawMessage // exactly as sent; part of the catalog's JSON
	UserOnly bool            // annotations.audience is ["user"]: not meant for a language model
	schema   schema
}

// New parses a tool list, as in mcpclient.ToolList.JSON. It keeps text.
func New(text []byte) (*Catalog, error) {
	c := &Catalog{Hash: sha256.Sum256(text), JSON: text, index: map[string]int{}}
	walk := jsonspan.Array(text)
	for walk.Next() {
		tool, err := parseTool(walk.Value())
		if err != nil {
			return nil, fmt.Errorf("tool %d: %w", len(c.Tools), err)
		}
		if _, dup := c.index[tool.Name]; !dup { // the device runs the first tool of a name
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

// Cache holds one copy of every list that a node has received. It is safe for concurrent
// use.
type Cache struct {
	room int64 // bytes, as counted by Catalog.size

	mu      sync.RWMutex
	byHash  map[devices.Hash]*Catalog
	byELF   map[string]*Catalog // the complete list of a firmware image; nil if its devices have different lists
	bytes   int64
	evicted time.Time // last eviction
}

// NewCache returns a Cache for lists of a total size in bytes.
func NewCache(room int64) *Cache {
	return &Cache{room: room, byHash: map[devices.Hash]*Catalog{}, byELF: map[string]*Catalog{}}
}

// size estimates the memory of the catalog in bytes.
func (c *Catalog) size() int64 { return int64(len(c.JSON) + 300*len(c.Tools) + 500) }

// Get returns the list with this hash; nil if it is not in memory.
func (c *Cache) Get(h devices.Hash) *Catalog {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.byHash[h]
}

// ToolNames returns the names of all tools in all lists, each once.
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

// ForELF returns the list of all devices with a firmware image; nil if it is unknown, or they
// have different lists.
func (c *Cache) ForELF(elf string) *Catalog {
	if elf == "" {
		return nil
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.byELF[elf]
}

// SetForELF records that a device with a firmware image has this list. If devices with the
// same image have different lists, none is shown for another device: a device reports its
// image itself, and a false report could otherwise show forged tools for other devices.
func (c *Cache) SetForELF(elf string, cat *Catalog) {
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

// Intern returns the shared catalog with this text. It parses and copies the text only if its
// hash is new. The error is ErrNoRoom, or that of New.
func (c *Cache) Intern(text []byte) (cat *Catalog, isNew bool, err error) {
	h := devices.Hash(sha256.Sum256(text))
	if cat := c.Get(h); cat != nil {
		return cat, false, nil
	}
	if _, bytes := c.Usage(); bytes+int64(len(text)) > c.room {
		return nil, false, ErrNoRoom // checked first, to avoid a useless copy
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

// Limits of the cache.
const (
	// maxCatalogs is how many lists are kept before unused ones are dropped.
	maxCatalogs = 2000
	// maxImages is how many firmware images are kept. Devices report the image, and may
	// report any number.
	maxImages = 10_000
	// evictEvery is the shortest interval of evictions, which visit every device.
	evictEvery = time.Second
)

// ErrNoRoom is the error of Intern if a list does not fit.
var ErrNoRoom = errors.New("the node has too many different tool lists in memory; raise --catalog-memory")

// Evict drops the lists that no device has any more, and, if there is still too little room,
// those of devices that are not connected here, which the database has. inUse returns the
// lists of all devices, true if one of these devices is connected. It returns how many were
// dropped.
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

// IsOverfull reports whether there are more lists than maxCatalogs.
func (c *Cache) IsOverfull() bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(c.byHash) > maxCatalogs
}

// Usage returns the number of lists in memory and their size in bytes.
func (c *Cache) Usage() (lists int, bytes int64) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(c.byHash), c.bytes
}

// Text returns the list as it is stored.
func (c *Catalog) Text(now time.Time) devices.CatalogText {
	return devices.CatalogText{Hash: c.Hash, Tools: c.JSON, Count: len(c.Tools), FirstSeen: now}
}

// Diff returns the names of tools that were added, removed, or changed in any byte.
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

// MaxDiffNames is how many names each list of a catalog event contains at most.
const MaxDiffNames = 200

// EventFields returns the members of the event that a device's list has changed; before is
// nil if it had none.
func EventFields(before, after *Catalog, partial bool) []byte {
	if before == nil && !partial { // the same for every new device
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
