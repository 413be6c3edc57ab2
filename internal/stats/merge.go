package stats

import (
	"math"

	"fleetd/internal/counters"
)

// Series is one line of a plot.
type Series struct {
	Name         string
	Label, Value string // distinguish series of one name; empty if the name has one series
	Unit         string
	// Points has one value for each step; NaN where no node has one.
	Points []float64
}

// Units of series.
const (
	UnitPerSecond = "1/s"
	UnitSeconds   = "s"
	UnitBytes     = "bytes"
	UnitCount     = "" // devices, calls, goroutines
)

// Percentiles are of the durations in a step.
var percentiles = []struct {
	suffix string
	share  float64
}{{"_p50", 0.5}, {"_p99", 0.99}}

// Merge adds up what nodes have of a range: rates and gauges are the sums over the nodes, percentiles are those of
// all their durations together, interpolated between the bounds of the histograms.
func Merge(q Range, parts []Part) (out []Series) {
	for _, s := range gauged {
		unit, factor := UnitCount, 1.0
		if s.metric == metricMemory {
			unit, factor = UnitBytes, 1024
		}
		out = append(out, s.merged(q, parts, unit, factor)...)
	}
	for _, s := range counted {
		out = append(out, s.merged(q, parts, UnitPerSecond, 1000)...)
	}
	for _, s := range timed {
		for _, p := range percentiles {
			out = append(out, Series{Name: s.name + p.suffix, Unit: UnitSeconds, Points: quantiles(q, parts, s.name, p.share)})
		}
	}
	return out
}

// merged returns the series of s: of each step, the sum over the nodes of their mean in it. Parts have the integral
// over the milliseconds that they cover.
func (s source) merged(q Range, parts []Part, unit string, factor float64) (out []Series) {
	for i := range s.width() {
		series := Series{Name: s.name, Unit: unit, Points: make([]float64, q.Steps)}
		if s.label != "" {
			series.Label, series.Value = s.label, s.values[i]
		}
		for step := range series.Points {
			total, covered := 0.0, false
			for _, p := range parts {
				if step < len(p.Covered) && p.Covered[step] > 0 {
					covered = true
					total += float64(at(p.Series[s.key(i)], step)) / float64(p.Covered[step])
				}
			}
			series.Points[step] = rounded(total * factor)
			if !covered {
				series.Points[step] = math.NaN()
			}
		}
		out = append(out, series)
	}
	return out
}

func at(values []uint64, i int) uint64 {
	if i < len(values) { // another version may leave it out
		return values[i]
	}
	return 0
}

func quantiles(q Range, parts []Part, name string, share float64) []float64 {
	points := make([]float64, q.Steps)
	for step := range points {
		var buckets [numBuckets]uint64
		for _, p := range parts {
			for b := range buckets {
				buckets[b] += at(p.Series[bucketKey(name, b)], step)
			}
		}
		points[step] = rounded(quantile(buckets, share))
	}
	return points
}

// quantile interpolates in the bucket in which it is; NaN without observations. In the last bucket, which has no
// end, it is the beginning.
func quantile(buckets [numBuckets]uint64, share float64) float64 {
	var total uint64
	for _, n := range buckets {
		total += n
	}
	if total == 0 {
		return math.NaN()
	}
	rank, below := share*float64(total), 0.0
	lower := 0.0
	for i, bound := range counters.Bounds {
		if n := float64(buckets[i]); n > 0 && below+n >= rank {
			return lower + (bound.Seconds()-lower)*(rank-below)/n
		}
		below += float64(buckets[i])
		lower = bound.Seconds()
	}
	return lower
}

// rounded has six digits, which is more than the figures have.
func rounded(x float64) float64 {
	if x == 0 || math.IsNaN(x) || math.IsInf(x, 0) {
		return x
	}
	scale := math.Pow(10, 5-math.Floor(math.Log10(math.Abs(x))))
	return math.Round(x*scale) / scale
}
