package database

import (
	"sync"
	"time"
)

// Watch tells which holders of turns and leases have stopped: those that have not renewed for as long as theirs lasts, by the
// monotonic clock of this process. Clocks that are wrong, or stepped, end and prolong nothing. The zero value is ready to use
// and safe for concurrent use.
type Watch struct {
	mu   sync.Mutex
	seen map[string]sight
}

// sight is what a holder last wrote, and when this process first read it.
type sight struct {
	written string
	at      time.Time
}

// HasStopped reports whether what is written has not changed for so long. now is a time of time.Now, from before the reading.
func (w *Watch) HasStopped(name, written string, now time.Time, lasts time.Duration) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	s, known := w.seen[name]
	if !known || s.written != written {
		if w.seen == nil {
			w.seen = map[string]sight{}
		}
		w.seen[name] = sight{written, now}
		return false
	}
	return now.Sub(s.at) >= lasts
}
