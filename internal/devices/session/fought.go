package session

import "time"

// fought tells whether clients take the id from each other.
func (e *entry) fought(now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.takeovers.Refuses(now.UnixNano())
}
