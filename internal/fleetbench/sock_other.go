//go:build !linux

package main

import (
	"os/exec"
	"syscall"
)

func lateBind(_, _ string, _ syscall.RawConn) error { return nil }

func dieWithParent(*exec.Cmd) {}

func fileLimit() int { return 1024 }
