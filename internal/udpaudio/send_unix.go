//go:build unix

package udpaudio

import (
	"net/netip"
	"syscall"
)

// outgoing contains the buffers of one outgoing packet.
type outgoing struct {
	buf   [maxPacket]byte
	n     int
	ctr   ctr
	ip4   syscall.SockaddrInet4
	ip6   syscall.SockaddrInet6
	to    syscall.Sockaddr // one of the two above
	from  sourceControl
	local netip.Addr
	ipv6  bool
	err   error
	write func(fd uintptr) bool
}

func newOutgoing() *outgoing {
	o := &outgoing{from: newSourceControl()}
	o.write = func(fd uintptr) bool { // created once: a closure per packet would be an allocation
		for {
			if o.err = o.from.write(int(fd), o.buf[:o.n], o.local, o.ipv6, o.to); o.err != syscall.EINTR {
				return true // true: never wait for a full socket
			}
		}
	}
	return o
}

// send writes o to the device without waiting: net.UDPConn would park the caller while the
// socket's buffer is full.
func (t *Table) send(o *outgoing, to *endpoint) error {
	addr := to.Addr()
	o.local, o.ipv6 = to.local, t.ipv6
	switch {
	case addr.Zone() != "": // needs the number of an interface; rare enough for the slow path
		_, err := t.conn.WriteToUDPAddrPort(o.buf[:o.n], to.AddrPort)
		return err
	case t.ipv6:
		o.ip6 = syscall.SockaddrInet6{Port: int(to.Port()), Addr: addr.As16()} // IPv4 as ::ffff:a.b.c.d
		o.to = &o.ip6
	default:
		o.ip4 = syscall.SockaddrInet4{Port: int(to.Port()), Addr: addr.As4()}
		o.to = &o.ip4
	}
	if err := t.raw.Write(o.write); err != nil {
		return err
	}
	return o.err
}
