//go:build !unix

package main

import "os"

// columnsOf returns 0, which means that lines are not cut: the width of a terminal is not read on these systems.
func columnsOf(*os.File) int { return 0 }
