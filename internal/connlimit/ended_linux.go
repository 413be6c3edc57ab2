package connlimit

import (
	"context"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// closeWait is TCP_CLOSE_WAIT: the peer has closed the connection, and read everything before (net/tcp_states.h of Linux).
const closeWait = 8

// EndedWell reports whether the peer of a request's connection closed it after it had read all that was written: a peer that closes before
// resets it. Without WithConn that is not known, and true.
func EndedWell(ctx context.Context) bool {
	c, _ := ctx.Value(connKey{}).(net.Conn)
	v := trackedOf(c)
	if v == nil {
		return true
	}
	inner := v.Conn
	if timed, ok := inner.(*timedConn); ok {
		inner = timed.Conn
	}
	raw, ok := inner.(syscall.Conn)
	if !ok {
		return true
	}
	control, err := raw.SyscallConn()
	if err != nil {
		return true
	}
	well := true
	_ = control.Control(func(fd uintptr) { // the connection is open until the handler returns
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			well = info.State == closeWait
		}
	})
	return well
}
