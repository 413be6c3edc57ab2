package devices

import "sync"

// Observers are called in turn, the newest first. It is safe for concurrent use.
type Observers[T any] struct {
	mu  sync.RWMutex
	all []T // immutable
}

// Add adds an observer.
func (o *Observers[T]) Add(observer T) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all = append([]T{observer}, o.all...)
}

// Each calls f for each observer, without a lock.
func (o *Observers[T]) Each(f func(T)) {
	o.mu.RLock()
	all := o.all
	o.mu.RUnlock()
	for _, observer := range all {
		f(observer)
	}
}
