package devicetest

import (
	"net"
	"sync"
	"time"
)

// Deadlines is a listener that notes the read deadlines of its connections: a
// front end that forgets to clear one ends the connection minutes later, which
// no test waits for.
type Deadlines struct {
	net.Listener

	mu   sync.Mutex
	sets int // of one that is not zero
	last time.Time
}

// Accept implements net.Listener.
func (d *Deadlines) Accept() (net.Conn, error) {
	c, err := d.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &deadlineConn{c, d}, nil
}

// Read returns how many read deadlines were set, and the one in force, which is
// zero if there is none.
func (d *Deadlines) Read() (sets int, last time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.sets, d.last
}

func (d *Deadlines) note(at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.last = at; !at.IsZero() {
		d.sets++
	}
}

type deadlineConn struct {
	net.Conn
	all *Deadlines
}

// SetReadDeadline implements net.Conn.
func (c *deadlineConn) SetReadDeadline(at time.Time) error {
	c.all.note(at)
	return c.Conn.SetReadDeadline(at)
}

// SetDeadline implements net.Conn.
func (c *deadlineConn) SetDeadline(at time.Time) error {
	c.all.note(at)
	return c.Conn.SetDeadline(at)
}
