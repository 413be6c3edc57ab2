package load

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
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
