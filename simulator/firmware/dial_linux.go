package firmware

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// asOnAChip bounds what is received before it is read; before connect, or the first window would be larger. It lets connect choose the
// port: bind alone would have to find one that is free for every target.
func asOnAChip(_, _ string, c syscall.RawConn) error {
	var fault error
	err := c.Control(func(fd uintptr) {
		fault = errors.Join(unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer))
	})
	return errors.Join(err, fault)
}
