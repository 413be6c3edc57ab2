package node

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"fleetd/internal/config"
	"fleetd/internal/counters"
)

// scraped are the metrics with their labels as Prometheus sees them, those of
// the client library included.
func scraped(t *testing.T) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	for _, m := range everyMetric(t) {
		if m.Kind != counters.KindHistogram {
			out["fleetd_"+m.Name] = m.Labels
			continue
		}
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			out["fleetd_"+m.Name+suffix] = append([]string{"le"}, m.Labels...)
		}
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		out[f.GetName()] = nil
	}
	return out
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("..", "..", path))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

var (
	metricName = regexp.MustCompile(`\b(?:fleetd|go|process)_[a-z0-9_]+`)
	selector   = regexp.MustCompile(`\b((?:fleetd|go|process)_[a-z0-9_]+)\{([^}]*)\}`)
	matcher    = regexp.MustCompile(`([a-z_]+)(?:=~|!~|!=|=)"[^"]*"`)
)

// unknown lists the metrics, and labels in their selectors, that no node has.
func unknown(expression string, metrics map[string][]string) (faults []string) {
	for _, name := range metricName.FindAllString(expression, -1) {
		if _, ok := metrics[name]; !ok {
			faults = append(faults, "no metric "+name)
		}
	}
	for _, s := range selector.FindAllStringSubmatch(expression, -1) {
		for _, m := range matcher.FindAllStringSubmatch(s[2], -1) {
			if m[1] != "instance" && m[1] != "job" && !slices.Contains(metrics[s[1]], m[1]) {
				faults = append(faults, "no label "+m[1]+" of "+s[1])
			}
		}
	}
	return faults
}

// Dashboard and alerts use only existing metrics.
func TestDashboardAndAlertsUseRealMetrics(t *testing.T) {
	metrics := scraped(t)
	if faults := unknown(`rate(fleetd_call_second_bucket[5m]) + fleetd_devices{colour="red"}`, metrics); len(faults) != 2 {
		t.Fatalf("this test does not see what is wrong: %v", faults)
	}
	var expressions []string
	var walk func(value any)
	walk = func(value any) {
		switch v := value.(type) {
		case map[string]any:
			for key, child := range v {
				if text, ok := child.(string); ok && (key == "expr" || key == "query" || key == "definition") {
					expressions = append(expressions, text)
				}
				walk(child)
			}
		case []any:
			for _, child := range v {
				walk(child)
			}
		}
	}
	var dashboard any
	if err := json.Unmarshal([]byte(read(t, "deploy/grafana/fleetd.json")), &dashboard); err != nil {
		t.Fatal(err)
	}
	walk(dashboard)
	if len(expressions) < 40 {
		t.Fatalf("the dashboard has %d expressions", len(expressions))
	}
	// The rules are checked as a whole, including the metrics in their texts.
	expressions = append(expressions, read(t, "deploy/prometheus/fleetd.rules.yml"), read(t, "deploy/prometheus/fleetd.rules_test.yml"))
	for _, expression := range expressions {
		for _, fault := range unknown(expression, metrics) {
			t.Errorf("%s: %.100s", fault, expression)
		}
	}
}

// Docs name metrics that exist; docs/reference/metrics.md is compared by TestReference.
func TestDocsNameRealMetrics(t *testing.T) {
	metrics := scraped(t)
	pages := []string{"../../README.md"}
	for _, pattern := range []string{"../../docs/*.md", "../../docs/howto/*.md"} {
		more, err := filepath.Glob(pattern)
		if err != nil || len(more) == 0 {
			t.Fatalf("%s: %d pages, %v", pattern, len(more), err)
		}
		pages = append(pages, more...)
	}
	found := 0
	for _, page := range pages {
		for _, name := range regexp.MustCompile("`(fleetd_[a-z_]*[a-z])[`{]").FindAllStringSubmatch(read(t, strings.TrimPrefix(page, "../../")), -1) {
			found++
			if _, ok := metrics[name[1]]; ok {
				continue
			}
			if _, ok := metrics[name[1]+"_count"]; !ok {
				t.Errorf("%s has a metric %s that no node has", page, name[1])
			}
		}
	}
	if found < 10 {
		t.Errorf("%d names of metrics found in docs", found)
	}
}

// Every way of starting nodes allows them enough time to stop.
func TestGracePeriods(t *testing.T) {
	needed := load(t, nil).DrainWindow + stopLimit
	for file, pattern := range map[string]string{
		"deploy/systemd/fleetd.service": `(?m)^TimeoutStopSec=(\d+)s$`,
		"deploy/kubernetes/fleetd.yaml": `(?m)^ +terminationGracePeriodSeconds: (\d+)$`,
		"docker-compose.cluster.yml":    `(?m)^  stop_grace_period: (\d+)s$`,
	} {
		found := regexp.MustCompile(pattern).FindStringSubmatch(read(t, file))
		if found == nil {
			t.Errorf("%s: no grace period", file)
			continue
		}
		given, err := time.ParseDuration(found[1] + "s")
		if err != nil || given <= needed {
			t.Errorf("%s gives a node %s to stop, which may need %s", file, given, needed)
		}
	}
}

// Every FLEETD_ variable of the files is a valid setting: with an unknown one a node
// does not start.
func TestDeployedSettingsExist(t *testing.T) {
	names := map[string]bool{}
	for _, f := range config.Flags() {
		names[f.Env] = true
	}
	for _, file := range []string{"deploy/systemd/fleetd.service", "deploy/systemd/fleetd.env", "deploy/kubernetes/fleetd.yaml", "docker-compose.cluster.yml", "docker-compose.yml"} {
		text := read(t, file)
		set := regexp.MustCompile(`(?m)^[#\s]*(?:- name: |Environment=)?(FLEETD_[A-Z0-9_]+)[:= ]`).FindAllStringSubmatch(text, -1)
		if len(set) == 0 {
			t.Errorf("%s sets nothing", file)
		}
		for _, s := range set {
			if !names[s[1]] {
				t.Errorf("%s sets %s, which is not a setting", file, s[1])
			}
		}
	}
}

// What stops a node waits for as long as it may take.
func TestGraceOfDeployments(t *testing.T) {
	cfg := load(t, nil)
	needed := cfg.DrainWindow + stopLimit
	seconds := regexp.MustCompile(`(?m)(?:stop_grace_period: |terminationGracePeriodSeconds: |TimeoutStopSec=)([0-9]+)`)
	for file, service := range map[string]string{"docker-compose.yml": "\n  fleetd:\n", "docker-compose.cluster.yml": "", "deploy/kubernetes/fleetd.yaml": "", "deploy/systemd/fleetd.service": ""} {
		_, text, _ := strings.Cut("\n"+read(t, file), service)
		found := seconds.FindStringSubmatch(text)
		if found == nil {
			t.Errorf("%s has no grace", file)
			continue
		}
		if n, err := strconv.Atoi(found[1]); err != nil || time.Duration(n)*time.Second <= needed {
			t.Errorf("%s gives a node %s s to stop; it may take %v", file, found[1], needed)
		}
	}
}

// The placeholder of the manifests is refused.
func TestPlaceholderSecret(t *testing.T) {
	placeholder := regexp.MustCompile(`FLEETD_SECRET: "([^"]+)"`).FindStringSubmatch(read(t, "deploy/kubernetes/fleetd.yaml"))
	if placeholder == nil {
		t.Fatal("the manifests have no secret")
	}
	// security: N37
	if _, err := config.Load(map[string]string{"secret": placeholder[1]}, nil); err == nil || !strings.Contains(err.Error(), "openssl rand") {
		t.Errorf("a node starts with the placeholder: %v", err)
	}
}
