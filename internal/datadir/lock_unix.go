//go:build unix

package datadir

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Running reports whether a node uses the data directory: a node holds the lock of its [LockFile] as long as it runs,
// however it ends.
func Running(dir string) (bool, error) {
	file, err := os.Open(filepath.Join(dir, LockFile))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = file.Close() }() // gives the lock back
	switch err := unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB); {
	case err == nil:
		return false, nil
	case errors.Is(err, unix.EWOULDBLOCK):
		return true, nil
	default:
		return false, &fs.PathError{Op: "lock", Path: file.Name(), Err: err}
	}
}

// lock takes the lock of a file, which ends with the process at the latest. An error
// means that another process has it.
func lock(file *os.File) error { return unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
