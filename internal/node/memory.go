package node

import (
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
)

// memoryShare is the part of a container's memory that Go's heap is kept below, in
// percent: the rest is for what Go does not count.
const memoryShare = 90

// LimitMemory keeps the heap below the memory limit of the process's cgroup, unless
// GOMEMLIMIT says how much it may be: otherwise a container is killed where the
// garbage collector could have made room.
func LimitMemory(environ []string) {
	if slices.ContainsFunc(environ, func(v string) bool { return strings.HasPrefix(v, "GOMEMLIMIT=") }) || os.Getenv("GOMEMLIMIT") != "" {
		return // the runtime has read it
	}
	if limit := cgroupLimit("/"); limit > 0 {
		debug.SetMemoryLimit(limit / 100 * memoryShare)
	}
}

// cgroupLimit is the smallest memory limit of the cgroups that this process is in,
// 0 without one. root is / but in tests.
func cgroupLimit(root string) (limit int64) {
	text, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return 0
	}
	least := int64(math.MaxInt64)
	for line := range strings.Lines(string(text)) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, path, _ := strings.Cut(rest, ":")
		dir, file := "sys/fs/cgroup", "memory.max"
		switch {
		case slices.Contains(strings.Split(controllers, ","), "memory"): // version 1
			dir, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		case controllers != "":
			continue
		}
		for {
			content, err := os.ReadFile(filepath.Join(root, dir, path, file)) // in a container the path may be that of the host
			if n, parseErr := strconv.ParseInt(strings.TrimSpace(string(content)), 10, 64); err == nil && parseErr == nil && n > 0 {
				least = min(least, n)
			}
			if path == "/" || path == "." || path == "" {
				break
			}
			path = filepath.Dir(path)
		}
	}
	if least >= 1<<60 { // version 1 writes none as a number like this
		return 0
	}
	return least
}
