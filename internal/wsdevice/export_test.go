package wsdevice

import "time"

// Age makes the times of all connections older, and sweeps them.
func (f *Front) Age(by time.Duration) {
	for _, c := range f.conns.Append(nil, func(*conn) bool { return true }) {
		c.lastSent.Add(-int64(by))
		c.lastReceived.Add(-int64(by))
	}
	f.Sweep()
}

// Sweep sweeps every connection.
func (f *Front) Sweep() {
	for _, c := range f.conns.Append(nil, func(*conn) bool { return true }) {
		c.sweep(time.Now())
	}
}
