package load

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ResidentSize is the resident set of a process in bytes.
func ResidentSize(pid int) (int64, error) { return ProcessBytes(pid, "status", "VmRSS:") }

// ProcessBytes adds fields of a file of /proc, in bytes.
func ProcessBytes(pid int, file string, names ...string) (int64, error) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		return 0, fmt.Errorf("state of a process: %w", err)
	}
	sum, found := int64(0), 0
	for line := range strings.Lines(string(content)) {
		f := strings.Fields(line)
		if len(f) < 2 || !slices.Contains(names, f[0]) {
			continue
		}
		n, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/%d/%s: %w", pid, file, err)
		}
		if len(f) == 3 { // kB
			n <<= 10
		}
		sum += n
		found++
	}
	if found != len(names) {
		return 0, fmt.Errorf("/proc/%d/%s does not have all of %q", pid, file, names)
	}
	return sum, nil
}

// Tick is the unit of CPU time in /proc: 1/100 s on every Linux port of Go.
const Tick = 10 * time.Millisecond

// ProcessCPU is the user and system time that a process has used, to the tick. With reaped, the time of its children
// that have ended is added. pid is a number or "self".
func ProcessCPU(pid string, reaped bool) (time.Duration, error) {
	content, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return 0, fmt.Errorf("CPU time of a process (only Linux has /proc): %w", err)
	}
	// The name before the last parenthesis may hold anything; utime is the 14th field, the third being the first after it.
	fields := strings.Fields(string(content[strings.LastIndexByte(string(content), ')')+1:]))
	if len(fields) < 15 {
		return 0, fmt.Errorf("/proc/%s/stat has %d fields", pid, len(fields))
	}
	last := 12
	if reaped {
		last = 14
	}
	return SumTicks(fields[11 : last+1])
}

// SumTicks adds fields of a file of /proc that are ticks.
func SumTicks(fields []string) (time.Duration, error) {
	sum := int64(0)
	for _, f := range fields {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("ticks: %w", err)
		}
		sum += n
	}
	return time.Duration(sum) * Tick, nil
}

// OwnCPU is the user and system time of this process.
func OwnCPU() time.Duration {
	var usage syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &usage) != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
