package background

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const supported = true

// lowerPriority lowers the priority of the calling thread alone: on Linux a nice value belongs to a
// thread (setpriority(2), C library/kernel differences). After a failure it is as it was.
func lowerPriority() {
	if nice, err := threadNice(); err == nil {
		_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), min(nice+niceness, 19))
	}
}

// threadNice is the nice value of the calling thread. The system call returns it as 20 - nice (getpriority(2)).
func threadNice() (int, error) {
	p, err := unix.Getpriority(unix.PRIO_PROCESS, unix.Gettid())
	return 20 - p, err
}

// yieldBusy is how long a yield may take where only calls wait for the processor; if it takes
// longer, others compute, too, and Yield does nothing for yieldPause: the kernel
// takes a whole turn from a thread that yields.
const yieldBusy, yieldPause = time.Millisecond, 10 * time.Millisecond

// yields is until when Yield does nothing, in nanoseconds since started. Any thread may move it.
var (
	started = time.Now()
	yields  atomic.Int64
)

// Yield lets threads run that wait for this processor, if there are any (sched_yield(2)): the
// kernel takes it from a thread that computes only after some milliseconds. Loops call it each
// fraction of a millisecond; it costs less than a microsecond. It is safe for concurrent use.
func Yield() {
	begun := time.Since(started)
	if int64(begun) < yields.Load() {
		return
	}
	_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	if end := time.Since(started); end-begun > yieldBusy {
		yields.Store(int64(end + yieldPause))
	}
}
