//go:build unix

package udpaudio

import (
	"net/netip"
	"syscall"
)

// outgoing is the scratch space of one packet on its way out.
type outgoing struct {
	buf   [maxPacket]byte
	n     int
	ctr   ctr
	ip4   syscall.SockaddrInet4
	ip6   syscall.SockaddrInet6
	to    syscall.Sockaddr // one of the two above
	err   error
	write func(fd uintptr) bool
}

func newOutgoing() *outgoing {
	o := &outgoing{}
	o.write = func(fd uintptr) bool { // made once: a closure per packet would be an allocation
		for {
			if o.err = syscall.Sendto(int(fd), o.buf[:o.n], 0, o.to); o.err != syscall.EINTR {
				return true // never wait for a full socket
			}
		}
	}
	return o
}

// send writes o to the address without ever waiting: net.UDPConn would park
// the caller while the socket's buffer is full.
func (t *Table) send(o *outgoing, to netip.AddrPort) error {
	addr := to.Addr()
	switch {
	case addr.Zone() != "": // needs an interface's number; rare enough for the slow way
		_, err := t.conn.WriteToUDPAddrPort(o.buf[:o.n], to)
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
