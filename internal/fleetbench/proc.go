package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/fleetbench/load"
)

// tick is the unit of CPU time in /proc: 1/100 s on every Linux port of Go.
const tick = 10 * time.Millisecond

// perCPU is how many there were of something for a second of CPU time. Less than a tick cannot be told from none, and
// counts as one.
func perCPU(n float64, used time.Duration) float64 { return n / max(used, tick).Seconds() }

// processCPU is the user and system time that a process has used, to the tick. With reaped, the time of its children
// that have ended is added. pid is a number or "self".
func processCPU(pid string, reaped bool) (time.Duration, error) {
	content, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return 0, fmt.Errorf("CPU time of a process (fleetbench needs Linux's /proc): %w", err)
	}
	// The name before the last parenthesis may hold anything; utime is the 14th field, the third being the first behind it.
	fields := strings.Fields(string(content[strings.LastIndexByte(string(content), ')')+1:]))
	if len(fields) < 15 {
		return 0, fmt.Errorf("/proc/%s/stat has %d fields", pid, len(fields))
	}
	last := 12
	if reaped {
		last = 14
	}
	return sumTicks(fields[11 : last+1])
}

// machineCPU is the time that all processors have spent doing anything.
func machineCPU() (time.Duration, error) {
	content, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, fmt.Errorf("CPU time of the machine: %w", err)
	}
	line, _, _ := strings.Cut(string(content), "\n")
	fields := strings.Fields(line) // cpu user nice system idle iowait irq softirq steal
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, fmt.Errorf("/proc/stat begins with %q", line)
	}
	return sumTicks([]string{fields[1], fields[2], fields[3], fields[6], fields[7], fields[8]})
}

func sumTicks(fields []string) (time.Duration, error) {
	sum := int64(0)
	for _, f := range fields {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("ticks: %w", err)
		}
		sum += n
	}
	return time.Duration(sum) * tick, nil
}

// ownMemory is the resident set of a process in bytes, without memory that it shares through tmpfs.
func ownMemory(pid int) (int64, error) {
	return load.ProcessBytes(pid, "status", "RssAnon:", "RssFile:")
}

// storedBytes is how many bytes of files a process has caused to be written.
func storedBytes(pid int) (int64, error) { return load.ProcessBytes(pid, "io", "write_bytes:") }

// meter measures CPU time over a period: the daemons' and their NATS server's, this program's, and what other programs took
// meanwhile, which tells how far the figures of that period can be trusted.
type meter struct {
	server                     string // process of the NATS server; empty for none
	daemons                    []string
	started                    time.Time
	daemon, nats, own, machine time.Duration
}

// spent is what a meter saw.
type spent struct {
	wall, daemon, nats, own time.Duration
	others                  float64 // share of the machine that other programs took, 0 to 1
}

func startMeter(server string, daemons ...string) (meter, error) {
	m := meter{server: server, daemons: daemons, started: time.Now()}
	err := m.read()
	return m, err
}

func (m *meter) read() (err error) {
	m.daemon = 0
	for _, pid := range m.daemons {
		used, err := processCPU(pid, false)
		if err != nil {
			return err
		}
		m.daemon += used
	}
	if m.own, err = processCPU("self", true); err != nil {
		return err
	}
	if m.server != "" {
		if m.nats, err = processCPU(m.server, false); err != nil {
			return err
		}
	}
	m.machine, err = machineCPU()
	return err
}

func (m *meter) stop(processors int) (spent, error) {
	now := *m
	err := now.read()
	s := spent{wall: time.Since(m.started), daemon: now.daemon - m.daemon, nats: now.nats - m.nats, own: now.own - m.own}
	rest := now.machine - m.machine - s.daemon - s.nats - s.own
	s.others = max(0, rest.Seconds()/(s.wall.Seconds()*float64(processors)))
	return s, err
}
