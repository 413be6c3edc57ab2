package restapi

import (
	"slices"
	"strings"
	"testing"

	"fleetd/internal/api"
	"fleetd/internal/devices"
)

func TestStats(t *testing.T) {
	f := newFleet(t)
	var got api.Stats
	f.do(t, "GET", "/v1/stats", "").json(t, &got)
	if !slices.Equal(got.Nodes, []string{"n-test"}) || !slices.Equal(got.NodesMissing, []string{"n-gone"}) || got.Step != 30 || len(got.Starts) != 1 || got.Starts[0].Node != "n-test" || len(got.Series) < 30 {
		t.Errorf("%+v", got)
	}
	for _, s := range got.Series {
		if len(s.Points) != 120 && len(s.Points) != 121 {
			t.Errorf("%s %s has %d points", s.Name, s.Value, len(s.Points))
		}
		if s.Points[0] != nil {
			t.Errorf("%s %s: the node had not started an hour ago, yet %v", s.Name, s.Value, *s.Points[0])
		}
	}
	f.do(t, "GET", "/v1/stats?node=n-test", "").json(t, &got)
	if len(got.NodesMissing) != 0 {
		t.Errorf("%+v", got.NodesMissing)
	}
	for query, want := range map[string]string{
		"since=yesterday":            "since must be a time",
		"until=2026-13-01":           "until must be a time",
		"step=x":                     "step must be a duration",
		"step=-10s":                  "step must be a duration",
		"step=15s":                   "a multiple of 10s",
		"since=2100-01-01T00:00:00Z": "since must be before until",
		"until=2020-01-01T00:00:00Z": "samples are kept for 7 days",
	} {
		if p := f.do(t, "GET", "/v1/stats?"+query, "").problem(t, 400, devices.CodeBadRequest); !strings.Contains(p.Detail, want) {
			t.Errorf("%s: %s", query, p.Detail)
		}
	}
	f.do(t, "GET", "/v1/stats?node=n-none", "").problem(t, 404, devices.CodeNotFound)
}

// The figures are of all devices: only keys that may read all devices get them, and those of a node administrators.
func TestStatsRights(t *testing.T) {
	f := newFleet(t)
	reader, lab, other := f.key(t, "reader", "devices:read", ""), f.key(t, "lab", "devices:read", "room=lab"), f.key(t, "other", "events:read", "")
	if r := f.do(t, "GET", "/v1/stats", "", as(reader)...); r.status != 200 {
		t.Errorf("%d %s", r.status, r.body)
	}
	f.do(t, "GET", "/v1/stats?node=n-test", "", as(reader)...).problem(t, 403, devices.CodeForbidden)
	f.do(t, "GET", "/v1/stats?node=n-none", "", as(reader)...).problem(t, 403, devices.CodeForbidden)
	if p := f.do(t, "GET", "/v1/stats", "", as(lab)...).problem(t, 403, devices.CodeForbidden); !strings.Contains(p.Detail, "limited to devices") {
		t.Error(p.Detail)
	}
	f.do(t, "GET", "/v1/stats", "", as(other)...).problem(t, 403, devices.CodeForbidden)
}
