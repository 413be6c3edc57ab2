package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"
)

// step is what was measured with so many devices.
type step struct {
	Devices int

	gauges, connecting, idle        counters
	accepted, listed, local, routed latency
}

// figure is one line of the table of steps.
type figure struct {
	Name string `json:"name"`
	// Values are of the steps, the empty fleet first if the figure has a value there.
	Values []float64 `json:"values"`
	// Slopes are per device: of what all devices cost together, between two steps; of what one costs, the value itself.
	Slopes []float64 `json:"per_device"`
	Flat   *bool     `json:"flat,omitempty"` // nil: not judged
	unit   float64   // of the values as they are printed
	slope  float64   // of the slopes
}

// report is what a run found.
type report struct {
	Time    time.Time          `json:"time"`
	Machine string             `json:"machine"`
	Nodes   int                `json:"nodes"`
	Servers int                `json:"nats_servers"`
	Devices []int              `json:"devices"`
	Figures []figure           `json:"figures"`
	Calls   map[string]latency `json:"latencies"`
	Loss    *loss              `json:"loss"`
	Steps   []*step            `json:"-"`

	opt options
}

func newReport(o options) *report {
	return &report{Time: time.Now().UTC(), Machine: fmt.Sprintf("%s/%s, %d processors, %s", runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), runtime.Version()),
		Nodes: o.nodes, Servers: o.servers, Calls: map[string]latency{}, opt: o}
}

func (r *report) add(s *step) {
	r.Steps = append(r.Steps, s)
	r.Devices = append(r.Devices, s.Devices)
}

// line defines how a figure is taken from the steps. With together set it is the cost of all devices, so that its slope is
// that of one; otherwise it is the cost of one device already.
type line struct {
	name     string
	together bool
	unit     float64
	slope    float64
	judged   bool
	value    func(before, s *step) float64
}

// lines are the figures of the steps.
func (r *report) lines() []line {
	gauge := func(name string, unit float64, label string) line {
		return line{label, true, unit, 1, true, func(_, s *step) float64 { return s.gauges[name] }}
	}
	// idle is counted each second, and given for 1,000 devices.
	idle := func(name string, unit float64, label string) line {
		return line{label, true, unit, 1000 * unit, true, func(_, s *step) float64 {
			if s.idle == nil {
				return 0
			}
			return s.idle[name] / s.idle[wall]
		}}
	}
	// connecting is less what the devices that were there cost meanwhile, and half of the new ones.
	connecting := func(name string, unit float64, label string) line {
		return line{label, false, unit, unit, true, func(before, s *step) float64 {
			rate := s.idle[name] / s.idle[wall]
			if before.idle != nil {
				rate += before.idle[name] / before.idle[wall]
			}
			return (s.connecting[name] - rate/2*s.connecting[wall]) / float64(s.Devices-before.Devices)
		}}
	}
	time := func(label string, of func(s *step) float64, judged bool) line {
		return line{label, false, 1, 1, judged, func(_, s *step) float64 { return of(s) }}
	}
	return []line{
		gauge(nodeSubs, 1, "subscriptions on the nodes, together"),
		gauge(subscriptions, 1, "subscriptions on each NATS server, most"),
		gauge(natsHeap, 1e-6, "heap of a NATS server without JetStream, MB; slope in bytes"),
		gauge(natsEvents, 1e-6, "heap of a NATS server for JetStream, MB; slope in bytes"),
		gauge(nodesHeap, 1e-6, "heap of all nodes and devices, MB; slope in bytes"),
		gauge(nodesRoutines, 1, "goroutines"),
		connecting(cpuNodes, 1e6, "connecting: CPU of the nodes, µs"),
		connecting(cpuNATS, 1e6, "connecting: CPU of the NATS servers, µs"),
		connecting(cpuPostgres, 1e6, "connecting: CPU of Postgres, µs"),
		connecting(claimsSent, 1, "connecting: claims sent"),
		connecting(claimsTaken, 1, "connecting: claims received"),
		connecting(presenceRows, 1, "connecting: presence rows"),
		connecting(natsMessages, 1, "connecting: messages into and out of NATS servers"),
		connecting(natsBytes, 1, "connecting: bytes into and out of NATS servers"),
		time("accepted, p50, ms", func(s *step) float64 { return s.accepted.P50 }, true),
		time("accepted, p99, ms", func(s *step) float64 { return s.accepted.P99 }, false),
		time("tools listed, p50, ms", func(s *step) float64 { return s.listed.P50 }, true),
		time("tools listed, p99, ms", func(s *step) float64 { return s.listed.P99 }, false),
		idle(cpuNodes, 100, "idle: CPU of the nodes, % of a core; slope for 1,000 devices"),
		idle(cpuNATS, 100, "idle: CPU of the NATS servers, % of a core; slope for 1,000"),
		idle(cpuPostgres, 100, "idle: CPU of Postgres, % of a core; slope for 1,000"),
		idle(reasserted, 1, "idle: claims sent per second; slope for 1,000"),
		idle(claimsTaken, 1, "idle: claims received per second; slope for 1,000"),
		idle(presenceRows, 1, "idle: presence rows per second; slope for 1,000"),
		idle(natsTrafficIn, 1, "idle: messages into NATS servers per second; slope for 1,000"),
		idle(natsTrafficOut, 1, "idle: messages out of NATS servers per second; slope for 1,000"),
		idle(natsBytes, 1, "idle: bytes into and out of NATS servers per second; slope for 1,000"),
		time("call, p50, ms", func(s *step) float64 { return s.local.P50 }, true),
		time("call, p99, ms", func(s *step) float64 { return s.local.P99 }, false),
		time("routed call, p50, ms", func(s *step) float64 { return s.routed.P50 }, true),
		time("routed call, p99, ms", func(s *step) float64 { return s.routed.P99 }, false),
	}
}

// tabulate makes the figures out of the steps, of which the first is the empty fleet.
func (r *report) tabulate() {
	for _, l := range r.lines() {
		f := figure{Name: l.name, unit: l.unit, slope: l.slope}
		for i, s := range r.Steps {
			switch {
			case i == 0 && l.together:
				f.Values = append(f.Values, l.value(nil, s))
			case i > 0:
				f.Values = append(f.Values, l.value(r.Steps[i-1], s))
			}
		}
		if l.together {
			for i := 1; i < len(f.Values); i++ {
				f.Slopes = append(f.Slopes, (f.Values[i]-f.Values[i-1])/float64(r.Steps[i].Devices-r.Steps[i-1].Devices))
			}
		} else {
			f.Slopes = f.Values
		}
		if l.judged {
			f.judge(r.opt.tolerance)
		}
		r.Figures = append(r.Figures, f)
	}
}

// judge reports whether one more device costs no more in a large fleet than in a small one.
func (f *figure) judge(tolerance float64) {
	first, last := f.Slopes[0], f.Slopes[len(f.Slopes)-1]
	flat := last <= first*(1+tolerance) || last*f.slope < 0.005 // rounded to nothing
	f.Flat = &flat
}

func (r *report) write(stdout io.Writer) error {
	r.tabulate()
	text := r.markdown()
	_, err := io.WriteString(stdout, text)
	if r.opt.mdFile != "" {
		err = errors.Join(err, os.WriteFile(r.opt.mdFile, []byte(text), 0o644))
	}
	if r.opt.jsonFile != "" {
		content, encodeErr := json.MarshalIndent(r, "", "  ")
		err = errors.Join(err, encodeErr, os.WriteFile(r.opt.jsonFile, append(content, '\n'), 0o644))
	}
	return err
}

// markdown writes the two tables.
func (r *report) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s; %d nodes in one process, %d NATS servers.\n\n| figure |", r.Time.Format(time.DateOnly), r.Machine, r.Nodes, r.Servers)
	for _, s := range r.Steps {
		fmt.Fprintf(&b, " %d |", s.Devices)
	}
	for i := 1; i < len(r.Steps); i++ {
		fmt.Fprintf(&b, " per device, %d to %d |", r.Steps[i-1].Devices, r.Steps[i].Devices)
	}
	b.WriteString(" flat |\n|" + strings.Repeat("---|", 2*len(r.Steps)+1) + "\n")
	for _, f := range r.Figures {
		fmt.Fprintf(&b, "| %s |", f.Name)
		if len(f.Values) < len(r.Steps) {
			b.WriteString(" |")
		}
		for _, v := range f.Values {
			fmt.Fprintf(&b, " %s |", short(v*f.unit))
		}
		for _, v := range f.Slopes {
			if len(f.Values) < len(r.Steps) {
				b.WriteString(" |")
				continue
			}
			fmt.Fprintf(&b, " %s |", short(v*f.slope))
		}
		switch {
		case f.Flat == nil:
			b.WriteString(" |\n")
		case *f.Flat:
			b.WriteString(" yes |\n")
		default:
			b.WriteString(" **no** |\n")
		}
	}
	if r.Loss != nil {
		r.Loss.markdown(&b)
	}
	return b.String()
}

func (l *loss) markdown(b *strings.Builder) {
	fmt.Fprintf(b, "\nA node is killed with %d devices, of which %d return.\n\n| figure | all other nodes | per lost device |\n|---|---|---|\n", l.Devices, l.Returned)
	for _, name := range []string{wall, cpuNodes, cpuNATS, cpuPostgres, claimsSent, claimsTaken, claimsLost, presenceRows, staleRows, historyRows, groups,
		natsMessages, routeMessages, natsBytes, onlineEvents, offlineEvents, eventsDropped, natsCuts, slowConsumers, retriedCalls} {
		each := ""
		if l.Cost[name] != 0 && name != wall {
			each = short(l.Cost[name] / float64(l.Devices))
		}
		fmt.Fprintf(b, "| %s | %s | %s |\n", name, short(l.Cost[name]), each)
	}
	fmt.Fprintf(b, "| subscriptions on a NATS server, change | %s | |\n", short(l.Subs))
	fmt.Fprintf(b, "| from a device's return until every other node has called it, p50 / p99 / longest of %d, ms | %.0f / %.0f / %.0f | |\n", l.Callable.N, l.Callable.P50, l.Callable.P99, l.Callable.Max)
	fmt.Fprintf(b, "| from the kill until that was so for the last, s | %.1f | |\n", l.AllCallable)
	fmt.Fprintf(b, "| until the dead node was cleared away, s | %.1f | |\n", l.Cleared)
}

// short prints a figure with three digits, large ones in full.
func short(v float64) string {
	if v >= 100 || v <= -100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}
