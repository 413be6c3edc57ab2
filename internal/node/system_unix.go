//go:build unix

package node

import "syscall"

// openFiles is how many descriptors this process may have; 0 if that cannot be
// known.
func openFiles() int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return int(min(limit.Cur, 1<<30)) // unlimited is the highest number
}
