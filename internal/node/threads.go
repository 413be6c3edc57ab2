package node

import (
	"os"
	"runtime"
	"slices"
	"strings"
)

// leastThreads is how many threads run Go code at least, however few processors there are.
// With one, a thread that waits for the disk, or computes for a while, keeps everything else
// from running and the network from being looked at, for 10 ms each time: Go's scheduler
// takes turns in this step, and the kernel's in much shorter ones.
const leastThreads = 4

// UseThreads has enough threads run Go code on a machine with few processors, unless
// GOMAXPROCS is set.
func UseThreads(environ []string) {
	if slices.ContainsFunc(environ, func(v string) bool { return strings.HasPrefix(v, "GOMAXPROCS=") }) || os.Getenv("GOMAXPROCS") != "" {
		return // the runtime has applied it
	}
	if runtime.GOMAXPROCS(0) < leastThreads {
		runtime.GOMAXPROCS(leastThreads)
	}
}
