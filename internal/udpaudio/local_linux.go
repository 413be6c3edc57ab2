package udpaudio

import (
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxControl is the size of the packet information of one datagram.
const maxControl = 64

// Offsets of the source address in a control message: ipi_spec_dst for IPv4, the
// beginning for IPv6.
var (
	local4 = unix.CmsgLen(4)
	local6 = unix.CmsgLen(0)
)

// enableLocalAddress makes the system report the destination address of each datagram, if the socket
// receives for all addresses of the host.
func (t *Table) enableLocalAddress() error {
	if !localAddr(t.conn).Addr().IsUnspecified() {
		return nil
	}
	t.wildcard = true
	level, option := unix.IPPROTO_IP, unix.IP_PKTINFO
	if t.ipv6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	var failed error
	if err := t.raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), level, option, 1) }); err != nil {
		return err
	}
	return failed
}

// localAddress returns the address in the control messages of a datagram; the zero Addr if
// there is none.
func localAddress(control []byte) netip.Addr {
	for len(control) > 0 {
		h, data, rest, err := unix.ParseOneSocketControlMessage(control)
		switch {
		case err != nil:
			return netip.Addr{}
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= 8:
			return netip.AddrFrom4([4]byte(data[4:8]))
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= 16:
			return netip.AddrFrom16([16]byte(data[:16])) // IPv4 as ::ffff:a.b.c.d
		}
		control = rest
	}
	return netip.Addr{}
}

// sourceControl contains the control messages with the source address of a packet.
type sourceControl struct{ ip4, ip6 []byte }

func newSourceControl() sourceControl {
	return sourceControl{unix.PktInfo4(&unix.Inet4Pktinfo{}), unix.PktInfo6(&unix.Inet6Pktinfo{})}
}

// write sends a packet from the address local, or from the one that the system chooses if
// local is the zero Addr.
func (s *sourceControl) write(fd int, packet []byte, local netip.Addr, ipv6 bool, to syscall.Sockaddr) error {
	var control []byte
	switch {
	case !local.IsValid():
		return syscall.Sendto(fd, packet, 0, to)
	case ipv6:
		control = s.ip6
		addr := local.As16()
		copy(control[local6:], addr[:])
	default:
		control = s.ip4
		addr := local.As4()
		copy(control[local4:], addr[:])
	}
	_, err := syscall.SendmsgN(fd, packet, control, to, 0)
	return err
}
