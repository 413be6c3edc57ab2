package devices

import "slices"

// Turns is the order in which calls that wait for a device are made: callers take turns, and
// the calls of one caller keep their order. So one caller with many calls delays the first
// call of another by one. The owner's lock protects it.
type Turns struct{ waiting []turn }

// turn is one call that waits.
type turn struct {
	ready  chan bool
	caller string
	round  int // how many calls of the same caller wait before it
}

// Add adds a call. Its channel receives true when it is its turn, and false if it is refused
// because other callers, with fewer calls, came when most calls waited; it is closed with
// Close. Add returns nil if most calls wait and none of them makes room.
func (q *Turns) Add(caller string, most int) (ready chan bool) {
	own := 0
	for _, t := range q.waiting {
		if t.caller == caller {
			own++
		}
	}
	if len(q.waiting) >= most {
		last := len(q.waiting) - 1 // the call with the most of its caller's before it
		if last < 0 || q.waiting[last].round <= own {
			return nil
		}
		q.waiting[last].ready <- false
		q.waiting = q.waiting[:last]
	}
	ready = make(chan bool, 1)
	q.insert(turn{ready, caller, own})
	return ready
}

// insert puts a call after those of its own round and before those of later ones.
func (q *Turns) insert(t turn) {
	at := len(q.waiting)
	for at > 0 && q.waiting[at-1].round > t.round {
		at--
	}
	q.waiting = slices.Insert(q.waiting, at, t)
}

// Next passes the turn to the next call; it reports whether there was one.
func (q *Turns) Next() bool {
	if len(q.waiting) == 0 {
		return false
	}
	q.waiting[0].ready <- true
	q.remove(0)
	return true
}

// Remove takes back a call; it reports whether that still waited.
func (q *Turns) Remove(ready chan bool) bool {
	at := slices.IndexFunc(q.waiting, func(t turn) bool { return t.ready == ready })
	if at < 0 {
		return false
	}
	q.remove(at)
	return true
}

// remove takes a call out, and moves the later ones of its caller up by one round.
func (q *Turns) remove(at int) {
	gone := q.waiting[at]
	rest := slices.Delete(q.waiting, at, at+1)
	q.waiting = make([]turn, 0, len(rest))
	for _, t := range rest {
		if t.caller == gone.caller && t.round > gone.round {
			t.round--
		}
		q.insert(t)
	}
}

// Len is how many calls wait.
func (q *Turns) Len() int { return len(q.waiting) }

// Close ends the wait of all calls.
func (q *Turns) Close() {
	for _, t := range q.waiting {
		close(t.ready)
	}
	q.waiting = nil
}
