package firmware

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// bindWithoutPort lets connect choose the port: bind alone would have to find one that is free for every target.
func bindWithoutPort(_, _ string, c syscall.RawConn) error {
	var fault error
	err := c.Control(func(fd uintptr) {
		fault = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	})
	return errors.Join(err, fault)
}
