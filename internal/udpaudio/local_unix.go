//go:build unix && !linux

package udpaudio

import (
	"net/netip"
	"syscall"
)

const maxControl = 0

// On this system the source address cannot be set: listen on one address if the host has
// several.
func (*Table) enableLocalAddress() error { return nil }

func localAddress([]byte) netip.Addr { return netip.Addr{} }

type sourceControl struct{}

func newSourceControl() sourceControl { return sourceControl{} }

func (*sourceControl) write(fd int, packet []byte, _ netip.Addr, _ bool, to syscall.Sockaddr) error {
	return syscall.Sendto(fd, packet, 0, to)
}
