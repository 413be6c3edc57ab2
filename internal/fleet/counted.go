package fleet

import (
	"sync"
	"time"

	"fleetd/internal/devices"
)

// maxCounted bounds the selections whose counts are kept.
const maxCounted = 100

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

func (c *counted) get(key string, count func() (devices.Counts, error)) (devices.Counts, error) {
	c.mu.Lock()
	one := c.all[key]
	if one == nil || time.Since(one.at) > countsLife {
		if c.all == nil || len(c.all) >= maxCounted {
			c.all = map[string]*countedOnce{}
		}
		one = &countedOnce{done: make(chan struct{}), at: time.Now()}
		c.all[key] = one
		c.mu.Unlock()
		one.counts, one.err = count()
		close(one.done)
		if one.err != nil {
			c.drop(key, one)
		}
		return one.counts, one.err
	}
	c.mu.Unlock()
	<-one.done
	return one.counts, one.err
}

func (c *counted) drop(key string, one *countedOnce) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all[key] == one {
		delete(c.all, key)
	}
}
