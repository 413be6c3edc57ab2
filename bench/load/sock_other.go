//go:build !linux

package load

import (
	"os/exec"
	"syscall"
)

func lateBind(_, _ string, _ syscall.RawConn) error { return nil }

func narrow(_, _ string, _ syscall.RawConn) error { return nil }

func DieWithParent(*exec.Cmd) {}

func apartFromTerminal(*exec.Cmd) {}

func FileLimit() int { return 1024 }
