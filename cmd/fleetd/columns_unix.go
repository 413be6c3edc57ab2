//go:build unix

package main

import (
	"os"

	"github.com/mattn/go-isatty"
	"golang.org/x/sys/unix"
)

// columnsOf returns how many characters a line of a terminal has; 0 if f is not a terminal, or it does not say.
func columnsOf(f *os.File) int {
	if !isatty.IsTerminal(f.Fd()) {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(size.Col)
}
