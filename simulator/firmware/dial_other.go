//go:build !linux

package firmware

import "syscall"

// asOnAChip does nothing where the kernel has no option for it.
func asOnAChip(_, _ string, _ syscall.RawConn) error { return nil }
