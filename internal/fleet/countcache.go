package fleet

import (
	"context"
	"errors"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/selector"
)

const (
	// maxCachedCounts is how many selections have cached counts.
	maxCachedCounts = 100
	// countsLifetime is how long counts of a selection are reused once they are there.
	countsLifetime = 10 * time.Second
	// countTimeout is how long counting a selection may take.
	countTimeout = 30 * time.Second
)

var errNotCounted = errors.New("internal error (bug): the devices were not counted")

// countCache caches the counts of selections. Concurrent requests for the same
// selection share one query.
type countCache struct {
	mu  sync.Mutex
	all map[string]*countResult
}

type countResult struct {
	done   chan struct{}
	counts devices.Counts
	err    error
	at     time.Time // when they were there; zero: they are not yet
}

// isOld reports whether the devices are to be counted again. The caller holds the cache's lock.
func (one *countResult) isOld() bool {
	return one == nil || !one.at.IsZero() && time.Since(one.at) > countsLifetime
}

// cachedCounts counts the devices of a selection, or returns the cached counts. The
// query is independent of its callers: it continues when they leave, for at most
// countTimeout.
func (s *Service) cachedCounts(ctx context.Context, sel selector.Selector) (devices.Counts, error) {
	c, key := &s.counts, sel.String()
	c.mu.Lock()
	one := c.all[key]
	if one.isOld() {
		if c.all == nil || len(c.all) >= maxCachedCounts {
			c.all = map[string]*countResult{}
		}
		one = &countResult{done: make(chan struct{})}
		if !s.tasks.Run(func() {
			ctx, cancel := context.WithTimeout(s.tasks.Context(), countTimeout)
			defer cancel()
			defer close(one.done)
			defer c.end(key, one)
			one.err = errNotCounted // after a panic
			one.counts, one.err = s.ports.Records.CountsOf(ctx, devices.ListQuery{Select: sel})
		}) {
			c.mu.Unlock()
			return devices.Counts{}, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "this node is stopping; send the request to another node"}
		}
		c.all[key] = one
	}
	c.mu.Unlock()
	select {
	case <-one.done:
		return one.counts, one.err
	case <-ctx.Done():
		return devices.Counts{}, ctx.Err()
	}
}

// end keeps counts for others, and forgets an error.
func (c *countCache) end(key string, one *countResult) {
	c.mu.Lock()
	defer c.mu.Unlock()
	one.at = time.Now()
	if one.err != nil && c.all[key] == one {
		delete(c.all, key)
	}
}
