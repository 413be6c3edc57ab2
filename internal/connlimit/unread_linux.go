package connlimit

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// endUnread makes the operating system close a connection whose peer acknowledges no
// written bytes for that long. A write deadline is not enough: a small response fits into
// the system's buffers, so that no write waits.
func endUnread(c net.Conn, after time.Duration) {
	socket, ok := c.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := socket.SyscallConn()
	if err != nil { // the connection has ended
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(after.Milliseconds())) // not a TCP connection if it fails
	})
}
