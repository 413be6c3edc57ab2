package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// samples are one side's figures, one value per run.
type samples map[string][]float64

// merge adds one run's figures. Those of the baseline's side, measured in the same run, have its mark before their names.
func (s samples) merge(baseline, run samples) {
	for figure, values := range run {
		if name, marked := strings.CutPrefix(figure, baselineMark); marked {
			baseline.add(name, values[0])
		} else {
			s.add(figure, values[0])
		}
	}
}

const baselineMark = "baseline: "

func (s samples) add(figure string, value float64) { s[figure] = append(s[figure], value) }

// raise is add for a run of several parts, of which the highest value counts.
func (s samples) raise(figure string, value float64) {
	if s[figure] == nil {
		s.add(figure, value)
	}
	s[figure][0] = max(s[figure][0], value)
}

// figureOthers is the share of the machine that programs other than the two sides and the load took: above a few per
// cent, figures of that run are too low.
const figureOthers = "CPU taken by other programs, %"

// spread sums up one figure.
type spread struct {
	Min    float64 `json:"min"`
	Median float64 `json:"median"`
	Max    float64 `json:"max"`
}

func spreadOf(values []float64) *spread {
	if len(values) == 0 {
		return nil
	}
	v := slices.Sorted(slices.Values(values))
	median := v[len(v)/2]
	if len(v)%2 == 0 {
		median = (v[len(v)/2-1] + median) / 2
	}
	return &spread{v[0], median, v[len(v)-1]}
}

func (s *spread) text(precision int) string {
	if s == nil {
		return ""
	}
	return fmt.Sprintf("%.*f / %.*f / %.*f", precision, s.Min, precision, s.Median, precision, s.Max)
}

// goalKind is what of a figure is compared with a goal, and how.
type goalKind string

// The kinds of goals. Medians are compared, except where every run counts.
const (
	ratioAtLeast goalKind = "ratio at least"
	ratioAtMost  goalKind = "ratio at most"
	atLeast      goalKind = "at least"
	atMost       goalKind = "at most"
	atMostEver   goalKind = "in every run at most"
)

// goal is what a figure should reach.
type goal struct {
	Kind  goalKind `json:"kind"`
	Limit float64  `json:"limit"`
}

// figure is one line of a table.
type figure struct {
	Name     string    `json:"name"`
	Runs     []float64 `json:"runs"`
	Fleetd   *spread   `json:"fleetd"`
	Baseline *spread   `json:"baseline,omitempty"`
	// Ratio is fleetd's value divided by that of the baseline's run just before.
	Ratio *spread `json:"ratio,omitempty"`
	Goal  *goal   `json:"goal,omitempty"`
	Met   *bool   `json:"met,omitempty"`

	precision int
}

// measurement is one table.
type measurement struct {
	Name     string   `json:"name"`
	Title    string   `json:"title"`
	Baseline string   `json:"baseline,omitempty"` // the command line
	Figures  []figure `json:"figures"`
}

// line requests a figure in a table.
type line struct {
	name      string
	precision int
	goal      *goal
}

// tabulate makes the lines of a table out of what both sides measured.
func (m *measurement) tabulate(fleetd, baseline samples, lines []line) {
	for _, l := range append(lines, line{name: figureOthers}) {
		f := figure{Name: l.name, Runs: fleetd[l.name], Fleetd: spreadOf(fleetd[l.name]), Baseline: spreadOf(baseline[l.name]), Goal: l.goal, precision: l.precision}
		if f.Fleetd == nil {
			continue
		}
		if l.name != figureOthers {
			f.Ratio = spreadOf(ratios(fleetd[l.name], baseline[l.name]))
		}
		f.judge()
		m.Figures = append(m.Figures, f)
	}
}

func ratios(fleetd, baseline []float64) []float64 {
	var r []float64
	for i := range min(len(fleetd), len(baseline)) {
		if baseline[i] != 0 {
			r = append(r, fleetd[i]/baseline[i])
		}
	}
	return r
}

// judge compares the figure with its goal, if there is one and it can be judged.
func (f *figure) judge() {
	if f.Goal == nil {
		return
	}
	var met bool
	switch f.Goal.Kind {
	case atLeast:
		met = f.Fleetd.Median >= f.Goal.Limit
	case atMost:
		met = f.Fleetd.Median <= f.Goal.Limit
	case atMostEver:
		met = f.Fleetd.Max <= f.Goal.Limit
	default:
		if f.Ratio == nil { // nothing to compare with
			return
		}
		switch f.Goal.Kind {
		case ratioAtLeast:
			met = f.Ratio.Median >= f.Goal.Limit
		case ratioAtMost:
			met = f.Ratio.Median <= f.Goal.Limit
		}
	}
	f.Met = &met
}

func (f *figure) goalText() string {
	if f.Goal == nil {
		return ""
	}
	text := fmt.Sprintf("%s %g", f.Goal.Kind, f.Goal.Limit)
	switch {
	case f.Met == nil:
		return text
	case *f.Met:
		return text + ": met"
	}
	return text + ": missed"
}

// report is everything a run of this program found.
type report struct {
	Time         time.Time     `json:"time"`
	Version      string        `json:"version"`
	Machine      string        `json:"machine"`
	Runs         int           `json:"runs"`
	Profiled     bool          `json:"profiled,omitempty"` // profiles cost some per cent
	Measurements []measurement `json:"measurements"`
	LeftOut      []string      `json:"left_out,omitempty"`
}

func machine() string {
	return fmt.Sprintf("%s/%s, %d processors, %s, loopback", runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), runtime.Version())
}

// markdown writes the tables. Every cell is min / median / max of the runs.
func (r *report) markdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "fleetd %s, %s, %s; %d runs, min / median / max.\n", r.Version, r.Time.Format(time.DateOnly), r.Machine, r.Runs)
	for _, m := range r.Measurements {
		fmt.Fprintf(&b, "\n### %s\n\n", m.Title)
		if m.Baseline != "" {
			fmt.Fprintf(&b, "Baseline: `%s`, in turn with fleetd.\n\n", m.Baseline)
		}
		b.WriteString("| figure | fleetd | baseline | ratio | goal |\n|---|---|---|---|---|\n")
		for _, f := range m.Figures {
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", f.Name, f.Fleetd.text(f.precision), f.Baseline.text(f.precision), f.Ratio.text(2), f.goalText())
		}
	}
	for _, left := range r.LeftOut {
		fmt.Fprintf(&b, "\nLeft out: %s\n", left)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// save writes the files that were asked for.
func (r *report) save(jsonFile, markdownFile string) error {
	if jsonFile != "" {
		content, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return fmt.Errorf("encode the report: %w", err)
		}
		if err := os.WriteFile(jsonFile, append(content, '\n'), 0o644); err != nil {
			return err
		}
	}
	if markdownFile == "" {
		return nil
	}
	var b strings.Builder
	if err := r.markdown(&b); err != nil {
		return err
	}
	return os.WriteFile(markdownFile, []byte(b.String()), 0o644)
}
