// Command bench measures fleetd: tool calls over REST, what an idle device costs, how fast a fleet connects, what a
// packet of audio costs, how long a fleet misses a node that is killed, what a million known devices cost, and large jobs over
// them, how fast jobs run, what webhooks and rollouts of firmware cost, what the recorder takes, and how fast the console is
// beside a large fleet.
//
//	make bench                                  everything, each beside its baseline, pair by pair
//	make bench BENCH="-only call -profile DIR"  one measurement, with CPU profiles
//
// It runs the real program with a data directory, ports, NATS subjects and a database of its own, and removes all of
// them. Load and server share the machine's processors, as the baselines do, so figures of different machines do not
// compare, and ratios within one run do. It needs Linux, whose /proc it reads; Postgres is taken from
// FLEETD_TEST_POSTGRES, else from the local machine, else its variants are left out and listed in the report.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"fleetd/bench/load"
	"fleetd/bench/services"
)

// options are the flags.
type options struct {
	program, simulator  string
	only                []string
	runs                int
	duration            time.Duration
	callers, devices    int
	idleLow, idleHigh   int
	settle              time.Duration
	storm               int
	pace, idleRate      int
	idleTime            time.Duration
	kill                int
	killWake            time.Duration
	udpDevices, udpRate int
	jobDevices          int
	udpLow, udpHigh     int
	scale, scaleStorm   int
	scaleOn             string
	scaleIdle           time.Duration
	scaleSettle         time.Duration
	scaleFirings        int
	webhookRate         int
	webhookEvents       int
	firmwareDevices     int
	firmwareTime        time.Duration
	recorderDevices     int
	recorderPairs       int
	consoleDevices      int
	embedded            bool
	jsonFile, mdFile    string
	profiles            string
	limit, limitReady   time.Duration
	quiet               float64
}

// measurements, in the order in which they run.
var measurements = []string{"call", "routed", "pace", "idle", "tls-idle", "idle-cpu", "storm", "kill", "mqtt-call", "mqtt-idle", "udp", "udp-scale", "scale", "scale-jobs", "jobs", "webhooks", "firmware", "recorder", "console"}

// reserveFiles are what a process needs beside one file per device.
const reserveFiles = 500

func parseOptions(arguments []string, stderr io.Writer) (options, error) {
	o := options{limitReady: time.Minute}
	only := ""
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.program, "fleetd", "bin/fleetd", "the program to measure")
	flags.StringVar(&o.simulator, "simulator", "bin/simulator", "the program whose devices lose their node")
	flags.StringVar(&only, "only", strings.Join(measurements, ","), "what to measure, comma-separated")
	flags.IntVar(&o.runs, "runs", 5, "repetitions of each measurement")
	flags.DurationVar(&o.duration, "d", 5*time.Second, "measured time of one run of calls")
	flags.IntVar(&o.callers, "callers", 64, "concurrent callers")
	flags.IntVar(&o.devices, "devices", 1000, "devices that are called")
	flags.IntVar(&o.idleLow, "idle-low", 5000, "idle devices at the first reading")
	flags.IntVar(&o.idleHigh, "idle-high", 15000, "idle devices at the second reading")
	flags.DurationVar(&o.settle, "settle", 4*time.Second, "rest before and after the garbage collection of a reading of idle devices")
	flags.IntVar(&o.storm, "storm", 15000, "devices of the connect storm")
	flags.IntVar(&o.pace, "pace", 5000, "calls per second that callers make evenly")
	flags.IntVar(&o.idleRate, "idle-rate", 1000, "calls per second, made evenly, beside -idle-high idle devices")
	flags.DurationVar(&o.idleTime, "idle-time", time.Minute, "time over which the CPU of -idle-high idle devices is measured")
	flags.IntVar(&o.kill, "kill", 9000, "devices of three nodes, one of which is killed; each takes two open files of this program")
	flags.DurationVar(&o.killWake, "kill-wake", 5*time.Second, "about how often a device that lost its node is woken")
	flags.IntVar(&o.jobDevices, "job-devices", 10_000, "devices of jobs, with ten tasks each")
	flags.IntVar(&o.udpDevices, "udp-devices", 4096, "devices that speak over UDP, an even number for the baseline")
	flags.IntVar(&o.udpRate, "udp-rate", 60_000, "UDP packets per second offered by all devices; 0: as many as go")
	flags.IntVar(&o.udpLow, "udp-low", 100, "speaking devices beside which -udp-high are measured")
	flags.IntVar(&o.udpHigh, "udp-high", 5000, "speaking devices whose packets should cost the same as those of -udp-low")
	flags.IntVar(&o.scale, "scale-devices", 1_000_000, "known devices of a node, -scale-storm among them")
	flags.IntVar(&o.scaleStorm, "scale-storm", 5000, "devices that boot and connect to a node with -scale-devices known devices, and to one with only these")
	flags.StringVar(&o.scaleOn, "scale-on", "", "only this database at -scale-devices: sqlite or postgres")
	flags.DurationVar(&o.scaleIdle, "scale-idle", 30*time.Second, "time over which reads and writes of an idle node with -scale-devices are counted")
	flags.DurationVar(&o.scaleSettle, "scale-settle", 5*time.Second, "rest before a reading of memory at -scale-devices")
	flags.IntVar(&o.scaleFirings, "scale-firings", 5, "firings of a job, one each minute, beside large jobs at -scale-devices")
	flags.IntVar(&o.webhookRate, "webhook-rate", 500, "events per second, made evenly, of which one webhook takes all and 99 take none")
	flags.IntVar(&o.webhookEvents, "webhook-events", 10_000, "events that wait for a receiver, which then answers after 20 ms")
	flags.IntVar(&o.firmwareDevices, "firmware-devices", 10_000, "devices that check in during -firmware-time, with and without a rollout")
	flags.DurationVar(&o.firmwareTime, "firmware-time", time.Minute, "time that a download of firmware takes, at most a minute, and over which -firmware-devices check in")
	flags.IntVar(&o.recorderDevices, "recorder-devices", 100_000, "devices with which a recorder is fed directly")
	flags.IntVar(&o.recorderPairs, "recorder-pairs", 15, "pairs of calls to a node with a recorder and to one without")
	flags.IntVar(&o.consoleDevices, "console-devices", 10_000, "devices that the console shows, at least 500")
	flags.BoolVar(&o.embedded, "embedded", false, "leave the variants with external services out")
	flags.StringVar(&o.jsonFile, "json", "", "write the report as JSON to this `file`")
	flags.StringVar(&o.mdFile, "md", "", "write the tables as Markdown to this `file`")
	flags.StringVar(&o.profiles, "profile", "", "save CPU profiles of calls and storm, and heap profiles of idle devices and storm, in this `directory`")
	flags.Float64Var(&o.quiet, "quiet", 15, "repeat a run of calls or storm, twice at most, while other programs take more than this `percentage` of the machine; Postgres counts as other")
	flags.DurationVar(&o.limit, "limit", 3*time.Hour, "end the whole run after this time")
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	o.only = strings.Split(only, ",")
	for _, name := range o.only {
		if !slices.Contains(measurements, name) {
			return o, fmt.Errorf("-only has %q; there are %s", name, strings.Join(measurements, ", "))
		}
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.pace < 1 || o.idleRate < 1 || o.idleTime <= 0 || o.kill < killNodes || o.killWake <= 0 {
		return o, errors.New("-pace, -idle-rate, -idle-time and -kill-wake must be positive, -kill at least 3")
	}
	if o.scaleStorm < 2 || o.scale <= o.scaleStorm || o.scale > scaleMost || o.scaleIdle <= 0 {
		return o, fmt.Errorf("-scale-storm must be at least 2, -scale-devices above it and at most %d, -scale-idle positive", scaleMost)
	}
	if o.scaleFirings < 0 || o.webhookRate < 1 || o.webhookEvents < 1 {
		return o, errors.New("-scale-firings must not be negative, -webhook-rate and -webhook-events must be positive")
	}
	if o.firmwareDevices < 1 || o.firmwareTime < firmwareTick || o.firmwareTime > time.Minute {
		return o, fmt.Errorf("-firmware-devices must be positive, -firmware-time %v to %v", firmwareTick, time.Minute)
	}
	if !slices.Contains([]string{"", "sqlite", "postgres"}, o.scaleOn) {
		return o, fmt.Errorf("-scale-on must be sqlite or postgres, not %q", o.scaleOn)
	}
	if o.runs < 1 || o.callers < 1 || o.devices < 1 || o.storm < 1 || o.idleLow < 1 || o.idleHigh <= o.idleLow || o.udpDevices < 1 || o.jobDevices < 1 || o.recorderDevices < 2 || o.recorderPairs < 1 || o.consoleDevices < 500 || o.udpRate < 0 ||
		o.udpLow < 1 || o.udpHigh <= o.udpLow {
		return o, errors.New("-runs, -callers, -devices, -storm, -udp-devices, -job-devices, -recorder-pairs, -udp-low and -idle-low must be positive, -recorder-devices at least 2, -console-devices at least 500, -idle-high above -idle-low, " +
			"-udp-high above -udp-low, -udp-rate not negative")
	}
	return o, nil
}

// fit reduces the numbers of devices to what the file limit allows, keeping proportions, and reports what it did.
func (o *options) fit(files int) (changes []string) {
	most := max(1, files-reserveFiles)
	mostKilled := max(killNodes, (files-2*reserveFiles-probeWorkers)/2) // the balancer holds both ends of each connection
	for _, c := range []struct {
		number, low *int // low keeps its proportion to number
		most        int
		text        string // with the new number and the old one
	}{
		{&o.storm, nil, most, "storm with %d devices instead of %d"}, {&o.idleHigh, &o.idleLow, most, "idle devices up to %d instead of %d"},
		{&o.kill, nil, mostKilled, "%d devices instead of %d where a node is killed"}, {&o.udpHigh, &o.udpLow, most, "audio of up to %d devices instead of %d"},
		{&o.udpDevices, nil, most, "audio of %d devices instead of %d"}, {&o.scaleStorm, nil, most, "-scale-storm with %d devices instead of %d"},
		{&o.consoleDevices, nil, most, "the console beside %d devices instead of %d"}, {&o.jobDevices, nil, most, "jobs over %d devices instead of %d"},
		{&o.devices, nil, most, "calls to %d devices instead of %d"},
	} {
		if *c.number <= c.most {
			continue
		}
		changes = append(changes, fmt.Sprintf(c.text, c.most, *c.number))
		if c.low != nil {
			*c.low = max(1, c.most**c.low / *c.number)
		}
		*c.number = c.most
	}
	for i := range changes {
		changes[i] += fmt.Sprintf(": the open-file limit is %d", files)
	}
	return changes
}

// bench is one run of this program.
type bench struct {
	opt       options
	baselines baselines
	postgres  *services.Postgres // nil: none
	nats      external           // only if something measured wants it
	dir       string             // for files of this run
	report    report
	out       io.Writer
}

func main() { services.Main("bench", run, servers) }

// run measures what the arguments ask for and prints the tables. Whatever happens, what it started is stopped.
func run(ctx context.Context, arguments []string, stdout, stderr io.Writer) (err error) {
	o, err := parseOptions(arguments, stderr)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.limit, fmt.Errorf("the limit of %v is over (-limit)", o.limit))
	defer cancel()
	b := &bench{opt: o, out: stderr}
	for _, change := range b.opt.fit(load.FileLimit()) {
		b.report.LeftOut = append(b.report.LeftOut, change)
		fmt.Fprintln(stderr, change)
	}
	version, err := exec.CommandContext(ctx, o.program, "version").Output()
	if err != nil {
		return fmt.Errorf("%s version (run `make build` first): %w", o.program, err)
	}
	first, _, _ := strings.Cut(string(version), "\n")
	b.report.Time, b.report.Version, b.report.Machine, b.report.Runs = time.Now().UTC(), first, machine(), o.runs
	b.report.Profiled = o.profiles != ""
	dir, err := os.MkdirTemp("", "fleetbench")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	b.dir = dir
	if b.baselines, err = buildBaselines(ctx, dir); err != nil {
		return err
	}
	if !o.embedded {
		if err := b.services(ctx); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, b.nats.stop()) }()
	}
	if o.profiles != "" {
		if err := os.MkdirAll(o.profiles, 0o755); err != nil {
			return err
		}
	}
	for _, name := range o.only {
		if err := b.measure(name)(ctx); err != nil {
			return err
		}
	}
	return errors.Join(b.report.markdown(stdout), b.report.save(o.jsonFile, o.mdFile))
}

// measure is the function of a measurement.
func (b *bench) measure(name string) func(context.Context) error {
	return map[string]func(context.Context) error{"call": b.measureCalls, "routed": b.measureRouted, "pace": b.measurePace,
		"idle": b.measureIdle, "tls-idle": b.measureTLSIdle, "idle-cpu": b.measureIdleCPU, "storm": b.measureStorm, "kill": b.measureKill,
		"mqtt-call": b.measureMQTTCalls, "mqtt-idle": b.measureMQTTIdle, "udp": b.measureUDP, "udp-scale": b.measureUDPScale,
		"scale": b.measureScale, "scale-jobs": b.measureScaleJobs, "jobs": b.measureJobs, "webhooks": b.measureWebhooks, "firmware": b.measureFirmware, "recorder": b.measureRecorder, "console": b.measureConsole}[name]
}

func (b *bench) leaveOut(what string) {
	b.report.LeftOut = append(b.report.LeftOut, what)
	fmt.Fprintln(b.out, "left out:", what)
}

// services finds what the external variants need.
func (b *bench) services(ctx context.Context) error {
	b.nats.stop = func() error { return nil }
	p, err := services.FindPostgres(ctx)
	if err != nil {
		b.leaveOut("variants with Postgres: " + err.Error())
	} else {
		b.postgres = p
	}
	needNATS := func(name string) bool {
		return strings.HasPrefix(name, "udp") || b.postgres != nil && slices.Contains([]string{"routed", "idle", "tls-idle", "mqtt-idle", "storm", "kill"}, name)
	}
	if slices.ContainsFunc(b.opt.only, needNATS) {
		b.nats, err = startNATS()
		return err
	}
	return nil
}

func (b *bench) add(m measurement) { b.report.Measurements = append(b.report.Measurements, m) }

// profileFile names the profile of one run, empty if none is wanted.
func (b *bench) profileFile(name string, run int) string {
	if b.opt.profiles == "" {
		return ""
	}
	return filepath.Join(b.opt.profiles, fmt.Sprintf("%s-%d.pprof", name, run+1))
}

// attempts is how often a run is made in the hope of a quiet machine.
const attempts = 3

// quietly makes one run, again while other programs disturb it, and adds the least disturbed to the samples.
func (b *bench) quietly(name string, into samples, once func(samples) error) error {
	var best samples
	for attempt := 1; ; attempt++ {
		s := samples{}
		if err := once(s); err != nil {
			return err
		}
		if best == nil || s[figureOthers][0] < best[figureOthers][0] {
			best = s
		}
		if best[figureOthers][0] <= b.opt.quiet || attempt == attempts {
			break
		}
		fmt.Fprintf(b.out, "%s: other programs took %.0f %% of the machine, once more\n", name, s[figureOthers][0])
	}
	for figure, values := range best {
		into.add(figure, values[0])
	}
	return nil
}

// progress reports what the last run of one figure was.
func (b *bench) progress(name string, run int, fleetd, baseline samples, figure string) {
	last := func(s samples, figure string) float64 {
		if v := s[figure]; len(v) > 0 {
			return v[len(v)-1]
		}
		return 0
	}
	fmt.Fprintf(b.out, "%s run %d: fleetd %.5g %s (others took %.0f %%)", name, run+1, last(fleetd, figure), figure, last(fleetd, figureOthers))
	if base := last(baseline, figure); base > 0 {
		fmt.Fprintf(b.out, ", baseline %.5g (others %.0f %%), ratio %.2f", base, last(baseline, figureOthers), last(fleetd, figure)/base)
	}
	fmt.Fprintln(b.out)
}

func commandLine(name string, arguments []string) string {
	return name + " " + strings.Join(arguments, " ")
}
