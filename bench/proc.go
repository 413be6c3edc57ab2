package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"fleetd/bench/load"
)

// perCPU is how many there were of something for a second of CPU time. Less than a tick cannot be distinguished from none, and
// counts as one.
func perCPU(n float64, used time.Duration) float64 { return n / max(used, load.Tick).Seconds() }

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
	return load.SumTicks([]string{fields[1], fields[2], fields[3], fields[6], fields[7], fields[8]})
}

// ownMemory is the resident set of a process in bytes, without memory that it shares through tmpfs.
func ownMemory(pid int) (int64, error) {
	return load.ProcessBytes(pid, "status", "RssAnon:", "RssFile:")
}

// storedBytes is how many bytes of files a process has caused to be written.
func storedBytes(pid int) (int64, error) { return load.ProcessBytes(pid, "io", "write_bytes:") }

// meter measures CPU time over a period: the daemons' and their NATS server's, this program's, and what other programs took
// meanwhile, which reports how far the figures of that period can be trusted.
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
		used, err := load.ProcessCPU(pid, false)
		if err != nil {
			return err
		}
		m.daemon += used
	}
	if m.own, err = load.ProcessCPU("self", true); err != nil {
		return err
	}
	if m.server != "" {
		if m.nats, err = load.ProcessCPU(m.server, false); err != nil {
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
