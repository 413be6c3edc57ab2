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
	well := true
	ofSocket(ctx, func(fd int) {
		if info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			well = info.State == closeWait
		}
	})
	return well
}

// Unread returns how many of the bytes that were written to a request's connection its peer has not acknowledged (tcp(7), SIOCOUTQ).
// Without WithConn that is not known, and 0.
func Unread(ctx context.Context) (bytes int) {
	ofSocket(ctx, func(fd int) {
		if n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ); err == nil {
			bytes = n
		}
	})
	return bytes
}

// ofSocket calls f with the socket of a request's connection, if it is known.
func ofSocket(ctx context.Context, f func(fd int)) {
	c, _ := ctx.Value(connKey{}).(net.Conn)
	v := trackedOf(c)
	if v == nil {
		return
	}
	inner := v.Conn
	if timed, ok := inner.(*timedConn); ok {
		inner = timed.Conn
	}
	raw, ok := inner.(syscall.Conn)
	if !ok {
		return
	}
	if control, err := raw.SyscallConn(); err == nil {
		_ = control.Control(func(fd uintptr) { f(int(fd)) }) // the connection is open until the handler returns
	}
}
