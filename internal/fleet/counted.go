package fleet

import (
	"context"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/selector"
)

const (
	// maxCounted bounds the selections whose counts are kept.
	maxCounted = 100
	// countsLife is how long counts of a selection are given again.
	countsLife = 10 * time.Second
	// countLimit is how long counting a selection may take.
	countLimit = 30 * time.Second
)

// counted keeps the counts of selections for a while. Callers that ask for the
// same at once share one answer.
type counted struct {
	mu  sync.Mutex
	all map[string]*countedOnce
}

type countedOnce struct {
	done   chan struct{}
	counts devices.Counts
	err    error
	at     time.Time
}

// countOf counts the devices of a selection, unless that was done a while ago or is
// being done. The counting belongs to none of its callers: it goes on when they
// leave, for countLimit at most.
func (s *Service) countOf(ctx context.Context, sel selector.Selector) (devices.Counts, error) {
	c, key := &s.counted, sel.String()
	c.mu.Lock()
	one := c.all[key]
	if one == nil || time.Since(one.at) > countsLife {
		if c.all == nil || len(c.all) >= maxCounted {
			c.all = map[string]*countedOnce{}
		}
		one = &countedOnce{done: make(chan struct{}), at: time.Now()}
		if !s.tasks.Run(func() {
			ctx, cancel := context.WithTimeout(s.tasks.Context(), countLimit)
			defer cancel()
			defer close(one.done)
			if one.counts, one.err = s.ports.Records.CountsOf(ctx, devices.ListQuery{Select: sel}); one.err != nil {
				c.drop(key, one)
			}
		}) {
			c.mu.Unlock()
			return devices.Counts{}, &devices.Error{Code: devices.CodeUnavailable, Part: "node", Detail: "the node stops; ask another"}
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

func (c *counted) drop(key string, one *countedOnce) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all[key] == one {
		delete(c.all, key)
	}
}
