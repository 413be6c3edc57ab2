//go:build !linux

package firmware

import "syscall"

// bindWithoutPort does nothing where the kernel has no option for it.
func bindWithoutPort(_, _ string, _ syscall.RawConn) error { return nil }
