package load

import (
	"errors"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// lateBind lets the kernel choose the source port at connect time, so that a bound source address does not reserve the
// port for itself alone.
func lateBind(_, _ string, c syscall.RawConn) error {
	var err error
	if outer := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	}); outer != nil {
		return outer
	}
	return err
}

// The receive window and the segment size of lwIP as ESP-IDF sets them up.
const (
	deviceWindow  = 5760
	deviceSegment = 1440
)

// narrow is lateBind with the window and the segments of a device. It sets them before the connect: a window that shrinks later makes TCP
// stall, and the device takes less than it could.
func narrow(network, address string, c syscall.RawConn) error {
	err := lateBind(network, address, c)
	if outer := c.Control(func(fd uintptr) {
		err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, deviceWindow/2), // the kernel doubles it
			unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, deviceSegment))
	}); outer != nil {
		return outer
	}
	return err
}

// DieWithParent ends the child if this program is killed.
func DieWithParent(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

// apartFromTerminal keeps an interruption of the terminal from the child.
func apartFromTerminal(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// FileLimit is how many files a process may open; Go raises its own limit, and so the daemon's, to the hard one.
func FileLimit() int {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return 1024
	}
	return int(min(limit.Max, 1<<20))
}
