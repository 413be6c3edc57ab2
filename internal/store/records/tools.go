package records

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/selector"
	"fleetd/internal/store/database"
)

const (
	// maxToolBytes limits the cached names of tools. Beyond it all are dropped and read again.
	maxToolBytes = 32 << 20
	// maxCatalogs is from how many lists in use on a selection by tools is evaluated only in
	// memory.
	maxCatalogs = 2000
	// toolTime is how long one request reads lists that are not cached.
	toolTime = 30 * time.Millisecond
)

// toolNames caches the names of the tools of each list: lists never change. It is safe for concurrent
// use; the zero value is ready to use.
type toolNames struct {
	mu    sync.Mutex
	names map[string][]string // by hash
	bytes int
}

func (n *toolNames) get(hash string) (names []string, known bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	names, known = n.names[hash]
	return names, known
}

func (n *toolNames) put(hash string, names []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	size := 128
	for _, name := range names {
		size += 16 + len(name)
	}
	if n.names == nil || n.bytes+size > maxToolBytes {
		n.names, n.bytes = map[string][]string{}, 0
	}
	if _, twice := n.names[hash]; !twice {
		n.names[hash] = names
		n.bytes += size
	}
}

// toolMatch contains the lists in use with a tool that matches a term.
type toolMatch struct{ hashes []string }

// matchTools finds the lists of a term about tools; nil if there are too many, or if they could not be
// read in time: then the term is evaluated only in memory, and the next request has less to read.
func (s *Records) matchTools(ctx context.Context, t *selector.Term) (*toolMatch, error) {
	inUse, err := s.distinct(ctx, "presence", `catalog COLLATE "binary"`, "catalog <> ''", nil, maxCatalogs+1)
	if err != nil || len(inUse) > maxCatalogs {
		return nil, err
	}
	names, complete, err := s.readTools(ctx, inUse, time.Now().Add(toolTime))
	if err != nil || !complete {
		return nil, err
	}
	m := &toolMatch{hashes: []string{}}
	for _, hash := range inUse {
		if slices.ContainsFunc(names[hash], func(name string) bool { return namesTool(t, name) }) {
			m.hashes = append(m.hashes, hash)
		}
	}
	return m, nil
}

func namesTool(t *selector.Term, name string) bool {
	return t.Op == selector.OpHas || t.Op == selector.OpLacks || slices.ContainsFunc(t.Values, func(v selector.Value) bool { return v.Match(name) })
}

// readTools returns the names of the tools of these lists: of all, or of those that could be read
// until a time.
func (s *Records) readTools(ctx context.Context, hashes []string, until time.Time) (names map[string][]string, complete bool, err error) {
	names = make(map[string][]string, len(hashes))
	var missing []string
	for _, hash := range hashes {
		if list, known := s.tools.get(hash); known {
			names[hash] = list
		} else {
			missing = append(missing, hash)
		}
	}
	const together = 8 // a list may have a megabyte
	for chunk := range slices.Chunk(missing, together) {
		if time.Now().After(until) {
			return names, false, nil
		}
		condition, arg := database.IDSet(s.db.Postgres(), "sha256", "$1", chunk)
		type list struct {
			hash  string
			names []string
		}
		lists, err := database.Collect(ctx, s.db.Read, func(scan func(...any) error) (l list, err error) {
			var text, encoding string
			if err := scan(&l.hash, &text, &encoding); err != nil {
				return l, err
			}
			tools, err := database.DecodeTools(text, encoding)
			if err != nil {
				return l, nil // not a valid list
			}
			var parsed []struct {
				Name string `json:"name"`
			}
			if json.Unmarshal(tools, &parsed) == nil {
				for _, tool := range parsed {
					l.names = append(l.names, tool.Name)
				}
			}
			return l, nil
		}, "SELECT sha256, tools, encoding FROM catalogs WHERE "+condition, arg)
		if err != nil {
			return nil, false, err
		}
		for _, l := range lists {
			names[l.hash] = l.names
			s.tools.put(l.hash, l.names)
		}
	}
	return names, true, nil
}

// selectable returns a row as selectors see it, with the names of the tools of lists.
func selectable(row *devices.Row, tools map[string][]string) selector.Device {
	out := devices.Selectable(&row.Device, &row.Presence)
	if tools != nil {
		names := tools[row.Presence.Catalog.String()]
		out.HasTool = func(match func(string) bool) bool { return slices.ContainsFunc(names, match) }
	}
	return out
}
