package fleet

import (
	"errors"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
)

// CatalogUsage is how many tool lists are in memory, and how many bytes they
// take, of which Config.CatalogMemory is the bound.
func (s *Service) CatalogUsage() (lists int, bytes int64) { return s.catalogs.Usage() }

// intern is catalogs.intern, after making room if there is none.
func (s *Service) intern(text []byte) (cat *catalog.Catalog, isNew bool, err error) {
	cat, isNew, err = s.catalogs.Intern(text)
	if errors.Is(err, catalog.ErrNoRoom) {
		s.evictCatalogs()
		if cat, isNew, err = s.catalogs.Intern(text); errors.Is(err, catalog.ErrNoRoom) {
			s.stats.CatalogsRefused.Add(1)
		}
	}
	return cat, isNew, err
}

func (s *Service) evictCatalogs() {
	s.stats.CatalogsEvicted.Add(uint64(s.catalogs.Evict(time.Now(), s.catalogsInUse)))
}

// catalogsInUse names the last list of every device; true if one that has it
// is connected here.
func (s *Service) catalogsInUse() map[devices.Hash]bool {
	used := map[devices.Hash]bool{}
	s.hub.each(func(e *entry) {
		e.mu.Lock()
		used[e.catalog] = used[e.catalog] || e.session.Load() != nil
		e.mu.Unlock()
	})
	return used
}
