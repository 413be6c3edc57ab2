package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

// statsLine is one line of `fleetd fleet --since`: the sum of series with a name.
type statsLine struct {
	title  string
	series string
	// values are those of the label that count; empty: all.
	values []string
	format func(float64) string
}

var statsLines = []statsLine{
	{"online", "online", nil, plainNumber},
	{"connects/s", "connects", nil, plainNumber},
	{"closes/s", "closes", nil, plainNumber},
	{"OTA checks/s", "ota_checks", nil, plainNumber},
	{"calls/s", "calls", nil, plainNumber},
	{"failed calls/s", "calls", []string{"tool_error", "timeout", "refused"}, plainNumber},
	{"call p50", "call_p50", nil, secondsText},
	{"call p99", "call_p99", nil, secondsText},
	{"hello p99", "hello_p99", nil, secondsText},
	{"handshake p99", "handshake_p99", nil, secondsText},
	{"events lost/s", "events_dropped", nil, plainNumber},
	{"memory", "memory", nil, func(n float64) string { return strconv.FormatFloat(n/(1<<20), 'f', 0, 64) + "MiB" }},
}

func plainNumber(n float64) string {
	if n >= 100 {
		return strconv.FormatFloat(n, 'f', 0, 64)
	}
	return strconv.FormatFloat(n, 'g', 3, 64)
}

func secondsText(n float64) string {
	return time.Duration(n * float64(time.Second)).Round(10 * time.Microsecond).String()
}

// Of the drawing.
const (
	titleWidth  = 15
	figureWidth = 26 // "  max 1.23ms   last 1.23ms"
	maxDrawn    = 300
	minDrawn    = 20
	noFigure    = "-"
)

// coarse is the smallest step of the server for times of more than a day, fine that of others. The clock of the server
// may be another one, so that a little less than a day is drawn in coarse steps as well.
const (
	coarse, fine = 5 * time.Minute, 10 * time.Second
	mostFine     = 23 * time.Hour
)

// history prints the figures since a time: drawn on a terminal, else one line for each step.
func (cmd *fleetCmd) history(ctx context.Context, a *app, c *apiclient.Client) error {
	if cmd.Select != "" {
		return failed("--since shows the whole fleet; leave out %q", cleantext.Line(cmd.Select))
	}
	now := a.now()
	since, err := moment(cmd.Since, now, -1)
	if err != nil {
		return failed("--since %w", err)
	}
	step := time.Duration(0)
	if a.columns > 0 && !cmd.JSON {
		step = drawnStep(now.Sub(since), min(max(a.columns-titleWidth-figureWidth, minDrawn), maxDrawn))
	}
	query := apiclient.Query{"since": since.UTC().Format(time.RFC3339)}
	if step > 0 {
		query["step"] = step.String()
	}
	show := listStats
	if a.columns > 0 {
		show = drawStats
	}
	return printAnswer(ctx, a, c, cmd.JSON, func(s api.Stats) error { return show(a, s) }, query, "stats")
}

// drawnStep is the smallest step that the server takes with which a time has at most so many points.
func drawnStep(span time.Duration, points int) time.Duration {
	unit := fine
	if span > mostFine {
		unit = coarse
	}
	wanted := span / time.Duration(points-1) // one more begins before the time
	return max((wanted+unit-1)/unit*unit, unit)
}

// points adds up the series of a line; NaN is a gap.
func (l statsLine) points(s api.Stats) []float64 {
	var sum []float64
	for _, series := range s.Series {
		if series.Name != l.series || len(l.values) > 0 && !slices.Contains(l.values, series.Value) {
			continue
		}
		if sum == nil {
			sum = make([]float64, len(series.Points))
		}
		for i, p := range series.Points[:min(len(sum), len(series.Points))] {
			if p == nil {
				sum[i] = math.NaN()
			} else {
				sum[i] += *p
			}
		}
	}
	return sum
}

func (l statsLine) text(n float64) string {
	if math.IsNaN(n) {
		return noFigure
	}
	return l.format(n)
}

// statsHead names the time, the step and the nodes.
func statsHead(s api.Stats) string {
	head := fmt.Sprintf("%s to %s, step %s", s.Since.UTC().Format(time.RFC3339), s.Until.UTC().Format(time.RFC3339), time.Duration(s.Step)*time.Second)
	if len(s.Nodes) > 0 {
		head += ", nodes: " + strings.Join(s.Nodes, " ")
	}
	if len(s.NodesMissing) > 0 {
		head += "; no answer from: " + strings.Join(s.NodesMissing, " ")
	}
	return cleantext.Line(head)
}

func drawStats(a *app, s api.Stats) error {
	var out strings.Builder
	out.WriteString(statsHead(s) + "\n")
	width := 0
	for _, l := range statsLines {
		points := l.points(s)
		width = max(width, len(points))
		highest, last := math.NaN(), math.NaN()
		for _, p := range points {
			if !math.IsNaN(p) {
				last = p
				if math.IsNaN(highest) || p > highest {
					highest = p
				}
			}
		}
		fmt.Fprintf(&out, "%-*s%s  max %-8s last %s\n", titleWidth, l.title, spark(points, highest), l.text(highest), l.text(last))
	}
	marks := []rune(strings.Repeat(" ", width))
	for _, start := range s.Starts {
		if i := int((start.At.Unix() - s.Since.Unix()) / max(s.Step, 1)); i >= 0 && i < width {
			marks[i] = '^'
		}
	}
	if text := strings.TrimRight(string(marks), " "); text != "" {
		fmt.Fprintf(&out, "%-*s%s\n", titleWidth, "node starts", text)
	}
	_, err := a.stdout.Write([]byte(out.String()))
	return err
}

// spark draws points from 0 to the highest; a gap is blank.
func spark(points []float64, highest float64) string {
	bars := []rune("▁▂▃▄▅▆▇█")
	line := make([]rune, len(points))
	for i, p := range points {
		switch {
		case math.IsNaN(p):
			line[i] = ' '
		case highest <= 0:
			line[i] = bars[0]
		default:
			line[i] = bars[min(int(max(p, 0)/highest*float64(len(bars))), len(bars)-1)]
		}
	}
	return string(line)
}

func listStats(a *app, s api.Stats) error {
	fmt.Fprintln(a.stderr, "fleetd: "+statsHead(s))
	for _, start := range s.Starts {
		fmt.Fprintln(a.stderr, "fleetd: node "+cmp.Or(cleantext.Line(start.Node), noFigure)+" started "+start.At.UTC().Format(time.RFC3339))
	}
	head := []string{"TIME"}
	var columns [][]float64
	for _, l := range statsLines {
		head = append(head, strings.ReplaceAll(strings.ToUpper(l.title), " ", "_"))
		columns = append(columns, l.points(s))
	}
	first := firstFigure(columns)
	if first > 0 {
		fmt.Fprintln(a.stderr, "fleetd: there are no figures from before "+s.Since.Add(time.Duration(int64(first)*s.Step)*time.Second).UTC().Format(time.RFC3339))
	}
	rows := [][]string{head}
	for i := first; i < len(columns[0]); i++ {
		row := []string{s.Since.Add(time.Duration(int64(i)*s.Step) * time.Second).UTC().Format(time.RFC3339)}
		for c, l := range statsLines {
			text := noFigure
			if i < len(columns[c]) {
				text = l.text(columns[c][i])
			}
			row = append(row, text)
		}
		rows = append(rows, row)
	}
	return a.table(a.stdout, "", rows)
}

// firstFigure is the first step of which a column has a figure; 0 if none has.
func firstFigure(columns [][]float64) int {
	for i := range columns[0] {
		for _, points := range columns {
			if i < len(points) && !math.IsNaN(points[i]) {
				return i
			}
		}
	}
	return 0
}
