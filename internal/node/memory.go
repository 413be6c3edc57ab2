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

// memoryShare is the percentage of a container's memory that limits Go's heap; the rest is
// for memory that Go does not count.
const memoryShare = 90

// LimitMemory keeps the heap below the memory limit of the process's cgroup, unless
// GOMEMLIMIT is set: otherwise a container is killed although the garbage collector could
// have freed memory.
func LimitMemory(environ []string) {
	if slices.ContainsFunc(environ, func(v string) bool { return strings.HasPrefix(v, "GOMEMLIMIT=") }) || os.Getenv("GOMEMLIMIT") != "" {
		return // the runtime has applied it
	}
	if limit := cgroupLimit("/"); limit > 0 {
		debug.SetMemoryLimit(limit / 100 * memoryShare)
	}
}

// cgroupLimit returns the smallest memory limit of the process's cgroups, or 0 without one.
// root is / except in tests.
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
	if least >= 1<<60 { // version 1 has a very large number if there is no limit
		return 0
	}
	return least
}
