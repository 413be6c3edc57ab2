package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
)

// CatalogUsage returns the number of tool lists in memory and their size in bytes, which
// Config.CatalogMemory limits.
func (s *Hub) CatalogUsage() (lists int, bytes int64) { return s.catalogs.Usage() }

// intern is catalogs.Intern; it evicts lists if there is no room.
func (s *Hub) intern(text []byte) (cat *catalog.Catalog, isNew bool, err error) {
	cat, isNew, err = s.catalogs.Intern(text)
	if errors.Is(err, catalog.ErrNoRoom) {
		s.evictCatalogs()
		if cat, isNew, err = s.catalogs.Intern(text); errors.Is(err, catalog.ErrNoRoom) {
			s.stats.CatalogsRefused.Add(1)
		}
	}
	return cat, isNew, err
}

func (s *Hub) evictCatalogs() {
	s.stats.CatalogsEvicted.Add(uint64(s.catalogs.Evict(time.Now(), s.catalogsInUse)))
}

// catalogsInUse returns the last list of every device; true if one of its devices is
// connected here.
func (s *Hub) catalogsInUse() map[devices.Hash]bool {
	used := map[devices.Hash]bool{}
	s.table.each(func(e *entry) {
		e.mu.Lock()
		used[e.catalog] = used[e.catalog] || e.session.Load() != nil
		e.mu.Unlock()
	})
	return used
}

// Catalog returns one tool list, from memory if a device of this node has had it.
func (s *Hub) Catalog(ctx context.Context, h devices.Hash) (*catalog.Catalog, error) {
	if cat := s.catalogs.Get(h); cat != nil {
		return cat, nil
	}
	text, err := s.ports.Catalogs.Catalog(ctx, h)
	if errors.Is(err, devices.ErrNotFound) {
		return nil, devices.Errorf(devices.CodeNotFound, "unknown catalog %s", h)
	}
	if err != nil {
		return nil, fmt.Errorf("read catalog: %w", err)
	}
	return catalog.New(text.Tools)
}

// ToolNames returns the names of all tools in all lists in memory, each once.
func (s *Hub) ToolNames() []string { return s.catalogs.ToolNames() }
