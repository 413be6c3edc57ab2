//go:build unix && !linux

package udpaudio

import (
	"net/netip"
	"syscall"
)

const maxControl = 0

// Here the system chooses the address that answers leave from: listen on one
// address of a host that has several.
func (*Table) askLocal() error { return nil }

func localOf([]byte) netip.Addr { return netip.Addr{} }

type source struct{}

func newSource() source { return source{} }

func (*source) write(fd int, packet []byte, _ netip.Addr, _ bool, to syscall.Sockaddr) error {
	return syscall.Sendto(fd, packet, 0, to)
}
