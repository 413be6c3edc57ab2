package restapi

import (
	"cmp"
	"context"
	"math"
	"net/http"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/stats"
	"fleetd/internal/timespan"
)

// usualStats is the time of an answer if its query has no since.
const usualStats = time.Hour

type statsInput struct {
	Since string `query:"since" doc:"It is RFC 3339, or a duration before now, such as 1h or 7d. The default is an hour before until. Figures are kept for 7 days."`
	Until string `query:"until" doc:"It is RFC 3339, or a duration before now. The default is now."`
	Step  string `query:"step" example:"5m" doc:"The step is a multiple of 10s, or of 5m if since is more than 24 hours ago. Without it there are at most 300 points. A series has at most 1500 points."`
	Node  string `query:"node" doc:"The answer has only the figures of this node. It needs the scope admin."`
}

func (s *Server) statsRoutes() {
	register(s, s.operation(http.MethodGet, "/v1/stats", about{id: "getStats", scope: access.ScopeRead, tag: tagNodes, summary: "Get figures over time",
		text: "Every node samples its own figures each 10 s and keeps them for 24 hours, and those of each 5 min for 7 days, in memory. The answer adds up those of all live nodes: " +
			"rates and numbers are sums, percentiles are those of all durations together and about right, because they are interpolated between the bounds of the histograms of /metrics. " +
			"The figures are of the whole fleet: a key that is limited to devices is refused.",
		answer: "The series.", codes: []devices.Code{devices.CodeNotFound}}), s.getStats)
}

func (s *Server) getStats(ctx context.Context, in *statsInput) (*answer[api.Stats], error) {
	by := caller(ctx)
	var refusal error
	switch {
	case by.Caller.Limited():
		refusal = &devices.Error{Code: devices.CodeForbidden, Detail: "the figures are of the whole fleet, and this key is limited to devices; use a key without that limit"}
	case in.Node != "" && !by.Caller.Scopes.Has(access.ScopeAdmin):
		refusal = &devices.Error{Code: devices.CodeForbidden, Detail: "the figures of one node need the scope admin; leave out node for those of the fleet"}
	}
	if refusal != nil {
		s.opt.Service.NoteRefusal(by, "getStats", "", refusal)
		return nil, refusal
	}
	q, err := in.parse(clock.Now())
	if err != nil {
		return nil, err
	}
	found, known, err := s.opt.Stats.Query(ctx, q, in.Node)
	if err != nil {
		return nil, err
	}
	if !known {
		return nil, &devices.Error{Code: devices.CodeNotFound, Detail: "there is no live node with this name; GET /v1/nodes lists them"}
	}
	return &answer[api.Stats]{newStats(found)}, nil
}

func (in *statsInput) parse(now time.Time) (stats.Range, error) {
	until, err := parseMoment("until", cmp.Or(in.Until, "0s"), now)
	if err != nil {
		return stats.Range{}, err
	}
	since, err := parseMoment("since", in.Since, now)
	if err != nil {
		return stats.Range{}, err
	}
	if since.IsZero() {
		since = until.Add(-usualStats)
	}
	var step time.Duration
	if in.Step != "" {
		if step, err = timespan.Parse(in.Step); err != nil || step <= 0 {
			return stats.Range{}, badRequest("step must be a duration such as 30s or 5m")
		}
	}
	q, err := stats.NewRange(since, until, now, step)
	if err != nil {
		return stats.Range{}, badRequest(err.Error())
	}
	return q, nil
}

func newStats(a stats.Answer) api.Stats {
	out := api.Stats{Since: api.At(a.Since()), Until: api.At(a.Until()), Step: a.Step, Nodes: append([]string{}, a.Nodes...), NodesMissing: append([]string{}, a.Missing...),
		Starts: []api.NodeStart{}, Series: []api.StatsSeries{}}
	for _, start := range a.Starts {
		out.Starts = append(out.Starts, api.NodeStart{Node: start.Node, At: api.At(start.At)})
	}
	for _, series := range a.Series {
		points := make([]*float64, len(series.Points))
		for i := range series.Points {
			if !math.IsNaN(series.Points[i]) {
				points[i] = &series.Points[i]
			}
		}
		out.Series = append(out.Series, api.StatsSeries{Name: series.Name, Label: series.Label, Value: series.Value, Unit: series.Unit, Points: points})
	}
	return out
}
