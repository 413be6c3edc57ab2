package mcpserver

import (
	"container/list"
	"sync"
)

// lru keeps the most recently used values. It is safe for concurrent use.
type lru[K comparable, V any] struct {
	limit  int
	mu     sync.Mutex
	byKey  map[K]*list.Element // of *lruEntry[K, V]
	recent *list.List
}

type lruEntry[K comparable, V any] struct {
	key   K
	value V
}

func newLRU[K comparable, V any](limit int) *lru[K, V] {
	return &lru[K, V]{limit: limit, byKey: map[K]*list.Element{}, recent: list.New()}
}

// get returns the value of a key, or the zero value.
func (c *lru[K, V]) get(key K) (value V) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.byKey[key]
	if e == nil {
		return value
	}
	c.recent.MoveToFront(e)
	return e.Value.(*lruEntry[K, V]).value
}

// put replaces the value of a key.
func (c *lru[K, V]) put(key K, value V) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.byKey[key]; e != nil {
		e.Value.(*lruEntry[K, V]).value = value
		c.recent.MoveToFront(e)
		return
	}
	c.byKey[key] = c.recent.PushFront(&lruEntry[K, V]{key, value})
	if c.recent.Len() > c.limit {
		delete(c.byKey, c.recent.Remove(c.recent.Back()).(*lruEntry[K, V]).key)
	}
}
