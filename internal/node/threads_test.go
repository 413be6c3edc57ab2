package node

import (
	"runtime"
	"testing"
)

// On a machine with one processor a thread that waits does not stop the others.
func TestUseThreads(t *testing.T) {
	t.Setenv("GOMAXPROCS", "")
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, tc := range []struct {
		name    string
		environ []string
		has     int
		want    int
	}{
		{"one processor", nil, 1, leastThreads},
		{"the operator's number", []string{"GOMAXPROCS=1"}, 1, 1},
		{"many processors", nil, leastThreads + 3, leastThreads + 3},
	} {
		runtime.GOMAXPROCS(tc.has)
		UseThreads(tc.environ)
		if got := runtime.GOMAXPROCS(0); got != tc.want {
			t.Errorf("%s: %d threads, want %d", tc.name, got, tc.want)
		}
	}
}
